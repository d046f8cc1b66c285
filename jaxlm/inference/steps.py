"""Prefill and decode: the two steps of generation, as pure functions of plain trees that any mesh can shard."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.inference.cache import Cache
from jaxlm.models.positions import cache_causal_mask
from jaxlm.models.tree import Tree
from jaxlm.parallel.partition import constrain


def prefill(
    graph: nnx.GraphDef, parameters: Tree, tokens_BT: jax.Array, length_B: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Read prompts into an empty cache.

    Args:
      graph: of `models.tree.abstract`.
      parameters: in the dtype to compute in.
      tokens_BT: int32 prompts, filled up on the right with any token.
      length_B: int32 tokens of each prompt, at least 1.
      cache: with room for at least T tokens.

    Returns float32 logits [B, V] of the token after each prompt, and the cache.
    """
    module = nnx.merge(graph, parameters)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    hidden_BTD, cache, _ = module.hidden(tokens_BT, positions_BT, cache_causal_mask(positions_BT), cache=cache)
    last_B1D = jnp.take_along_axis(hidden_BTD, (length_B - 1)[:, None, None], axis=1)
    return _logits(module, last_B1D), cache.hold(length_B)


def decode_step(graph: nnx.GraphDef, parameters: Tree, tokens_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Read one token more of each sequence; float32 logits [B, V] of the one after it, and the cache."""
    module = nnx.merge(graph, parameters)
    positions_B1 = cache.length[:, None]
    hidden_B1D, cache, _ = module.hidden(tokens_B[:, None], positions_B1, cache_causal_mask(positions_B1), cache=cache)
    return _logits(module, hidden_B1D), cache.hold(cache.length + 1)


def _logits(module: nnx.Module, hidden_B1D: jax.Array) -> jax.Array:
    return constrain(module.logits(hidden_B1D)[:, 0], "batch", "act_vocab")
