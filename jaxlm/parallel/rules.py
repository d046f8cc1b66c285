"""Sharding rules: the mesh axes over which each logical axis is sharded, one value per workload. Imports no JAX.

Models name the axes of their parameters and activations; nothing but these values knows on which mesh axis a name
lands.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal

# The kinds of steps that have rules of their own.
Kind = Literal["train", "prefill", "decode"]
# After the name of an axis: groups of its entries, which have one scale each.
GROUPS = "/groups"
# The sequences of several shards of a batch together.
_SHARED_BATCH = "expert_batch"
# The mesh axes that shard each dimension of an array.
Placement = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Rules:
    """A mapping from logical axes to mesh axes.

    The dimensions of a parameter lie by their own axes ("embed") where it is stored; while a layer computes with it
    they lie as those of activations do ("act_embed"), wherever there is such an axis. Whatever is sharded more where it
    is stored is gathered first.

    Attributes:
      mesh_axes: for each logical axis the mesh axes that shard it, outermost first; none keeps it whole.
      may_stay_whole: logical axes that stay whole where their mesh axes do not divide them. All others must divide.
      instead: for an axis that may stay whole, the one that its mesh axes then shard where an array is stored.

    Groups of an axis ("embed/groups") lie as the axis does, where the mesh axes divide them.
    """

    mesh_axes: Mapping[str, tuple[str, ...]]
    may_stay_whole: frozenset[str] = field(default=frozenset())
    instead: Mapping[str, str] = field(default_factory=dict)

    def over(self, axis: str | None) -> tuple[str, ...]:
        """Return the mesh axes of a logical axis; none for None. Raises KeyError for a name that has no rule."""
        return () if axis is None else self.mesh_axes[axis.removesuffix(GROUPS)]

    def computed_over(self, axis: str | None) -> tuple[str, ...]:
        """Return the mesh axes of a logical axis while a layer computes: of a parameter's, those of its activation."""
        return self.mesh_axes.get(f"act_{axis}".removesuffix(GROUPS), self.over(axis))

    def placed(
        self,
        axes: Sequence[str | None],
        shape: Sequence[int],
        layout: Mapping[str, int],
        *,
        computing: bool = False,
        exact: bool = False,
    ) -> Placement:
        """Return the mesh axes that shard each dimension of an array, axes of size 1 among them. A mesh axis shards
        one dimension: the first that asks for it.

        Args:
          axes: the logical axes of the dimensions.
          shape: their sizes.
          layout: devices along each mesh axis.
          computing: while a layer computes; otherwise as a parameter is stored.
          exact: raise ValueError where the mesh does not divide a dimension that must divide. Otherwise its shards are
            uneven, and the largest has size / shards, rounded up.
        """
        placement: list[tuple[str, ...]] = []
        taken: set[str] = set()
        more: dict[str, tuple[str, ...]] = {}
        for axis, size in zip(axes, shape, strict=True):
            over = _without(self.computed_over(axis) if computing else self.over(axis), taken)
            shards = math.prod(layout[name] for name in over)
            if axis in more and size % (shards * math.prod(layout[name] for name in more[axis])) == 0:
                over = (*more[axis], *over)
            elif size % shards:
                if axis is not None and axis in self.instead and not computing:
                    more[self.instead[axis]] = over
                if axis in self.may_stay_whole or (axis is not None and axis.endswith(GROUPS)):
                    over = ()
                elif exact:
                    raise ValueError(f"{'·'.join(over)} = {shards} does not divide {axis} = {size}")
            taken.update(over)
            placement.append(over)
        return tuple(placement)

    def shards(self, axis: str | None, size: int, layout: Mapping[str, int]) -> int:
        """Return the number of shards of a dimension of this size: 1 where it stays whole.

        Raises ValueError where the mesh does not divide a dimension that must divide.
        """
        (over,) = self.placed((axis,), (size,), layout, exact=True)
        return math.prod(layout[name] for name in over)

    def stored(self, axes: Sequence[str], shape: Sequence[int], layout: Mapping[str, int]) -> int:
        """Return the numbers of a parameter that lie on one device."""
        return math.prod(local(self.placed(axes, shape, layout), shape, layout))

    def gathered_over(self, axes: Sequence[str], shape: Sequence[int], layout: Mapping[str, int]) -> tuple[str, ...]:
        """Return the mesh axes over which a parameter is gathered before a layer computes with it."""
        computing = together(self.placed(axes, shape, layout, computing=True))
        return _without(together(self.placed(axes, shape, layout)), computing)

    def duties(self, mesh_axis: str) -> frozenset[str]:
        """Return the logical axes that a mesh axis shards; of those of the batch, the whole batch's alone."""
        return frozenset(axis for axis, over in self.mesh_axes.items() if mesh_axis in over and axis != _SHARED_BATCH)

    def without(self, axes: Collection[str]) -> frozenset[str]:
        """Return the logical axes of parameters, and of their activations, that are not among these."""
        absent = {axis for axis in self._parameters if axis not in axes}
        return frozenset(absent | {f"act_{axis}" for axis in absent})

    def without_mesh_axes(self, mesh_axes: Iterable[str]) -> "Rules":
        """Return the rules in which these mesh axes shard nothing."""
        gone = frozenset(mesh_axes)
        over = {axis: _without(names, gone) for axis, names in self.mesh_axes.items()}
        return Rules(MappingProxyType(over), self.may_stay_whole, self.instead)

    def with_whole_parameters(self, mesh_axes: Iterable[str]) -> "Rules":
        """Return the rules in which these mesh axes shard no parameters but those that a layer computes with in parts,
        as experts: of the others each of their devices has a copy."""
        gone = frozenset(mesh_axes)
        whole = {
            axis: _without(self.over(axis), gone.difference(self.computed_over(axis))) for axis in self._parameters
        }
        return Rules(MappingProxyType({**self.mesh_axes, **whole}), self.may_stay_whole, self.instead)

    @cached_property
    def replicas(self) -> tuple[str, ...]:
        """The mesh axes that shard tokens alone: each of their devices has a copy of the model, and gradients are
        summed over them once per step."""
        of_tokens = dict.fromkeys((*self.over("batch"), *self.over("sequence")))
        return tuple(axis for axis in of_tokens if self.duties(axis) <= {"batch", "sequence", "residual"})

    @cached_property
    def summed_each_microbatch(self) -> tuple[str, ...]:
        """The mesh axes over which gradients are summed in each microbatch: those of tokens, except replicas. Of a
        parameter on such an axis each device keeps its part of the sum."""
        of_tokens = dict.fromkeys((*self.over("batch"), *self.over("sequence")))
        return _without(of_tokens, self.replicas)

    @cached_property
    def batch_alone(self) -> tuple[str, ...]:
        """The mesh axes that shard nothing but the batch while a layer computes."""
        return tuple(axis for axis in self.over("batch") if self.duties(axis) - self._parameters == {"batch"})

    @cached_property
    def of_parameters(self) -> frozenset[str]:
        """The mesh axes that shard parameters where they are stored."""
        return frozenset(mesh_axis for axis in self._parameters for mesh_axis in self.over(axis))

    @cached_property
    def of_layers(self) -> frozenset[str]:
        """The mesh axes that shard parameters while a layer computes."""
        return frozenset(mesh_axis for axis in self._parameters for mesh_axis in self.computed_over(axis))

    @cached_property
    def _parameters(self) -> frozenset[str]:
        """The logical axes of parameters that have one of activations beside them."""
        return frozenset(axis for axis in self.mesh_axes if f"act_{axis}" in self.mesh_axes)


