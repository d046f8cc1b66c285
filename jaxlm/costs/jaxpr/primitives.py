"""The cost of one equation of a jaxpr by itself: FLOPs and bytes of each JAX primitive.

Conventions:

- A multiplication and an addition are two FLOPs. Complex numbers count as real ones.
- An elementwise primitive has one FLOP per floating point number that it computes, be it an addition, a logarithm or a
  tanh. Primitives without floating point results have none (comparisons, logic, integers, random bits), nor do
  primitives that only move numbers (select, convert, broadcast, transpose, sort).
- A reduction of n numbers to m has n − m FLOPs; a cumulative one has n − (number of rows). A combining scatter has one
  per number of its update.
- Products of a convolution with padding or with the holes of a dilation are not counted, as in XLA's HloCostAnalysis.
- Bytes are those of the distinct operands and of the results, as if nothing were fused and nothing stayed in a cache.
  Literals are part of the instruction. A view (reshape, a name, a sharding constraint) moves nothing. Slices, gathers
  and scatters move the indices and the slice itself, not the array around it: updates happen in place.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core import Literal as Constant

Kind = Literal["matmul", "elementwise", "reduction", "kernel", "collective", "movement"]


class EquationCost(NamedTuple):
    """The cost of one execution of an equation. `assumed`: its primitive is unknown, and counts one FLOP per number."""

    kind: Kind
    flops: int
    bytes_in: int
    bytes_out: int
    assumed: bool = False


# Pallas kernels, launched by `pl.pallas_call` and by `pl.kernel` over a mesh of cores or warpgroups.
_KERNELS = {"pallas_call", "mpmd_map"}

_MATMUL = {"dot_general", "ragged_dot_general", "scaled_dot"}

_ELEMENTWISE = set(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz conj cos cosh
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le le_to lgamma log log1p
    logistic lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or population_count pow rem round rsqrt
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
    """.split()
)

_REDUCTION = set(
    "argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split()
)
_CUMULATIVE = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
_WINDOW = {"reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"}

_MOVEMENT = set(
    """
    approx_top_k broadcast_in_dim clone complex concatenate convert_element_type copy copy_p imag iota new_ref pad
    philox2x32 philox4x32 random_bits random_fold_in random_seed random_split real reduce_precision rev
    rng_bit_generator rng_uniform select_n sort split stack threefry2x32 threefry4x32 tile top_k transpose unstack
    """.split()
)

# Annotations, and other names of the same bytes.
_VIEW = set(
    """
    add_dependency after_all axis_index bitcast_convert_type create_token debug_callback debug_print device_put empty
    empty2 expand_dims free_ref freeze layout_constraint name optimization_barrier pcast platform_index preduced pvary
    random_clone random_unwrap random_wrap reduced_vary_cast reshape reshard sharding_constraint squeeze stop_gradient
    vary_unreduced_cast
    """.split()
)

