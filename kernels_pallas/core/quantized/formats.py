"""Kinds of quantised matrices: how numbers and scales are stored, rounded and read back."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core import checks


@dataclasses.dataclass(frozen=True)
class QuantizedKind:
    """A way to store a matrix [K, N] in few bits.

    Attributes:
      dtype: of `values`. packed: whether one of them holds the numbers of two inputs, as nibbles.
      scale_dtype: of `scales`: float32, or uint8, the exponents of E8M0.
      most: the largest magnitude that quantising gives.
      unit: the value of a step of the stored integers, by which scales are multiplied.
      group: the only size of a group of inputs, where there is one; 0 is all inputs.
      rounds_rows: whether a product also rounds the rows of x, each to int8 with a scale of its own.
    """

    dtype: str
    most: float
    packed: bool = False
    scale_dtype: str = "float32"
    unit: float = 1.0
    group: int | None = None
    rounds_rows: bool = False


KINDS = {
    "int8": QuantizedKind("int8", 127),
    # −8 is read, but not written: with it one sign would have a step more than the other, and half a step no bound.
    "int4": QuantizedKind("uint8", 7, packed=True),
    "fp8": QuantizedKind("float8_e4m3fn", 448),
    "w8a8": QuantizedKind("int8", 127, group=0, rounds_rows=True),
    # E2M1 are integers of half units.
    "mxfp4": QuantizedKind("uint8", 6, packed=True, scale_dtype="uint8", unit=0.5, group=32),
}
_BIAS = 127  # of the exponent of float32 and of E8M0
_NAN = 255  # in E8M0
_SMALLEST = float(jnp.finfo(jnp.float32).tiny)


def quantize(matrix: jax.Array, kind: str, group: int | tuple[int, int] | None = None) -> tuple[jax.Array, jax.Array]:
    """Return the values and scales of a matrix [K, N], for `quantized_matmul`.

    Numbers are rounded to the nearest; those of a group share a scale, by which its largest magnitude becomes the
    largest that `kind` writes: 127 of "int8", 7 of "int4", 448 of "fp8". The error of integers is at most half a scale,
    that of "fp8" 1/16 of the number or 2⁻¹⁰ of a scale. Scales of "mxfp4" are powers of two, as in section 6.3 of the
    OCP Microscaling Formats specification (1.0), but doubled where the group's largest magnitude would otherwise exceed
    6, so that none is clipped. Zeros stay zeros. A group with a NaN or an infinity becomes NaN as a whole.

    Matrices by their outputs have both results transposed, of any kind.

    Args:
      matrix: [K, N] of floating point; of more dimensions by `jax.vmap`.
      kind: "int8", "w8a8", "int4", "fp8" or "mxfp4".
      group: the inputs, or the inputs and outputs, that share a scale; None is all inputs of an output, or 32 of
        "mxfp4". They divide K and N; those of "int4" are even, those of "w8a8" all inputs.

    Raises ValueError for a kind that does not exist and groups that do not divide the matrix.
    """
    known = of("quantize", kind)
    checks.floating("quantize", matrix=matrix)
    if matrix.ndim != 2:
        raise ValueError(f"quantize: matrix has shape {list(matrix.shape)}; it must be [K, N]")
    K, N = matrix.shape
    inputs, outputs = (known.group or K, 1) if group is None else (group, 1) if isinstance(group, int) else group
    if not (0 < inputs <= K and 0 < outputs <= N) or K % inputs or N % outputs:
        raise ValueError(f"quantize: groups of {inputs} × {outputs} do not divide a matrix of {K} × {N}")
    _check_group("quantize", kind, inputs, K)
    grouped = matrix.astype(jnp.float32).reshape(K // inputs, inputs, N // outputs, outputs)
    largest = jnp.max(jnp.abs(grouped), axis=(1, 3))
    # XLA's maximum on a CPU may ignore NaN.
    is_finite = jnp.all(jnp.isfinite(grouped), axis=(1, 3))
    if known.scale_dtype == "uint8":
        fraction, exponent = jnp.frexp(largest)  # largest = fraction · 2^exponent, fraction in [½, 1)
        exponent = jnp.where(fraction > 0.75, exponent - 2, exponent - 3)  # 6 = ¾ · 2³
        codes = jnp.where(largest > 0, jnp.clip(exponent + _BIAS, 1, _NAN - 1), 1)
        scales = jnp.where(is_finite, codes, _NAN).astype(jnp.uint8)
    else:
        scales = jnp.where(is_finite, jnp.maximum(largest / known.most, _SMALLEST), jnp.nan)
    per_value = widened_scales(scales)[:, None, :, None]
    units = jnp.where(is_finite[:, None, :, None], grouped / per_value, 0.0).reshape(K, N)
    units = jnp.clip(units, -known.most, known.most)
    if kind == "fp8":
        return units.astype(jnp.float8_e4m3fn), scales
    if kind == "mxfp4":
        return _packed(_to_e2m1(units), inputs), scales
    numbers = jnp.round(units).astype(jnp.int8)
    return (_packed(numbers, inputs) if known.packed else numbers), scales


def dequantize(values: jax.Array, scales: jax.Array, kind: str, *, by_outputs: bool = False) -> jax.Array:
    """Return the matrix of which `values` and `scales` are, in float32: [K, N], or [N, K] by its outputs.

    Raises ValueError for operands that do not fit.
    """
    check("dequantize", values, scales, kind, by_outputs)
    if by_outputs:
        return dequantize(values.T, scales.T, kind).T
    numbers = unpacked(values, kind, scales.shape[0], jnp.float32)
    K, N = numbers.shape
    grouped = numbers.reshape(scales.shape[0], K // scales.shape[0], scales.shape[1], -1)
    return (grouped * unit_scales(scales, kind)[:, None, :, None]).reshape(K, N)


def of(operation: str, kind: Any) -> QuantizedKind:
    """Return a kind by its name; ValueError where there is none."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{operation}: there is no kind {kind!r}; there are {', '.join(KINDS)}")
    return KINDS[kind]


