"""Logical axes through mathematics between doors: what a jaxpr's equations do to the dimensions of an array.

Axes follow the equations alone. Two arrays of one shape may be of different axes: a transposed one of one token is.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import jaxprs_in_params


class Factor(NamedTuple):
    """A logical axis, or None, and its size in the recording."""

    axis: str | None
    size: int


# Of each dimension the axes that it is a product of: a reshape may join several, the innermost last.
Dimensions = tuple[tuple[Factor, ...], ...]

# Each number of the result depends on the numbers at the same place of operands that have its shape.
_NUMBER_BY_NUMBER = frozenset(
    "abs add and atan2 cbrt ceil clamp convert_element_type copy cos cosh cumlogsumexp cummax cummin cumprod cumsum "
    "div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne "
    "neg not or pow reduce_precision rem rev round rsqrt select_n sharding_constraint sign sin sinh sqrt square sub "
    "tan tanh xor".split()
)
# The result has the dimensions of its first operand, some of other sizes.
_SAME_DIMENSIONS = frozenset({"slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate", "sort"})
_REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
)


def dimensions(axes: Sequence[str | None], shape: Sequence[int]) -> Dimensions:
    """Return the dimensions of an array with these logical axes."""
    return tuple((Factor(axis, size),) for axis, size in zip(axes, shape, strict=True))


def unnamed(shape: Sequence[int]) -> Dimensions:
    """Return the dimensions of an array whose axes are unknown."""
    return dimensions((None,) * len(shape), shape)


def factors(array: Dimensions) -> tuple[Factor, ...]:
    """Return the axes of all dimensions in order."""
    return tuple(factor for dimension in array for factor in dimension)


def through(eqn: Any, operands: Sequence[Dimensions | None]) -> Dimensions | None:
    """Return the dimensions of an equation's only result. An operand whose axes are unknown is None; the result is None
    if no operand's axes are known, or if the result's axes do not follow from them."""
    name, params = eqn.primitive.name, eqn.params
    shape = tuple(eqn.outvars[0].aval.shape)
    if not operands or all(each is None for each in operands):
        return None
    if name in _NUMBER_BY_NUMBER:
        pairs = zip(eqn.invars, operands, strict=True)
        return _merged([each for atom, each in pairs if each is not None and tuple(atom.aval.shape) == shape])
    first = operands[0]
    if first is None:
        return None
    if name == "transpose":
        return tuple(first[i] for i in params["permutation"])
    if name == "broadcast_in_dim":
        result = list(unnamed(shape))
        for i, at in enumerate(params["broadcast_dimensions"]):
            if _size(first[i]) == shape[at]:
                result[at] = first[i]
        return tuple(result)
    if name == "squeeze":
        return tuple(each for i, each in enumerate(first) if i not in params["dimensions"])
    if name == "reshape":
        return _reshaped(first, shape)
    if name in _REDUCTIONS:
        return tuple(each for i, each in enumerate(first) if i not in params["axes"])
    if name in _SAME_DIMENSIONS:
        pairs = zip(first, shape, strict=True)
        return tuple(each if _size(each) == size else _resized(each, size) for each, size in pairs)
    return None


def _size(dimension: Sequence[Factor]) -> int:
    return math.prod(factor.size for factor in dimension)


def _resized(dimension: tuple[Factor, ...], size: int) -> tuple[Factor, ...]:
    return (Factor(dimension[0].axis if len(dimension) == 1 else None, size),)


def _merged(arrays: Sequence[Dimensions]) -> Dimensions | None:
    """Return each dimension as in the first array whose axes of that dimension are known."""
    if not arrays:
        return None
    known = [[each for each in same if any(factor.axis for factor in each)] for same in zip(*arrays, strict=True)]
    return tuple(named[0] if named else same for named, same in zip(known, arrays[0], strict=True))


def _reshaped(array: Dimensions, shape: tuple[int, ...]) -> Dimensions:
    """Return the dimensions after a reshape: each takes as many axes in order as its size holds."""
    left, result = list(factors(array)), []
    for at, size in enumerate(shape):
        taken: list[Factor] = []
        while left and math.prod(each.size for each in taken) < size:
            taken.append(left.pop(0))
        if size == 1 and left and left[0].size == 1 and len(left) > len(shape) - at - 1:
            taken.append(left.pop(0))
        if at == len(shape) - 1:
            taken += left
        if math.prod(each.size for each in taken) == size:
            result.append(tuple(taken) or (Factor(None, size),))
        else:  # an axis is divided
            result.append((Factor(None, size),))
            if (rest := math.prod(each.size for each in taken) // size) > 1:
                left.insert(0, Factor(None, rest))
    return tuple(result)


def products_inside(eqn: Any, products: frozenset[str]) -> bool:
    """Return whether the jaxprs in an equation's parameters have one of these primitives."""
    for inner in jaxprs_in_params(eqn.params):
        for each in inner.eqns:
            if each.primitive.name in products or products_inside(each, products):
                return True
    return False
