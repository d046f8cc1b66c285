"""Key/value heads on devices that hold fewer of them than their query heads read."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models.parameters import axes_of
from jaxlm.parallel.partition import constrain, shards_of


def kv_heads(size: int, num_query_heads: int) -> int:
    """Return the number of key/value heads that these query heads read, with the copies that `linear` makes."""
    return math.lcm(size, shards_of("act_heads", num_query_heads))


def repeat_heads(parameter: nnx.Param, dimension: int, copies: int) -> jax.Array:
    """Repeat each entry of a replicated dimension `copies` times, and shard the result."""
    if copies == 1:
        return parameter[...]
    axes = axes_of(parameter)
    return constrain(jnp.repeat(constrain(parameter[...], *axes), copies, axis=dimension), *axes)
