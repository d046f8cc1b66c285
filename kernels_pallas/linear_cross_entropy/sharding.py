"""The sharding of the operands over a mesh, and its collectives.

The collectives are inside the operation, and its derivative is written around them: `jax.custom_vjp` outside, forward
and backward each one `jax.shard_map`. Differentiated from outside, a shard_map would add its own sums to them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from kernels_pallas.core.launch import vary


class CrossEntropySharding(NamedTuple):
    """The sharding of operands over a mesh; without specs they are whole, and nothing is sent.

    Attributes:
      specs: of the hidden states, the unembedding and the tokens, by the letters h, u and t.
      tokens, channels, labels: mesh axes over which these are sharded.
      channel_dimension: the dimension of the unembedding's channels.
      shards: the number of shards of the logits.
    """

    specs: tuple[tuple[str, PartitionSpec], ...] = ()
    tokens: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    channel_dimension: int = 0
    shards: int = 1

    @property
    def within_rows(self) -> tuple[str, ...]:
        """The mesh axes over which dimensions of the tokens behind the first are sharded."""
        return tuple(axis for entry in dict(self.specs).get("t", ())[1:] for axis in _axes(entry))

    def of_logits(self) -> PartitionSpec:
        """Return the spec of the logits: tokens, and then labels."""
        return PartitionSpec(*dict(self.specs)["t"], self.labels or None)

    def run(self, local: Callable, inputs: str, outputs: str) -> Callable:
        """Return the function on each device's shards of its operands, which `inputs` and `outputs` name by their
        letters.
        """
        if not self.specs:
            return local
        specs, mesh = dict(self.specs), jax.sharding.get_abstract_mesh()
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        mapped = jax.shard_map(
            local,
            in_specs=tuple(specs[letter] for letter in inputs),
            out_specs=tuple(specs[letter] for letter in outputs),
            axis_names={name for name, kind in kinds if kind != AxisType.Manual},
            check_vma=False,
        )

        def run(*operands: jax.Array) -> tuple:
            """Prevent a surrounding shard_map from taking unchecked results for replicated and summing their
            cotangents.
            """
            results = mapped(*operands)
            return vary(*results, *operands)[: len(results)]

        return run

    def gathered(self, unembedding: jax.Array) -> jax.Array:
        """Return the unembedding with all channels."""
        if not self.channels:
            return unembedding
        return jax.lax.all_gather(unembedding, self.channels, axis=self.channel_dimension, tiled=True)

    def reduced(self, d_unembedding: jax.Array, dtype: Any) -> jax.Array:
        """Return this device's channels of the gradient's sum over all tokens; this dtype is sent."""
        if self.tokens or self.channels:
            d_unembedding = d_unembedding.astype(dtype)
        scattered = set(self.channels) <= set(self.tokens)
        summed = tuple(axis for axis in self.tokens if not (scattered and axis in self.channels))
        if summed:
            d_unembedding = jax.lax.psum(d_unembedding, summed)
        if not self.channels:
            return d_unembedding
        at = self.channel_dimension
        if scattered:
            return jax.lax.psum_scatter(d_unembedding, self.channels, scatter_dimension=at, tiled=True)
        width = d_unembedding.shape[at] // jax.lax.axis_size(self.channels)
        return jax.lax.dynamic_slice_in_dim(d_unembedding, jax.lax.axis_index(self.channels) * width, width, at)


ALONE = CrossEntropySharding()


def sharding_of(
    hidden: PartitionSpec, unembedding: PartitionSpec, h: jax.Array, u: jax.Array, transposed: bool
) -> CrossEntropySharding:
    """Return the sharding of these operands, with these specs on the mesh in context.

    Raises ValueError where the specs do not fit the operands.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError("linear_cross_entropy: partition needs a mesh in context: call it under jax.set_mesh")
    *rows, width = _axes_of_dimensions("hidden", hidden, h.shape, mesh)
    first, second = _axes_of_dimensions("unembedding", unembedding, u.shape, mesh)
    channels, labels = (second, first) if transposed else (first, second)
    tokens = tuple(axis for entry in rows for axis in entry)
    if width:
        raise ValueError(f"linear_cross_entropy: partition shards hidden's channels over {width}; they must be whole")
    for what, axes in (("tokens", tokens), ("the unembedding", (*channels, *labels))):
        if len(set(axes)) < len(axes):
            raise ValueError(f"linear_cross_entropy: partition shards {what} over {axes}; each may be there but once")
    if set(tokens) & set(labels):
        raise ValueError(f"linear_cross_entropy: partition shards tokens over {tokens} and labels over {labels}")
    if channels and not set(channels) <= set(tokens) and set(channels) & set(tokens):
        raise ValueError(
            f"linear_cross_entropy: partition shards channels over {channels} and tokens over {tokens}; all axes of "
            "the one must be the other's, or none"
        )
    shards = 1
    for axis in (*tokens, *labels):
        shards *= mesh.shape[axis]
    per_token = PartitionSpec(*_entries(hidden, h.ndim)[:-1])
    specs = (("h", hidden), ("u", unembedding), ("t", per_token))
    return CrossEntropySharding(specs, tokens, channels, labels, int(transposed), shards)


def _axes_of_dimensions(
    name: str, spec: PartitionSpec, shape: tuple[int, ...], mesh: AbstractMesh
) -> list[tuple[str, ...]]:
    """Return the mesh axes over which each dimension is sharded."""
    if len(spec) > len(shape):
        raise ValueError(f"linear_cross_entropy: partition says {spec} of {name}, which has {len(shape)} dimensions")
    if spec.unreduced or spec.reduced or not all(isinstance(axis, str) for entry in spec for axis in _axes(entry)):
        raise ValueError(f"linear_cross_entropy: partition says {spec} of {name}; it must name mesh axes and no more")
    dimensions = [_axes(entry) for entry in _entries(spec, len(shape))]
    for axes, size in zip(dimensions, shape, strict=True):
        if unknown := set(axes) - set(mesh.axis_names):
            known = ", ".join(mesh.axis_names)
            raise ValueError(f"linear_cross_entropy: partition names {unknown.pop()!r}; the mesh has {known}")
        if manual := set(axes) & set(mesh.manual_axes):
            raise ValueError(
                f"linear_cross_entropy: partition shards {name} over {manual.pop()!r}, which the shard_map around it "
                "already shards; leave that axis out"
            )
        shards = math.prod(mesh.shape[axis] for axis in axes)
        if size % shards:
            raise ValueError(
                f"linear_cross_entropy: partition shards {size} of {name} over {', '.join(axes)}, {shards} devices; "
                "they must divide it"
            )
    return dimensions


def _entries(spec: PartitionSpec, ndim: int) -> tuple:
    return (*spec, *(None,) * (ndim - len(spec)))


def _axes(entry: Any) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)