def check(
    operation: str, values: Any, scales: Any, kind: str, by_outputs: bool, stacked: bool = False
) -> tuple[int, int]:
    """Check a quantised matrix, or a stack of some; return K and N."""
    known = of(operation, kind)
    checks.array(operation, values=values, scales=scales)
    checks.boolean(operation, by_outputs=by_outputs)
    for name, x, dtype in (("values", values, known.dtype), ("scales", scales, known.scale_dtype)):
        if x.dtype != jnp.dtype(dtype) or x.ndim != 2 + stacked:
            wanted = f"{dtype} [{'·, ' * stacked}·, ·]"
            raise ValueError(f"{operation}: {name} of {kind} are {x.dtype}{list(x.shape)}; they must be {wanted}")
    if stacked and (len(values) == 0 or len(values) != len(scales)):
        raise ValueError(f"{operation}: {len(scales)} scales are of {len(values)} matrices; both must be as many, > 0")
    (K, N), groups = (x.shape[:-3:-1] if by_outputs else x.shape[-2:] for x in (values, scales))
    K = 2 * K if known.packed else K
    if 0 in groups or K % groups[0] or N % groups[1]:
        raise ValueError(
            f"{operation}: {groups[0]} × {groups[1]} scales do not divide a matrix of {K} inputs and {N} outputs"
        )
    _check_group(operation, kind, K // groups[0], K)
    return K, N


def _check_group(operation: str, kind: str, inputs: int, all_inputs: int) -> None:
    known = KINDS[kind]
    only = all_inputs if known.group == 0 else known.group
    if only not in (None, inputs) or known.packed and inputs % 2:
        wanted = "an even number of" if only is None else only
        raise ValueError(f"{operation}: groups of {kind} have {wanted} inputs, not {inputs}")


def widened_scales(scales: jax.Array) -> jax.Array:
    """Return scales in float32, also of E8M0, whose 255 is NaN."""
    if scales.dtype != jnp.uint8:
        return scales
    exponents = scales.astype(jnp.int32)
    powers = jax.lax.bitcast_convert_type(exponents << 23, jnp.float32)
    powers = jnp.where(exponents == 0, 2.0**-_BIAS, powers)  # below the smallest normal number
    return jnp.where(exponents == _NAN, jnp.nan, powers)


def unit_scales(scales: jax.Array, kind: str) -> jax.Array:
    """Return float32 scales of the numbers that `unpacked` returns."""
    wide = widened_scales(scales)
    return wide if KINDS[kind].unit == 1 else wide * KINDS[kind].unit


def unpacked(values: jax.Array, kind: str, groups: int, dtype: Any, axis: int = 0) -> jax.Array:
    """Return the stored numbers [K, N] in `dtype` of values with so many groups of inputs along an axis."""
    if not KINDS[kind].packed:
        return values.astype(dtype)
    shape = values.shape
    apart = values.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    numbers = jnp.concatenate([half.astype(dtype) for half in halves(apart, kind)], axis=axis + 1)
    return numbers.reshape(*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])


def halves(values: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Return the numbers in the low and in the high nibbles, of the first and of the second half of each group, in
    int32: TPUs shift no narrower integers."""
    wide = values.astype(jnp.int32)
    if kind == "int4":
        return (wide << 28) >> 28, (wide << 24) >> 28
    return _from_e2m1(wide & 15), _from_e2m1(wide >> 4)


def largest_divisor(n: int, most: int) -> int:
    """Return the largest divisor of n that is at most `most`."""
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)


def _packed(codes: jax.Array, inputs: int) -> jax.Array:
    """Return nibbles [K, N] packed along K, [K/2, N], in groups of so many inputs."""
    K, N = codes.shape
    first, second = jnp.split(codes.astype(jnp.uint8).reshape(K // inputs, 2, inputs // 2, N), 2, axis=1)
    return ((first & 15) | (second << 4)).reshape(K // 2, N)


# The half units of the eight codes of E2M1 without a sign, four bits each, the first in the lowest bits.
_HALF_UNITS = np.array(0xC8643210, np.uint32).astype(np.int32).item()


def _from_e2m1(code: jax.Array) -> jax.Array:
    """Return the half units in a nibble: a sign, two bits of exponent, one of mantissa."""
    magnitude = jax.lax.shift_right_logical(jnp.full_like(code, _HALF_UNITS), (code & 7) << 2) & 15
    return jnp.where(code >= 8, -magnitude, magnitude)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Numbers between two neighbours; one on the border goes to the neighbour whose mantissa is even.
_BORDERS = (_E2M1[1:] + _E2M1[:-1]) / 2


def _to_e2m1(units: jax.Array) -> jax.Array:
    magnitude = jnp.abs(units)
    above = [magnitude >= border if i % 2 else magnitude > border for i, border in enumerate(_BORDERS.tolist())]
    code = sum(each.astype(jnp.uint8) for each in above)
    return code | jnp.where(jnp.signbit(units) & (code > 0), jnp.uint8(8), jnp.uint8(0))
