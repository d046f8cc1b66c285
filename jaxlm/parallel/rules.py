"""Sharding rules: the mesh axes over which each logical axis is sharded, one value per workload. Imports no JAX.

Models name the axes of their parameters and activations; nothing but these values knows on which mesh axis a name
lands.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from jaxlm.parallel.layout import Layout

# The kinds of steps that have rules of their own.
Kind = Literal["train", "prefill", "decode"]


@dataclass(frozen=True, eq=False)
class Rules:
    """A mapping from logical axes to mesh axes.

    Attributes:
      mesh_axes: for each logical axis the mesh axes that shard it, outermost first; none keeps it whole.
      may_stay_whole: logical axes that stay whole where their mesh axes do not divide them. All others must divide.
    """

    mesh_axes: Mapping[str, tuple[str, ...]]
    may_stay_whole: frozenset[str] = field(default=frozenset())

    def over(self, axis: str | None) -> tuple[str, ...]:
        """Return the mesh axes of a logical axis; none for None. Raises KeyError for a name that has no rule."""
        return () if axis is None else self.mesh_axes[axis]

    def shards(self, axis: str | None, size: int, layout: Mapping[str, int]) -> int:
        """Return the number of shards of a dimension of this size: 1 where it stays whole.

        Raises ValueError where the mesh does not divide a dimension that must divide.
        """
        over = self.over(axis)
        shards = Layout(layout).over(over)
        if size % shards == 0:
            return shards
        if axis not in self.may_stay_whole:
            raise ValueError(f"{'·'.join(over)} = {shards} does not divide {axis} = {size}")
        return 1

    def parts(self, over: str, axis: str | None, size: int, layout: Mapping[str, int]) -> int:
        """Return the number of shards that one mesh axis makes of a dimension, uneven ones too."""
        if self.over(axis) != (over,):
            return 1
        shards = layout[over]
        return 1 if size % shards and axis in self.may_stay_whole else shards

    def stored(self, axes: Sequence[str], shape: Sequence[int], layout: Mapping[str, int]) -> int:
        """Return the numbers of a parameter that lie on one device."""
        return math.prod(
            math.ceil(size / math.prod(self.parts(over, axis, size, layout) for over in self.over(axis)))
            for axis, size in zip(axes, shape, strict=True)
        )


def _rules(mesh_axes: Mapping[str, tuple[str, ...]], may_stay_whole: frozenset[str]) -> Rules:
    return Rules(MappingProxyType(dict(mesh_axes)), may_stay_whole)


# Weights are sharded over fsdp and tensor; a layer's are gathered over fsdp as it runs (ZeRO-3, arXiv:1910.02054).
TRAIN = _rules(
    {
        # parameters
        "layers": (),
        "vocab": ("tensor",),
        "positions": (),
        "embed": ("fsdp",),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "head_dim": (),
        "feed_forward": ("tensor",),
        "lora": (),  # between the two matrices of an adapter
        "channels": (),  # vectors as wide as the model: too small to be worth gathering
        # activations
        "batch": ("data", "fsdp"),
        "sequence": (),
        "residual": ("tensor",),  # the sequence between attention and feed-forward (arXiv:2205.05198, section 4.2.2)
        "act_embed": (),
        "act_heads": ("tensor",),
        "act_kv_heads": ("tensor",),
        "act_head_dim": (),
        "act_feed_forward": ("tensor",),
        "act_lora": (),
        "act_vocab": ("tensor",),
    },
    frozenset({"batch", "residual", "kv_heads"}),
)
# As in training, but whatever the mesh does not divide stays whole.
PREFILL = _rules(TRAIN.mesh_axes, frozenset(TRAIN.mesh_axes))
# Weights stay where they are: a decoding step would gather all of them for one token of each sequence. The axis fsdp
# shards sequences, as data does.
DECODE = _rules({**PREFILL.mesh_axes, "embed": ()}, PREFILL.may_stay_whole)
# As in decoding, but a step has rows of any sequences, whose pages lie on all devices: `data` and `fsdp` hold copies.
ENGINE = _rules({**DECODE.mesh_axes, "batch": ()}, DECODE.may_stay_whole)

RULES: Mapping[Kind, Rules] = MappingProxyType({"train": TRAIN, "prefill": PREFILL, "decode": DECODE})
