"""Log-probabilities of preferences under the model that training began with: computed once, and kept in the run."""

import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.core.errors import RunFailed
from jaxlm.core.files import replacing
from jaxlm.data.packing import PreferenceRows
from jaxlm.models.tree import Tree
from jaxlm.parallel.batches import process_rows, put_batch

_SECONDS_BETWEEN_LINES = 10.0


def compute(
    logprobs: Callable[[Tree, dict[str, jax.Array]], jax.Array],
    parameters: Tree,
    rows: PreferenceRows,
    batch: int,
    mesh: Mesh,
    say: Callable[[str], None],
) -> np.ndarray:
    """Return ln p of the chosen and the rejected answer of each pair, float32 [pairs, 2]; call it under `jax.set_mesh`.

    `logprobs` is a compiled `TrainStep.preference_logprobs`. A line is said every ten seconds.
    """
    result, share, line_time = np.zeros((len(rows), 2), np.float32), process_rows(batch, mesh), time.monotonic()
    for first in range(0, len(rows), batch):
        host = [rows[first + row] if first + row < len(rows) else rows.empty() for row in share]
        placed = put_batch({name: np.stack([row[name] for row in host]) for name in host[0]}, mesh)
        result[first : first + batch] = np.asarray(logprobs(parameters, placed))[: len(rows) - first]
        if time.monotonic() - line_time > _SECONDS_BETWEEN_LINES:
            line_time = time.monotonic()
            say(f"{min(first + batch, len(rows)):,} of {len(rows):,} pairs")
    return result


def write(file: Path, reference: np.ndarray) -> None:
    """Write log-probabilities, atomically."""
    file.parent.mkdir(exist_ok=True)
    with replacing(file) as partial, partial.open("wb") as stream:
        np.save(stream, reference)


def read(file: Path, pairs: int) -> np.ndarray:
    """Return the log-probabilities of this many pairs. Raises RunFailed if they are missing or of other pairs."""
    try:
        logprobs = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise RunFailed(f"{file} cannot be read ({error}); put it back, or start the run anew") from None
    if logprobs.shape != (pairs, 2):
        raise RunFailed(f"{file} is of {len(logprobs):,} pairs, and there are {pairs:,}; start the run anew")
    return logprobs
