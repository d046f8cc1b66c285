"""Matrices of few bits, each number times a scale, as modules in the place of others."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models.parameters import STACKED, Module
from jaxlm.models.quantize_config import Quantization, QuantizeKind
from jaxlm.parallel.rules import GROUPS
from kernels_pallas.quantized_matmul import dequantize, quantize


class QuantizedMatrix(Module):
    """A matrix that is not trained, as numbers of few bits and their scales; it may be stacked, and of experts.

    Inputs are one dimension, K, and stand before the outputs: values are [K, *outputs], of two numbers in a byte
    [K/2, *outputs], and scales [groups, *outputs] (`kernels_pallas.quantized_matmul`). Both keep their dtype, whatever
    the model computes in.

    Attributes:
      axes, inputs, shape: those of the matrix that it stands for, of all layers where it is stacked.
    """

    values: nnx.Param
    scales: nnx.Param

    def __init__(self, matrix: nnx.Param, quantization: Quantization):
        """Quantise a matrix, each of its layers and experts by itself."""
        self.kind: QuantizeKind = quantization.kind
        self.axes, self.inputs, self.shape = matrix.axes, matrix.inputs, matrix.shape
        values, scales = quantized(matrix[...], matrix.axes, matrix.inputs, quantization)
        stack, outputs = _stack(self.axes), self.outputs
        one, groups = matrix.inputs[0], matrix.inputs[0] + GROUPS
        own = {"by_outputs": False, "keeps_dtype": True}
        for name, value, axis in (("values", values, one), ("scales", scales, groups)):
            # An engine on a CPU keeps each expert by its outputs.
            kept = ("experts", *outputs, axis) if "experts" in stack else ()
            setattr(self, name, nnx.Param(value, axes=(*stack, axis, *outputs), inputs=(axis,), kept=kept, **own))

    def widened(self) -> jax.Array:
        """Return the matrix in float32, as it was declared."""
        values, scales = self.values[...], self.scales[...]
        outputs = len(self.outputs)
        stacked = values.ndim - 1 - outputs

        def one(values: jax.Array, scales: jax.Array) -> jax.Array:
            return dequantize(values.reshape(len(values), -1), scales.reshape(len(scales), -1), self.kind)

        for _ in range(stacked):
            one = jax.vmap(one)
        whole = one(values, scales).reshape(*values.shape[:stacked], *self.input_sizes, *values.shape[stacked + 1 :])
        own = (*self.inputs, *self.outputs)
        order = [stacked + own.index(axis) for axis in self.axes if axis in own]
        return whole.transpose(*range(stacked), *order)

    @property
    def of_experts(self) -> bool:
        """True if it is of the experts of a mixture: values are then [experts, K, outputs]."""
        return "experts" in self.axes

    @property
    def outputs(self) -> tuple[str, ...]:
        """The axes of its outputs."""
        return tuple(axis for axis in self.axes if axis not in (*_stack(self.axes), *self.inputs))

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """The sizes of its inputs."""
        first = self.axes.index(self.inputs[0])
        return self.shape[first : first + len(self.inputs)]


def _stack(axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes along which matrices are many of a kind, which stand first."""
    return tuple(axis for axis in axes if axis in STACKED)


def quantized(
    matrix: jax.Array, axes: Sequence[str], inputs: Sequence[str], quantization: Quantization
) -> tuple[jax.Array, jax.Array]:
    """Return values and scales of a matrix with these axes, as `QuantizedMatrix` has them."""
    stacked, first = len(_stack(axes)), axes.index(inputs[0])
    stack = matrix.shape[:stacked]
    size = math.prod(matrix.shape[first : first + len(inputs)])
    outputs = tuple(n for axis, n in zip(axes, matrix.shape, strict=True) if axis not in (*_stack(axes), *inputs))

    def one(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        kind, group = quantization.kind, quantization.group_of(size)
        by_inputs = matrix.reshape(size, -1) if first == stacked else matrix.reshape(-1, size).T
        values, scales = quantize(by_inputs.astype(jnp.float32), kind, group)
        return values.reshape(-1, *outputs), scales.reshape(-1, *outputs)

    # One after the other: the float32 numbers of all would be twice the matrices.
    values, scales = jax.lax.map(one, matrix.reshape(-1, *matrix.shape[stacked:])) if stack else one(matrix)
    return values.reshape(*stack, -1, *outputs), scales.reshape(*stack, -1, *outputs)