def local(placement: Placement, shape: Sequence[int], layout: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an array on one device, of uneven shards that of the largest."""
    shards = (math.prod(layout[name] for name in over) for over in placement)
    return tuple(math.ceil(size / n) for size, n in zip(shape, shards, strict=True))


def together(placement: Placement) -> tuple[str, ...]:
    """Return the mesh axes of all these dimensions."""
    return tuple(name for over in placement for name in over)


def _without(names: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others)


def _rules(mesh_axes: Mapping[str, tuple[str, ...]], may_stay_whole: frozenset[str]) -> Rules:
    return Rules(MappingProxyType(dict(mesh_axes)), may_stay_whole, MappingProxyType({"layers": "embed"}))


# Layers lie on the stages of a pipeline, and the vocabulary too, so that no stage has more to do than another.
# Weights are sharded over fsdp and tensor; a layer's are gathered over fsdp as it runs (ZeRO-3, arXiv:1910.02054).
TRAIN = _rules(
    {
        # parameters
        "layers": ("pipeline",),
        "vocab": ("pipeline", "tensor"),
        "positions": (),
        "embed": ("fsdp", "expert", "context"),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "head_dim": (),
        "feed_forward": ("tensor",),
        "experts": ("expert",),  # of a mixture
        "routes": (),  # numbers of the router, one for each expert
        "shared_gate": (),
        "latent": (),  # the projection of the residual that experts read
        "taps": (),  # of a short convolution
        "lora": (),  # between the two matrices of an adapter
        "channels": (),  # vectors as wide as the model: too small to be worth gathering
        # activations
        "batch": ("data", "fsdp", "expert"),
        "expert_batch": ("data", "fsdp"),  # tokens of all devices that share out the experts
        "sequence": ("context",),
        "key_sequence": (),  # of keys and values
        # The sequence between attention and feed-forward (arXiv:2205.05198, section 4.2.2).
        "residual": ("context", "tensor"),
        "act_embed": (),
        "act_heads": ("tensor",),
        "act_kv_heads": ("tensor",),
        "act_head_dim": (),
        "act_feed_forward": ("tensor",),
        "act_experts": ("expert",),
        "act_routes": (),
        "act_shared_gate": (),
        "act_latent": (),
        "act_lora": (),
        "act_vocab": ("pipeline", "tensor"),
    },
    frozenset({"layers", "batch", "expert_batch", "residual", "kv_heads"}),
)
# As in training, but whatever the mesh does not divide stays whole: a forward pass by itself.
FORWARD = _rules(TRAIN.mesh_axes, frozenset(TRAIN.mesh_axes))
_OF_MATRICES = "expert", "tensor"
# Weights stay where they are: a step of the engine would gather all of them for a few tokens. The axes of a batch shard
# its sequences, each with its rows, its pages and its draws. `expert`, which shards the experts, is more of `tensor`
# elsewhere: all devices that share out the experts have the same rows, and no row is sent to another shard. What shards
# sequences in training shares out the rows of prompts that a step reads; those that decode each of these devices has.
ENGINE = _rules(
    {
        **FORWARD.mesh_axes,
        **{axis: _OF_MATRICES for axis, over in FORWARD.mesh_axes.items() if over and over[-1] == "tensor"},
        "layers": (),
        "embed": (),
        "batch": _without(TRAIN.over("batch"), _OF_MATRICES),
        "draws": _without(TRAIN.over("batch"), _OF_MATRICES),
        "sequence": (),
        "tiles": TRAIN.over("sequence"),  # runs of rows of prompts
    },
    (FORWARD.may_stay_whole | {"draws"}) - {"experts", "act_experts"},
)

RULES: Mapping[Kind, Rules] = MappingProxyType({"train": TRAIN, "prefill": ENGINE, "decode": ENGINE})
