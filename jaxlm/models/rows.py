"""The inputs and results of a block besides the residual."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.models.block_config import BlockConfig
from jaxlm.models.doors import Dropout, RopeTable
from jaxlm.models.masks import Mask


class LayerIndex(NamedTuple):
    """The layer that a block runs as.

    `layer`: its index from 0. `blocks` and `which`: the blocks that it may be, of one `traced_structure`, and the index
    of its own among them. `entry` and `index`: the entry of a cache that serves the layer, and its index there.
    """

    layer: jax.Array
    blocks: tuple[BlockConfig, ...]
    which: jax.Array
    entry: str
    index: jax.Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Reach:
    """The most keys that a token sees in any layer that may share a body with this one, known while tracing; None sets
    no limit."""

    keys: int | None = None


class RowContext(NamedTuple):
    """The inputs of a layer besides the residual, for the rows of a batch; they travel with them.

    `positions_BT`: of each token in its document. `key_range`: the keys that it attends to. `rope`: the rotary angles
    of its position, or None. `dropout`: that of this layer. `padding_BT`: True where there is no token, or None where
    what sees no key is padding. `reach`: how far back a token sees.
    """

    positions_BT: jax.Array
    key_range: Mask
    rope: RopeTable | None
    dropout: Dropout
    padding_BT: jax.Array | None = None
    reach: Reach = Reach()

    @property
    def is_token_BT(self) -> jax.Array:
        """True where there is a token, [B, T]."""
        if self.padding_BT is not None:
            return ~self.padding_BT
        return jnp.broadcast_to(self.key_range.end > self.key_range.start, self.positions_BT.shape)

    @property
    def begins_BT(self) -> jax.Array:
        """True where a document begins, [B, T]."""
        return (self.positions_BT == 0) & self.is_token_BT


class Auxiliary(NamedTuple):
    """The results of a layer besides the residual: float32 scalars by name, each a mean over the tokens that it saw.

    `losses` are summed over layers and added to the objective, each in its layer already times its factor; `statistics`
    are averaged over layers. Both stand in the metrics of a step by their names. `counts` are of what state is moved by
    after a step, by its name: arrays like the state's of the layer, added up over microbatches and devices.
    """

    losses: dict[str, jax.Array] = {}
    statistics: dict[str, jax.Array] = {}
    counts: dict[str, jax.Array] = {}

    def __or__(self, other: "Auxiliary") -> "Auxiliary":
        """Return both together. Raises ValueError for a name that both have: one would replace the other."""
        if twice := (self.losses.keys() | self.statistics.keys()) & (other.losses.keys() | other.statistics.keys()):
            raise ValueError(f"two parts of the objective or its statistics are called {', '.join(sorted(twice))}")
        merged = ({**own, **of_other} for own, of_other in zip(self, other, strict=True))
        return Auxiliary(*merged)
