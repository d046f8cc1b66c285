"""Muon over declared matrices, one per layer; optax's default takes what has two dimensions."""

import math
from collections.abc import Callable
from functools import partial

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxlm.models.tree import Dimensions, Tree
from jaxlm.training.config import MuonConfig

# 0.2 is about the root mean square of AdamW's updates (arXiv:2502.16982, section 2.2).
_ADAM_RMS = 0.2


def is_orthogonal(d: Dimensions) -> bool:
    """Whether Muon orthogonalises this parameter's update: the matrices that are no embedding or unembedding."""
    return bool(d.inputs) and not d.table


def scale_by_muon_and_adam(settings: MuonConfig, dimensions: Tree) -> optax.GradientTransformation:
    """Directions: orthogonal ones for the matrices inside the layers, Adam's for every other parameter.

    optax's Newton–Schulz iteration with Jordan's coefficients (3.4445, −4.7750, 2.0315), in float32, batched over the
    stack; each matrix is [inputs, outputs] with heads and head width flattened together.
    """
    kinds = jax.tree.map(lambda d: "muon" if is_orthogonal(d) else "adam", dimensions)

    def of_matrices(function: Callable, updates: Tree) -> Tree:
        """function(dimensions, update) of each matrix; what stands where optax masked a parameter out stays."""
        return jax.tree.map(lambda d, u: function(d, u) if is_orthogonal(d) else u, dimensions, updates)

    def scaled(d: Dimensions, u: jax.Array) -> jax.Array:
        inputs, outputs = (math.prod(u.shape[i] for i in side) for side in (d.inputs, d.outputs))
        return u * (_ADAM_RMS * math.sqrt(max(inputs, outputs)))

    muon = optax.chain(
        scale_by_muon(
            ns_steps=settings.iterations,
            beta=settings.momentum,
            nesterov=settings.nesterov,
            weight_dimension_numbers=partial(of_matrices, lambda d, _: MuonDimensionNumbers(d.inputs, d.outputs)),
        ),
        optax.stateless(lambda updates, _: of_matrices(scaled, updates)),
    )
    adam = optax.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon)
    return optax.partition({"muon": muon, "adam": adam}, kinds)
