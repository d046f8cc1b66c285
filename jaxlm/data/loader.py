"""Batches of packed rows, in an order that depends on the seed and the step alone."""

from collections.abc import Iterator, Sequence

import grain
import numpy as np

from jaxlm.data.packing import PreferenceRows, Rows

Batch = dict[str, np.ndarray]

_ENDLESS = 2**62  # steps


def training_batches(
    sources: Sequence[tuple[Rows | PreferenceRows, float]],
    batch: int,
    seed: int,
    start: int,
    share: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Yield endless batches, int32 arrays [batch, T], from step `start` on.

    Rows are drawn from each source in proportion to its weight, to within 1 %, evenly spread. Each epoch of a source
    has a new order. Batch i does not depend on `start`: the step is the whole state of the loader.
    `share`: the rows of each batch that this process needs; arrays then hold only these. Grain prefetches in threads.
    """
    shuffled = [
        grain.MapDataset.source(rows).shuffle(seed=_seed_of(seed, position)).repeat()
        for position, (rows, _) in enumerate(sources)
    ]
    endless = grain.MapDataset.mix(shuffled, [weight for _, weight in sources])
    share = range(batch) if share is None else share

    def read(step: int) -> Batch:
        return _stack([endless[step * batch + row] for row in share])

    ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(grain.MapDataset.range(start, _ENDLESS).map(read).to_iter_dataset(ahead))


def _seed_of(seed: int, position: int) -> int:
    """Return an independent seed per source.

    Grain increments the seed each epoch. With one seed for all, sources of equal size would be drawn in lockstep; with
    consecutive seeds, the first epoch of one would be the second of another.
    """
    return int(np.random.SeedSequence([seed, position]).generate_state(1)[0])


def evaluation_batches(
    rows: Rows | PreferenceRows, batch: int, limit: int | None = None, share: Sequence[int] | None = None
) -> Iterator[Batch]:
    """Yield all rows once, or the first `limit` batches, always in the same order.

    The order is a permutation that depends on the number of rows alone: rows are packed by document length, and the
    first ones would all be pieces of the longest document. The last batch is padded with rows without targets.
    `share` as in `training_batches`.
    """
    count = -(-len(rows) // batch)
    order = np.random.default_rng(0).permutation(len(rows))
    empty = rows.empty()
    share = range(batch) if share is None else share
    for first in range(0, min(count, limit or count) * batch, batch):
        yield _stack([rows[int(order[first + row])] if first + row < len(rows) else empty for row in share])


def _stack(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
