"""The matrices of the experts of a mixture, whole or quantised."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models.doors.expert_rows import PARTS
from jaxlm.models.logical_axes import Axes
from jaxlm.models.quantized_matrix import QuantizedMatrix
from jaxlm.parallel.partition import constrain, shards_of

PlacedArray = tuple[jax.Array, Axes]  # an array with its logical axes
Experts = nnx.Param | QuantizedMatrix  # [E, outputs, inputs], or values and scales, whose inputs stand first


def for_parts(x_BTD: jax.Array, axes: Axes, matrix: Experts, parts: Sequence[str]) -> PlacedArray | None:
    """Return x [*parts, B, T, D] for the devices that have parts of the experts or of their hidden channels; None where
    there is one.

    Each has x to itself, so that its gradients, which are parts of sums, are added before they are sent.
    """
    sizes = {PARTS[0]: num_experts(matrix), PARTS[1]: outputs_of(matrix)}
    of_parts = [(part, sizes[part]) for part in parts]
    shards = [shards_of(*each, after=of_parts[:i]) for i, each in enumerate(of_parts)]
    if max(shards) == 1:
        return None
    x = jnp.broadcast_to(x_BTD[(None,) * len(parts)], (*shards, *x_BTD.shape))
    return constrain(x, *parts, *axes), (*parts, *axes)


def num_experts(matrix: Experts) -> int:
    """Return the number of experts."""
    return arrays_of(matrix)[0][...].shape[0]


def outputs_of(matrix: Experts) -> int:
    """Return the number of outputs of an expert."""
    return matrix.values[...].shape[2] if isinstance(matrix, QuantizedMatrix) else matrix[...].shape[1]


def arrays_of(matrix: Experts) -> tuple[nnx.Param, ...]:
    """Return the arrays of a matrix: itself, or values and scales."""
    return (matrix.values, matrix.scales) if isinstance(matrix, QuantizedMatrix) else (matrix,)


def output_axis(matrix: Experts) -> str:
    """Return the logical axis of the outputs of an expert."""
    (output,) = matrix.outputs if isinstance(matrix, QuantizedMatrix) else matrix.axes[-2:-1]
    return output
