"""State that counts move after each update: the selection biases of mixtures (arXiv:2408.15664, algorithm 1)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlm.models import tree as model_tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.parameters import rate_of
from jaxlm.models.tree import Tree


def moved(
    model: ModelConfig,
    tree: nnx.State,
    parameters: Tree,
    counts: Mapping[str, jax.Array],
    scales: Mapping[str, float],
) -> Tree:
    """Return parameters whose state has moved by its rate, up where a count is below the mean of its layer, down where
    it is above.

    Args:
      tree: the abstract tree of the parameters.
      counts: of a step, by the name of the state, whole numbers [layers that have it, *shape] in layer order.
      scales: by path, what multiplies the rate.
    """
    layers_of = model_tree.state_layers(model)
    rates = model_tree.paths(model_tree.read(tree, rate_of))

    def of(path: tuple, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not (rate := rates[name] * scales.get(name, 1.0)):
            return x
        kind = name.rpartition("/")[2]
        in_order = sorted(
            layer for other, layers in layers_of.items() if other.endswith(f"/{kind}") for layer in layers
        )
        count = counts[kind][np.searchsorted(in_order, layers_of[name])]
        return x + rate * _towards_mean(count)

    return jax.tree_util.tree_map_with_path(of, parameters)


def _towards_mean(count_LE: jax.Array) -> jax.Array:
    """Return the sign of the mean of a layer less each count, float32, by whole numbers: a mean would be rounded."""
    count_LE = count_LE.astype(jnp.int32)
    total_L1, size = jnp.sum(count_LE, axis=-1, keepdims=True), count_LE.shape[-1]
    below_L1, rest_L1 = total_L1 // size, total_L1 % size  # the mean is below + rest / size
    is_mean_LE = (count_LE == below_L1) & (rest_L1 == 0)
    return jnp.where(is_mean_LE, 0.0, jnp.where(count_LE > below_L1, -1.0, 1.0))
