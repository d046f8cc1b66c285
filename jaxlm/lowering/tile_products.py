"""The matrix products that one iteration of a kernel's hot loop needs, read from the traced kernel.

Machine code that multiplies more than that does work twice: for example, two warpgroups compute the same scores.
"""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

_LAUNCHES = ("pallas_call", "mpmd_map")
_LOOPS = ("scan", "while")
_WARPGROUP = 4  # warps that share a product of Mosaic GPU


def needed_multiply_adds(program: Jaxpr) -> dict[str, int]:
    """Return the matrix multiply-adds that a warp needs to do in one iteration of each kernel's hot loop, by name.

    The hot loop is the innermost loop with the most products, as in `sass.HotLoop`; a kernel without loops counts as a
    whole. All warps of a block share a product of Triton's, and the four of a warpgroup one of Mosaic GPU's. Products
    of float32 count twice, for they are multiplied as tf32. A kernel without products needs 0.
    """
    return {
        eqn.params["name"]: max((_products(body, _warps(eqn)) for body in _inner_loops(eqn)), default=0)
        or _products(eqn, _warps(eqn))
        for eqn in _equations(program)
        if eqn.primitive.name in _LAUNCHES
    }


def _equations(*jaxprs: Any) -> Iterator[JaxprEqn]:
    """Yield all equations of programs, at any depth; those of kernels after their launches."""
    for jaxpr in jaxprs:
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            yield eqn
            yield from _equations(*jaxprs_in_params(eqn.params))


def _inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    return _equations(*jaxprs_in_params(eqn.params))


def _inner_loops(kernel: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yield the loops that have no other loop inside."""
    for eqn in _inside(kernel):
        if eqn.primitive.name in _LOOPS and not any(inner.primitive.name in _LOOPS for inner in _inside(eqn)):
            yield eqn


def _warps(kernel: JaxprEqn) -> int:
    """Return the warps that share a product."""
    return getattr(kernel.params["compiler_params"], "num_warps", None) or _WARPGROUP


def _products(eqn: JaxprEqn, warps: int) -> int:
    """Return the multiply-adds of one warp for all products inside an equation."""
    return sum(map(_multiply_adds, _inside(eqn))) // warps


def _multiply_adds(eqn: JaxprEqn) -> int:
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval
        k, sums = math.prod(left.shape[i] for i in contracted), eqn.outvars[0].aval
    elif eqn.primitive.name == "wgmma_ref":
        sums, left = _wgmma_operands(eqn)
        k = left.shape[1]
    else:
        return 0
    return math.prod(sums.shape) * k * (2 if left.dtype == "float32" else 1)


def _wgmma_operands(eqn: JaxprEqn) -> tuple[Any, Any]:
    """Return the accumulator and the left operand as a product of Mosaic GPU's sees them: tiles, slices, transposed."""
    leaves = list(eqn.invars[3:])
    seen = []
    for name, operand in zip(("acc", "a"), eqn.invars, strict=False):
        tree, view = eqn.params[f"{name}_transforms_tree"], operand.aval
        if tree is not None:
            mine, leaves = leaves[: tree.num_leaves], leaves[tree.num_leaves :]
            for transform in tree.unflatten(mine):
                view = transform.transform_type(view)
        seen.append(view)
    return seen[0], seen[1]
