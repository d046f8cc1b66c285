"""Every implementation, interpreted, against the reference in float32: results, gradients, and twice the same."""

import jax
import pytest
from agreement import check

from kernels_pallas.registry import OPERATIONS

CALLS = [
    pytest.param(
        *(operation, case, dtype, implementation),
        id=f"{operation.name}-{case.name}-{dtype}-{implementation}",
        marks=[pytest.mark.slow] if implementation == "mosaic_gpu" else [],
    )
    for operation in OPERATIONS.values()
    for implementation in operation.implementations
    for case, dtype in operation.served(implementation, "test")
    if not (implementation == "mosaic_tpu" and dtype == "float16")
]


@pytest.mark.parametrize("operation, case, dtype, implementation", CALLS)
def test_kernels_give_what_the_reference_gives(operation, case, dtype, implementation):
    check(operation, case, dtype, implementation)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))
def test_on_a_cpu_the_reference_runs(operation):
    """None means the reference here, and a kernel by name is refused."""
    case = operation.used_in("test")[0]
    arguments = case.draw("float32")
    text = str(jax.make_jaxpr(lambda a: operation.function(**a, **case.options))(arguments))
    assert "pallas_call" not in text
    for name in operation.implementations:
        with pytest.raises(NotImplementedError, match=f"{operation.name}: {name} cannot serve this call: it runs on"):
            operation.function(**arguments, **case.options, implementation=name)
    with pytest.raises(ValueError, match=f"{operation.name}: there is no implementation 'cuda'; there are reference"):
        operation.function(**arguments, **case.options, implementation="cuda")
