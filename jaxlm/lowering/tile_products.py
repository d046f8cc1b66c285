"""The work on tiles that one iteration of a kernel's hot loop asks for, read from the traced kernel.

Machine code that multiplies more than that does work twice: for example, two warpgroups compute the same scores. What
the copy engine (TMA) moves can only be read here, since its instructions name no sizes.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

_LAUNCHES = ("pallas_call", "mpmd_map")
_LOOPS = ("scan", "while")
_WARPGROUP = 4  # warps that share a product of Mosaic GPU


class TileWork(NamedTuple):
    """The work of one warp in one iteration of a kernel's hot loop.

    Attributes:
      multiply_adds: that its matrix products need. Products of float32 count twice, for they are multiplied as tf32.
      copied: bytes that the copy engine moves from or to device memory.
    """

    multiply_adds: int = 0
    copied: int = 0


def tile_work(program: Jaxpr) -> dict[str, TileWork]:
    """Return the work on tiles in the hot loop of each kernel, by name.

    The hot loop is the innermost loop with the most products, or else with the most copies; a kernel with neither in
    its loops counts as a whole, as in `sass.HotLoop`. All warps of a block share the work of Triton's kernels, and the
    four of a warpgroup that of Mosaic GPU's.
    """
    work = {}
    for kernel in _equations(program):
        if kernel.primitive.name in _LAUNCHES:
            hottest = max((_work(body, kernel) for body in _inner_loops(kernel)), default=TileWork())
            work[kernel.params["name"]] = hottest if any(hottest) else _work(kernel, kernel)
    return work


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


def _work(part: JaxprEqn, kernel: JaxprEqn) -> TileWork:
    """Return one warp's share of all products and copies inside an equation of a kernel."""
    equations, warps = list(_inside(part)), _warps(kernel)
    return TileWork(*(sum(map(count, equations)) // warps for count in (_multiply_adds, _copied)))


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


def _copied(eqn: JaxprEqn) -> int:
    """Return the bytes of a copy between device memory and shared memory."""
    operands = {"copy_gmem_to_smem": 3, "copy_smem_to_gmem": 2}.get(eqn.primitive.name)  # indices follow
    if operands is None:
        return 0
    source, tree = eqn.invars[0].aval, eqn.params["src_transforms_treedef"]
    for transform in tree.unflatten(eqn.invars[operands : operands + tree.num_leaves]):
        source = transform.transform_type(source)
    return math.prod(source.shape) * source.dtype.itemsize


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
