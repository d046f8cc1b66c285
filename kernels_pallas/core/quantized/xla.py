"""A product with a quantised matrix as XLA runs it.

XLA on a CPU converts a whole matrix into a buffer of its own before it multiplies. Here a loop converts a block at a
time, which stays in the cache: matrices by outputs in blocks of outputs, whose sums are over all inputs at once;
others in blocks of inputs, which are added. On other chips XLA fuses the conversion or writes the matrix in x's dtype.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.fp8 import from_bytes
from kernels_pallas.core.one_column import times_column
from kernels_pallas.core.quantized.formats import KINDS, dequantize, halves, largest_divisor, unit_scales, unpacked
from kernels_pallas.core.rounding import rounded_rows
from kernels_pallas.core.unfused import unfused

_BLOCK = 32 * 2048  # numbers of a block, of about this many


def product(x: jax.Array, values: jax.Array, scales: jax.Array, *, kind: str, by_outputs: bool = False) -> jax.Array:
    """Return x · matrix, [M, N] in x's dtype, of rows x [M, K]."""
    if KINDS[kind].rounds_rows:
        return _of_integers(x, values, scales, by_outputs)

    def on_cpu(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
        wide = x.astype(np.promote_types(x.dtype, jnp.float32))
        wide = _of_two_rows(wide)
        if kind == "fp8":  # of XLA's own conversion a product takes nine times as long
            values = jax.lax.bitcast_convert_type(values, jnp.int8)
        blocks = _in_blocks_of_outputs if by_outputs else _in_blocks_of_inputs
        return blocks(wide, values, scales, kind)[: len(x)].astype(x.dtype)

    def elsewhere(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
        return _product(x, values, scales, kind, by_outputs)

    return jax.lax.platform_dependent(x, values, scales, cpu=on_cpu, default=elsewhere)


def gradient(d_y: jax.Array, values: jax.Array, scales: jax.Array, *, kind: str, by_outputs: bool) -> jax.Array:
    """Return d_y · matrixᵀ, [M, K] in d_y's dtype, of rows d_y [M, N]. The matrix is written in that dtype."""
    wide = np.promote_types(d_y.dtype, jnp.float32)
    matrix = dequantize(values, scales, kind, by_outputs=by_outputs).astype(d_y.dtype)
    contracted = (((1,), (0 if by_outputs else 1,)), ((), ()))
    return jax.lax.dot_general(d_y, matrix, contracted, preferred_element_type=wide).astype(d_y.dtype)


def _of_two_rows(x: jax.Array) -> jax.Array:
    """Return x with two rows or more: the product of one row is another kernel on a CPU, with other bits, and of
    integers thirty times slower."""
    return jnp.pad(x, ((0, 1), (0, 0))) if len(x) == 1 else x


def _of_integers(x: jax.Array, values: jax.Array, scales: jax.Array, by_outputs: bool) -> jax.Array:
    """Return x · matrix, of rows that are rounded to int8: products and sums are of integers, and exact."""
    numbers, of_row = rounded_rows(_of_two_rows(x))
    contracted = (((1,), (1 if by_outputs else 0,)), ((), ()))
    sums = jax.lax.dot_general(numbers, values, contracted, preferred_element_type=jnp.int32)
    per_output = jnp.repeat(scales.reshape(1, -1), sums.shape[1] // scales.size, axis=1)
    y = unfused(sums.astype(jnp.float32) * of_row * per_output)  # biases and adapters are added to it
    return y[: len(x)].astype(x.dtype)


def _product(x: jax.Array, values: jax.Array, scales: jax.Array, kind: str, by_outputs: bool) -> jax.Array:
    wide, axis = np.promote_types(x.dtype, jnp.float32), 1 if by_outputs else 0
    contracted = (((1,), (axis,)), ((), ()))
    if scales.shape[axis] > 1:  # a scale of all inputs multiplies the sum, others the matrix
        matrix = dequantize(values, scales, kind, by_outputs=by_outputs).astype(x.dtype)
        return jax.lax.dot_general(x, matrix, contracted, preferred_element_type=wide).astype(x.dtype)
    numbers = unpacked(values, kind, 1, x.dtype, axis)
    sums = jax.lax.dot_general(x, numbers, contracted, preferred_element_type=wide)
    per_output = jnp.repeat(unit_scales(scales, kind).reshape(1, -1), sums.shape[1] // scales.size, axis=1)
    return (sums * per_output).astype(x.dtype)


def _in_blocks_of_outputs(x: jax.Array, values: jax.Array, scales: jax.Array, kind: str) -> jax.Array:
    """Return x [M, K] · matrix, of values by outputs. A row's sums are in an order of their own."""
    N, (outputs, groups) = len(values), scales.shape
    per_output = jnp.repeat(unit_scales(scales, kind), N // outputs, axis=0)
    # x in the order of the stored values, of bytes with two numbers once for each, so that nothing is interleaved.
    sides = jnp.moveaxis(x.reshape(len(x), groups, 1 + KINDS[kind].packed, -1), 2, 0)
    sides = sides.reshape(len(sides), len(x), -1)

    def one(_: None, block: tuple) -> tuple[None, jax.Array]:
        values, scales = block
        sums = jnp.zeros((), x.dtype)
        for side, each in zip(sides, halves(values, kind) if KINDS[kind].packed else (values,), strict=True):
            numbers = (from_bytes(each) if kind == "fp8" else each).astype(x.dtype)
            if groups > 1:
                numbers = (numbers.reshape(len(values), groups, -1) * scales[:, :, None]).reshape(values.shape)
            if len(numbers) == 1:
                sums += times_column(side, numbers[0])
                continue
            # With the matrix first it is another kernel, with other bits, where there are a multiple of 64 rows.
            sums += jax.lax.dot_general(side, numbers, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)
        return None, sums * scales.T if groups == 1 else sums

    # Two blocks at least: XLA joins a single one with what is added to the result, which then is rounded otherwise.
    width = min(max(1, N // 2), max(1, _BLOCK // x.shape[1]))
    whole = N // width * width
    blocks = (each[:whole].reshape(whole // width, width, -1) for each in (values, per_output))
    _, sums = jax.lax.scan(one, None, tuple(blocks))
    sums = jnp.moveaxis(sums, 0, 1).reshape(len(x), whole)
    if whole < N:
        sums = jnp.concatenate([sums, one(None, (values[whole:], per_output[whole:]))[1]], axis=1)
    return sums


def _in_blocks_of_inputs(x: jax.Array, values: jax.Array, scales: jax.Array, kind: str) -> jax.Array:
    """Return x [M, K] · matrix, of values by inputs."""
    (M, K), N, (groups, outputs) = x.shape, values.shape[1], scales.shape
    per_output = jnp.repeat(unit_scales(scales, kind), N // outputs, axis=1)
    inputs = K // groups
    # A block is a part of a group or some groups; of packed groups whole ones alone.
    rows = max(32, min(2 * M, 512))  # of many rows of x the sums are long, and adding to them takes longer
    whole = largest_divisor(groups, max(1, rows // inputs))
    is_part = whole == 1 and len(values) == K
    height = largest_divisor(inputs, rows) if is_part else whole * inputs

    def one(total: jax.Array, block: tuple) -> tuple[jax.Array, None]:
        x, values, scales = block
        numbers = from_bytes(values).astype(x.dtype) if kind == "fp8" else unpacked(values, kind, whole, x.dtype)
        if whole > 1:
            numbers = (numbers.reshape(whole, inputs, N) * scales[:, None]).reshape(height, N)
        sums = jax.lax.dot_general(x, numbers, (((1,), (0,)), ((), ())), preferred_element_type=x.dtype)
        return total + (sums * scales if whole == 1 else sums), None

    steps = K // height
    blocks = (
        x.reshape(M, steps, height).swapaxes(0, 1),
        values.reshape(steps, -1, N),
        jnp.repeat(per_output, max(1, steps // groups), axis=0).reshape(steps, -1, N),
    )
    total, _ = jax.lax.scan(one, jnp.zeros((M, N), x.dtype), blocks)
    return total
