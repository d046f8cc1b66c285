"""Every implementation, interpreted, against the reference in float32: results, gradients, and twice the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import check

from kernels_pallas import log_softmax, softmax
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


@pytest.mark.parametrize("implementation", ["triton", "mosaic_tpu"])
@pytest.mark.parametrize("function", [softmax, log_softmax])
@pytest.mark.parametrize("width", [32, 37])
def test_rows_of_minus_infinity_are_those_of_the_reference(function, width, implementation):
    """NaN where a row has nothing else, at any width; with a mask besides, whatever the reference says."""
    x = jnp.zeros((4, width)).at[:2].set(-jnp.inf).at[2, 1:].set(-jnp.inf)
    where = jnp.arange(width)[None] % jnp.array([[1], [2], [1], [2]]) == 0
    for mask in (None, where):
        got = function(x, mask, implementation=implementation, _interpret=True)
        np.testing.assert_allclose(got, function(x, mask, implementation="reference"), rtol=1e-6)
        assert jnp.isnan(got[0]).all()
