"""The slots of the stages of a pipeline, in which stacked weights lie while a step runs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxlm.parallel.partition import constrain, mesh_around, partition, rules_around
from jaxlm.parallel.pipeline import STACKED, stages_around
from jaxlm.parallel.ticks import moves

Tree = Any


def in_slots(stack: Tree, axes: Tree, rounds: int) -> Tree:
    """Return stacked weights [L, …] with these logical axes as [R, S · ⌈L / (R S)⌉, …], those of a stage together: R
    chunks of each of S stages, in the order of layers. What is more than L is the last layer again: slots that stages
    leave idle."""

    def laid(x: jax.Array, axes: Sequence[str]) -> jax.Array:
        more = -len(x) % (rounds * stages_around())
        if not more:
            return _exchanged(x, rounds)
        # Pinned before and after each move, so that it is an all-to-all of what devices have.
        whole = _with_whole_stacks(axes, x.shape)
        x = jax.lax.with_sharding_constraint(x, whole)
        x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (more, *x.shape[1:]))])
        x = jax.lax.with_sharding_constraint(x.reshape(rounds, -1, *x.shape[1:]), PartitionSpec(None, *whole))
        return constrain(x, None, *axes)

    return jax.tree.map(laid, stack, axes)


def as_stored(stack: Tree, axes: Tree, layers: int) -> Tree:
    """Return [R, slots, …] as [L, …], as stacked weights are stored: the opposite of `in_slots`."""

    def cut(x: jax.Array, axes: Sequence[str]) -> jax.Array:
        rounds, slots, *sizes = x.shape
        if rounds * slots == layers:
            return _exchanged(x, rounds, back=True)
        whole = _with_whole_stacks(axes, (layers, *sizes))
        x = jax.lax.with_sharding_constraint(x, PartitionSpec(None, *whole))
        x = jax.lax.with_sharding_constraint(x.reshape(rounds * slots, *sizes)[:layers], whole)
        return constrain(x, *axes)

    return jax.tree.map(cut, stack, axes)


def _exchanged(x: jax.Array, rounds: int, back: bool = False) -> jax.Array:
    """Return stacked weights [L, …], which are stored on stages in the order of layers, as [R, L / R, …] on those that
    run them, or the other way round."""
    if rounds == 1:
        return x[0] if back else x[None]
    (axis,) = rules_around().over(STACKED)

    pairs, taken, placed = zip(*moves(stages_around(), rounds), strict=True)
    if back:
        pairs, taken, placed = [[(to, source) for source, to in each] for each in pairs], placed, taken

    def local(x: jax.Array, taken: jax.Array, placed: jax.Array) -> jax.Array:
        chunks = x if back else x.reshape(rounds, -1, *x.shape[1:])
        others = jnp.zeros_like(chunks)
        for i, each in enumerate(pairs):
            chunk = jax.lax.dynamic_index_in_dim(chunks, taken[i, 0], keepdims=False)
            chunk = jax.lax.ppermute(chunk, axis, each)
            others = jax.lax.dynamic_update_index_in_dim(others, chunk, placed[i, 0], 0)
        return others.reshape(-1, *others.shape[2:]) if back else others

    of_stack, of_rounds = PartitionSpec(axis), PartitionSpec(None, axis)
    before, after = (of_rounds, of_stack) if back else (of_stack, of_rounds)
    # The tables are operands: outside of loops XLA's partitioner refuses the index of a stage. check_vma=False, as in a
    # stage.
    return jax.shard_map(
        local, in_specs=(before, of_rounds, of_rounds), out_specs=after, axis_names={axis}, check_vma=False
    )(x, jnp.asarray(taken), jnp.asarray(placed))


def _with_whole_stacks(axes: Sequence[str], shape: Sequence[int]) -> PartitionSpec:
    """Return the partition of stacked weights [L, …] as if stages did not divide L: another dimension has their
    shards."""
    return partition(axes, (1, *shape[1:]), mesh_around())