# The operand that a partial access moves; None means the result. The other operands are indices.
_PART = {
    "slice": None,
    "dynamic_slice": None,
    "gather": None,
    "get": None,
    "dynamic_update_slice": 1,
    "swap": 1,
    "addupdate": 1,
    "scatter": 2,
    "scatter-add": 2,
    "scatter-sub": 2,
    "scatter-mul": 2,
    "scatter-min": 2,
    "scatter-max": 2,
}
_COMBINING = {"addupdate", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"}

# XLA's name of each collective.
COLLECTIVES = {
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "unreduced_psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}

KNOWN = frozenset(
    {"conv_general_dilated", *_KERNELS}.union(
        _MATMUL, _ELEMENTWISE, _REDUCTION, _CUMULATIVE, _WINDOW, _MOVEMENT, _VIEW, _PART, COLLECTIVES
    )
)


def equation_cost(eqn: JaxprEqn) -> EquationCost:
    """Return the cost of one execution of an equation, without the jaxprs in its parameters.

    Raises ValueError for a Pallas kernel that states no cost.
    """
    name, operands, results = eqn.primitive.name, eqn.invars, eqn.outvars
    whole = _bytes(_distinct(operands)), _bytes(results)
    floats = sum(_size(v) for v in results if _floating(v))

    if name in _VIEW:
        return EquationCost("movement", 0, 0, 0)
    if name in _MATMUL:
        return EquationCost("matmul", _dot_flops(eqn), *whole)
    if name == "conv_general_dilated":
        return EquationCost("matmul", _convolution_flops(eqn), *whole)
    if name in _KERNELS:
        return _kernel(eqn, whole[1])
    if name in COLLECTIVES:
        return EquationCost("collective", 0, *whole)
    if name in _PART:
        part = results[0] if _PART[name] is None else operands[_PART[name]]
        size, indices = _bytes([part]), _bytes(v for v in operands[1:] if v is not part)
        if name not in _COMBINING:
            return EquationCost("movement", 0, size + indices, size)
        return EquationCost("reduction", _size(part) if _floating(part) else 0, 2 * size + indices, size)
    if name in _REDUCTION:
        reduced = sum(_size(v) for v in operands[: len(results)]) if floats else 0
        return EquationCost("reduction", max(reduced - floats, 0), *whole)
    if name in _CUMULATIVE:
        length = operands[0].aval.shape[eqn.params["axis"]]
        return EquationCost("reduction", floats - floats // max(length, 1), *whole)
    if name in _WINDOW:
        return EquationCost("reduction", floats * (math.prod(eqn.params["window_dimensions"]) - 1), *whole)
    if name in _MOVEMENT:
        return EquationCost("movement", 0, *whole)
    return EquationCost("elementwise", floats, *whole, assumed=name not in _ELEMENTWISE)


def _dot_flops(eqn: JaxprEqn) -> int:
    """Return 2 · batch · left · right · contracted. Groups of a ragged product share the rows and do not multiply."""
    left, right = (v.aval.shape for v in eqn.invars[:2])
    if eqn.primitive.name == "ragged_dot_general":
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        (_, contracting), (_, batch) = ragged.dot_dimension_numbers
        shared = {*contracting, *batch, *ragged.rhs_group_dimensions}
    else:
        (_, contracting), (_, batch) = eqn.params["dimension_numbers"]
        shared = {*contracting, *batch}
    return 2 * math.prod(map(int, left)) * math.prod(int(n) for i, n in enumerate(right) if i not in shared)


def _convolution_flops(eqn: JaxprEqn) -> int:
    """Return 2 · (pairs of an output and an input number that the kernel joins), for each channel of both."""
    numbers, parameters = eqn.params["dimension_numbers"], eqn.params
    image, kernel = (v.aval.shape for v in eqn.invars)
    output = eqn.outvars[0].aval.shape
    # Specs name batch (or output channel), channel and the spatial dimensions, in that order.
    places = zip(
        (image[i] for i in numbers.lhs_spec[2:]),
        (kernel[i] for i in numbers.rhs_spec[2:]),
        (output[i] for i in numbers.out_spec[2:]),
        parameters["window_strides"],
        parameters["padding"],
        parameters["lhs_dilation"],
        parameters["rhs_dilation"],
        strict=True,
    )
    joined = 1
    for inputs, taps, outputs, stride, (before, _), holes, spread in places:
        at = np.arange(outputs)[:, None] * stride + np.arange(taps)[None] * spread - before
        joined *= int(np.sum((at >= 0) & (at % holes == 0) & (at < (inputs - 1) * holes + 1)))
    batch, channels = output[numbers.out_spec[0]], output[numbers.out_spec[1]]
    return 2 * int(batch) * int(channels) * int(kernel[numbers.rhs_spec[1]]) * joined


def _kernel(eqn: JaxprEqn, results: int) -> EquationCost:
    """Return the cost that a Pallas kernel states; a transcendental is one FLOP, as everywhere."""
    cost = eqn.params["cost_estimate"]
    if cost is None:
        name = eqn.params.get("name") or "without a name"
        raise ValueError(f"the Pallas kernel {name} states no cost: pass cost_estimate=pl.CostEstimate(…) to its call")
    written = min(results, int(cost.bytes_accessed))
    return EquationCost(
        "kernel", int(cost.flops) + int(cost.transcendentals), int(cost.bytes_accessed) - written, written
    )


def _distinct(operands: Iterable[Any]) -> list[Any]:
    """Drop repeated operands: x · x reads x once."""
    return list({id(v): v for v in operands}.values())


def _size(variable: Any) -> int:
    return math.prod(int(n) for n in getattr(variable.aval, "shape", ()))


def _floating(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _bytes(variables: Iterable[Any]) -> int:
    return sum(_size(v) * bits(v.aval.dtype) // 8 for v in variables if _occupies_memory(v))


def _occupies_memory(variable: Any) -> bool:
    return not isinstance(variable, Constant) and hasattr(variable.aval, "dtype")


def bits(dtype: Any) -> int:
    """Return the bits of one number; two int4 share a byte."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * dtype.itemsize  # bool, complex, keys of random numbers
