"""Host batches onto a mesh: the rows that this process has, and global arrays made of them."""

import functools
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.parallel.columns import balanced_columns
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import named_sharding, rules_around
from jaxlm.parallel.rules import TRAIN, Rules

# The arrays of a batch that have a number for each token.
PER_TOKEN = frozenset({"tokens", "targets", "segments", "positions"})


def axes_of(name: str) -> tuple[str | None, ...]:
    """Return the logical axes of an array of a batch, by its name."""
    return "batch", "sequence" if name in PER_TOKEN else None


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
    rules, or of those around. Of arrays with a number per token, whose names are in `PER_TOKEN`, columns lie over the
    axes of the sequence, in `balanced_columns`."""
    rules = rules or rules_around()
    shards, ours = _shards(mesh, rules)

    def put(name: str, x: np.ndarray) -> jax.Array:
        axes = axes_of(name)[: x.ndim]
        if axes[1:] == ("sequence",) and (parts := rules.shards("sequence", x.shape[1], mesh.shape)) > 1:
            x = x[:, balanced_columns(x.shape[1], parts)]
        shape = (len(x) * shards // ours, *x.shape[1:])
        rows = process_rows(shape[0], mesh, rules)

        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            first, end, _ = index[0].indices(shape[0])
            return x[slice(*np.searchsorted(rows, (first, end))), *index[1:]]

        return jax.make_array_from_callback(shape, named_sharding(axes, shape, mesh, rules), piece)

    return {name: put(name, x) for name, x in batch.items()}
