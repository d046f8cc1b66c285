"""Norms of every layer: of its gradients, and of the residual stream after it."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models import tree as model_tree
from jaxlm.models.execution_config import ExecutionConfig
from jaxlm.models.positions import packed_causal_mask
from jaxlm.models.transformer import Transformer
from jaxlm.models.tree import Tree


def of_gradients(gradients: Tree, tree: nnx.State) -> dict[str, jax.Array]:
    """Return the Euclidean norm of each parameter's gradient by path, float32 []; per layer if it is stacked, [L]."""
    axes = model_tree.paths(model_tree.read(tree, lambda leaf: leaf.axes.count("layers")))

    def norm(gradient: jax.Array, stacked: int) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(gradient.astype(jnp.float32)), axis=range(stacked, gradient.ndim)))

    return {path: norm(gradient, axes[path]) for path, gradient in model_tree.paths(gradients).items()}


def squares(module: Transformer, batch: dict[str, jax.Array], execution: ExecutionConfig) -> jax.Array:
    """Return the mean square of the residual stream after each layer, without dropout, summed over the targets, [L]."""
    counts_BT = batch["segments"] > 0

    def observe(x_BTD: jax.Array) -> dict[str, jax.Array]:
        squares_BT = jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), axis=-1)
        return {"squares": jnp.sum(jnp.where(counts_BT, squares_BT, 0.0))}

    positions = batch["positions"]
    _, _, auxiliary = module.residual(
        batch["tokens"], positions, packed_causal_mask(positions), execution=execution, observe=observe
    )
    return auxiliary.statistics["squares"]
