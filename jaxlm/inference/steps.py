"""Prefill and decode: the two steps of generation, as pure functions of plain trees that any mesh can shard."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.inference.cache import DenseCache
from jaxlm.models.positions import cache_causal_mask
from jaxlm.models.tree import Tree
from jaxlm.parallel.partition import constrain


def prefill(
    graph: nnx.GraphDef, parameters: Tree, tokens_BT: jax.Array, length_B: jax.Array, cache: DenseCache
) -> tuple[jax.Array, DenseCache]:
    """Read prompts into an empty cache.

    Args:
      graph: of `models.tree.abstract`.
      parameters: in the dtype to compute in.
      tokens_BT: int32 prompts, padded on the right with any token.
      length_B: int32 tokens of each prompt, at least 1.
      cache: with room for at least T tokens.

    Returns float32 logits [B, V] of the token after each prompt, and the cache.
    """
    module = nnx.merge(graph, parameters)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    seen = cache_causal_mask(positions_BT, length_B)
    hidden_BTD, cache, _ = module.hidden(tokens_BT, positions_BT, seen, cache=cache)
    last_B1D = jnp.take_along_axis(hidden_BTD, (length_B - 1)[:, None, None], axis=1)
    return _logits(module, last_B1D), cache.advance(length_B)


def decode_step(
    graph: nnx.GraphDef, parameters: Tree, tokens_B: jax.Array, cache: DenseCache
) -> tuple[jax.Array, DenseCache]:
    """Read one token more of each sequence. Return float32 logits [B, V] of the one after it, and the cache."""
    module = nnx.merge(graph, parameters)
    positions_B1 = cache.length[:, None]
    seen = cache_causal_mask(positions_B1, cache.length + 1)
    hidden_B1D, cache, _ = module.hidden(tokens_B[:, None], positions_B1, seen, cache=cache)
    return _logits(module, hidden_B1D), cache.advance(jnp.ones_like(cache.length))


def _logits(module: nnx.Module, hidden_B1D: jax.Array) -> jax.Array:
    return constrain(module.logits(hidden_B1D)[:, 0], "batch", "act_vocab")
