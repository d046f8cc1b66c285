"""Matrices of few bits, each number times a scale, as modules in the place of others."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models.parameters import Module
from jaxlm.models.quantize_config import Quantization, QuantizeKind
from jaxlm.parallel.rules import GROUPS
from kernels_pallas.quantized_matmul import dequantize, quantize


class QuantizedMatrix(Module):
    """A matrix that is not trained, as numbers of few bits and float32 scales; it may be stacked.

    Inputs are one dimension, K: values are [K, *outputs], of int4 two in a byte [K/2, *outputs], and scales
    [groups, *outputs] (`kernels_pallas.quantized_matmul`). Both keep their dtype, whatever the model computes in.

    Attributes:
      axes, inputs, shape: those of the matrix that it stands for, of all layers where it is stacked.
    """

    values: nnx.Param
    scales: nnx.Param

    def __init__(self, matrix: nnx.Param, quantization: Quantization):
        """Quantise a matrix, each of its layers by itself."""
        self.kind: QuantizeKind = quantization.kind
        self.axes, self.inputs, self.shape = matrix.axes, matrix.inputs, matrix.shape
        values, scales = quantized(matrix[...], matrix.axes, matrix.inputs, quantization)
        first = matrix.axes.index(matrix.inputs[0])
        stack, outputs = matrix.axes[:first], matrix.axes[first + len(matrix.inputs) :]
        one, groups = matrix.inputs[0], matrix.inputs[0] + GROUPS
        own = {"by_outputs": False, "kept": (), "keeps_dtype": True}
        self.values = nnx.Param(values, axes=(*stack, one, *outputs), inputs=(one,), **own)
        self.scales = nnx.Param(scales, axes=(*stack, groups, *outputs), inputs=(groups,), **own)

    def widened(self) -> jax.Array:
        """Return the matrix in float32, with its inputs apart."""
        values, scales = self.values[...], self.scales[...]
        outputs = len(self.outputs)
        stacked = values.ndim - 1 - outputs

        def one(values: jax.Array, scales: jax.Array) -> jax.Array:
            return dequantize(values.reshape(len(values), -1), scales.reshape(len(scales), -1), self.kind)

        for _ in range(stacked):
            one = jax.vmap(one)
        return one(values, scales).reshape(*values.shape[:stacked], *self.input_sizes, *values.shape[stacked + 1 :])

    @property
    def outputs(self) -> tuple[str, ...]:
        """The axes of its outputs."""
        return self.axes[self.axes.index(self.inputs[0]) + len(self.inputs) :]

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """The sizes of its inputs."""
        first = self.axes.index(self.inputs[0])
        return self.shape[first : first + len(self.inputs)]


def quantized(
    matrix: jax.Array, axes: Sequence[str], inputs: Sequence[str], quantization: Quantization
) -> tuple[jax.Array, jax.Array]:
    """Return values and scales of a matrix [stack…, *inputs, *outputs], as `QuantizedMatrix` has them."""
    first = axes.index(inputs[0])
    stack, outputs = matrix.shape[:first], matrix.shape[first + len(inputs) :]
    size = math.prod(matrix.shape[first : first + len(inputs)])

    def one(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        kind, group = quantization.kind, quantization.group_of(size)
        values, scales = quantize(matrix.reshape(size, -1).astype(jnp.float32), kind, group)
        return values.reshape(-1, *outputs), scales.reshape(-1, *outputs)

    # One after the other: the float32 numbers of all would be twice the matrices.
    values, scales = jax.lax.map(one, matrix.reshape(-1, *matrix.shape[first:])) if stack else one(matrix)
    return values.reshape(*stack, *values.shape[len(stack) :]), scales.reshape(*stack, *scales.shape[len(stack) :])
