"""Maps within maps, of which XLA may lose the axes around."""

import functools

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxlm.parallel.nested_maps import is_lost, maps_within, without_loss

MESH = {"pipeline": 2, "fsdp": 2}


def mapped(function, *axes):
    """Return a function on the shards of a matrix, each dimension over an axis, or None."""
    spec = PartitionSpec(*axes)
    names = {axis for axis in axes if axis}
    return jax.shard_map(function, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False)


def program(more, x, counts):
    """Return x through maps, with so many maps within each, and more."""
    for count in counts:

        def stage(x, count=count):
            for i in range(count + more):
                x = mapped(lambda x, i=i: jnp.maximum(x, x - i), None, "fsdp")(x)
            return x

        x, _ = jax.lax.scan(lambda x, _: (mapped(stage, "pipeline")(x), None), x, length=2)
    return x


@pytest.mark.parametrize("counts", [[2], [1, 0, 3]])
def test_maps_within_maps_are_counted_in_loops_and_functions(counts):
    with jax.set_mesh(meshes.make(**MESH)):
        traced = jax.make_jaxpr(jax.jit(functools.partial(program, 0, counts=counts)))(jnp.zeros((4, 4)))
    assert maps_within(traced.jaxpr) == [count for count in counts if count]


def entries(counts):
    """Return the sizes of the table at which it enters outer maps, entry by entry."""
    size, at = 0, []
    for count in counts:
        at.append(size + 2)
        size += count + 1
    return at


@pytest.mark.parametrize("counts", [[22, 22, 42], [45, 1], [47, 43, 2], [7, 7, 30], [500], [], [93, 1]])
def test_a_map_is_lost_where_the_table_grows_for_the_map_around_it(counts):
    assert is_lost(counts) == bool({*entries(counts)} & {48, 96, 192, 384})


def test_a_program_has_more_maps_where_one_would_be_lost():
    """Without them XLA aborts the process."""
    counts, x = (22, 22, 1), jnp.eye(4)
    assert is_lost([*counts])
    with jax.set_mesh(meshes.make(**MESH)):
        safe = jax.jit(lambda x: without_loss(functools.partial(program, counts=counts), x)).trace(x)
        assert maps_within(safe.jaxpr.jaxpr) == [count + 1 for count in counts]
        y = safe.lower().compile()(x)
    np.testing.assert_array_equal(y, x)
