"""Stated costs of operations against those that jaxlm counts of their kernels, and of their references."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from jaxlm.costs.jaxpr.count import count
from kernels_pallas.core import interpreted
from kernels_pallas.core.registry import OPERATIONS
from kernels_pallas.grouped_matmul.xla import tile_rows

CALLS = [
    pytest.param(operation, name, id=f"{operation.name}-{name}")
    for operation in OPERATIONS.values()
    for name in operation.implementations
]


def both_ways(operation, case, **how):
    """Return the case forward and backward as one function, and its arguments."""
    structs = case.structs(case.dtypes[0])
    inputs = {name: structs.pop(name) for name in case.differentiable()}

    def run(inputs, others):
        results, pull_back = jax.vjp(lambda i: operation.function(**i, **others, **case.options, **how), inputs)
        return results, pull_back(results)

    return run, inputs, structs


@pytest.mark.parametrize("operation, implementation", CALLS)
@interpreted()
def test_kernels_carry_the_stated_cost(operation, implementation):
    cases = operation.used_in("compile")
    case = next(case for case in cases if operation.serves(implementation, case, case.dtypes[0]))
    run, inputs, others = both_ways(operation, case, implementation=implementation)
    # XLA's loop over tiles, with as many full tiles as there are rows; how often it reads a matrix, sizes decide.
    in_loop = operation.name == "quantized_grouped_matmul"
    trips = None
    if in_loop:
        rows, groups = (len(case.structs(case.dtypes[0])[name]) for name in ("x", "sizes"))
        trips = rows // tile_rows(rows, groups)
    counted = count(run, inputs, others, trips=trips)
    # Where XLA computes products around an operation's kernels, the stated cost includes them.
    kernels = [row for row in counted.rows if row.kind in ("kernel", "matmul")]
    takes_one = "implementation" in inspect.signature(operation.costs).parameters
    of_one = {"implementation": implementation} if takes_one else {}
    stated = operation.costs(**case.structs(case.dtypes[0]), **case.options, **of_one)
    for phase, cost in zip(("forward", "backward"), stated, strict=True):
        here = [row for row in kernels if row.phase == phase]
        assert sum(row.flops for row in here) == cost.flops
        if not (in_loop and phase == "backward"):
            assert sum(row.bytes_in + row.bytes_out for row in here) == cost.bytes


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))
def test_stated_flops_are_about_those_of_the_reference(operation):
    """FLOPs agree within a factor of two: a kernel recomputes what the reference saves, and leaves out constants.

    Attention also leaves out the half of the scores that a causal mask hides: 7 products of 16. The reference of
    products of groups multiplies every row with every matrix. The delta rule inverts a matrix of each chunk, which its
    recurrence has no need of.
    """
    case = operation.used_in("compile")[0]
    repeated = case.arrays["sizes"].shape[0] if operation.name.endswith("grouped_matmul") else 1
    counted = count(*both_ways(operation, case, implementation="reference"))
    stated = operation.costs(**case.structs(case.dtypes[0]), **case.options)
    least = 0.4 if operation.name == "flash_attention" else 0.5
    most = 2.5 if operation.name == "gated_delta_rule" else 2.0
    assert least <= repeated * (stated.forward.flops + stated.backward.flops) / counted.flops <= most


@interpreted()
def test_vmap_multiplies_the_cost():
    operation = OPERATIONS["rms_norm"]
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    stack = jax.ShapeDtypeStruct((5, 8, 128), jnp.float32)
    norm = jax.vmap(lambda x: operation.function(x, implementation="triton"))
    assert sum(row.flops for row in count(norm, stack).rows) == 5 * operation.costs(x).forward.flops
