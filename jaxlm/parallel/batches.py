"""Host batches onto a mesh: the rows that this process has, and global arrays made of them."""

import functools
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import named_sharding, rules_around
from jaxlm.parallel.rules import TRAIN, Rules


@functools.lru_cache
def process_rows(batch: int, mesh: Mesh, rules: Rules = TRAIN) -> np.ndarray:
    """Return the rows of a batch that lie on the devices of this process, int [rows], ascending."""
    held = named_sharding(("batch",), (batch,), mesh, rules).addressable_devices_indices_map((batch,)).values()
    return np.unique(np.concatenate([np.arange(batch)[rows] for rows in held]))


@functools.lru_cache
def _shards(mesh: Mesh, rules: Rules) -> tuple[int, int]:
    """Return the number of shards of a batch on the mesh, and how many of them this process has."""
    over = rules.over("batch")
    at = [mesh.axis_names.index(axis) for axis in over]
    ours = np.isin(mesh.device_ids, [device.id for device in mesh.local_devices])
    return Layout(mesh.shape).over(over), len(np.unique(np.argwhere(ours)[:, at], axis=0))


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh, rules: Rules | None = None) -> dict[str, jax.Array]:
    """Put host arrays [rows of this process, …] onto the mesh as global arrays [B, …], B over the batch axes of these
    rules, or of those around."""
    rules = rules or rules_around()
    shards, ours = _shards(mesh, rules)

    def put(x: np.ndarray) -> jax.Array:
        shape = (len(x) * shards // ours, *x.shape[1:])
        rows = process_rows(shape[0], mesh, rules)

        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            first, end, _ = index[0].indices(shape[0])
            return x[slice(*np.searchsorted(rows, (first, end))), *index[1:]]

        axes = ("batch", "sequence")[: x.ndim]
        return jax.make_array_from_callback(shape, named_sharding(axes, shape, mesh, rules), piece)

    return {name: put(x) for name, x in batch.items()}
