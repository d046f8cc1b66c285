"""Block sizes: those measured to be fastest on a chip, and safe defaults for every other chip.

`blocks.json` holds the results of `python -m kernels_pallas.bench.tune`, by chip and by kernel. Without an entry a
kernel's own default is taken.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kernels_pallas.core import target

TABLE = Path(__file__).parent / "blocks.json"

Blocks = TypeVar("Blocks", bound=tuple)


class KernelKey(NamedTuple):
    """The key of block sizes, besides the chip.

    Attributes:
      name: of the kernel, such as "rms_norm_backward". implementation: such as "triton".
      sizes: those that matter to the kernel, each rounded up to a power of two. dtype: of its first operand, or of its
        result where the first operand is always float32.
    """

    name: str
    implementation: str
    sizes: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.implementation} {'×'.join(map(str, self.sizes))} {self.dtype}"


class Asked(NamedTuple):
    """The blocks that a kernel got, and the fields that may be tuned."""

    blocks: Any
    free: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Trial:
    """The tuner's sizes for a trial, and the blocks that kernels got."""

    blocks: dict[KernelKey, Any]
    asked: dict[KernelKey, Asked]


@dataclasses.dataclass(frozen=True, eq=False)
class _Table:
    """The file: sizes by chip, kernel and field."""

    chips: dict[str, dict[str, dict[str, int]]]


_trial: _Trial | None = None


def blocks(name: str, implementation: str, sizes: Sequence[int], dtype: Any, default: Blocks) -> Blocks:
    """Return a kernel's block sizes on the chip being lowered for.

    Args:
      name, implementation, sizes, dtype: of the kernel; see `KernelKey`. Sizes measured with one shape of a key serve
        all shapes with it, so the kernel itself has to enforce bounds that depend on anything else.
      default: the sizes where nothing was measured; a named tuple of integers. A field that is 0 there is never tuned,
        and stays 0.
    """
    kernel = KernelKey(name, implementation, tuple(1 << max(n - 1, 0).bit_length() for n in sizes), str(dtype))
    tuned = _table().chips.get(target.current().kind, {}).get(str(kernel), {})
    if _trial is not None and kernel in _trial.blocks:
        tuned = _trial.blocks[kernel]._asdict()
    free = tuple(field for field, n in default._asdict().items() if n)
    chosen = default._replace(**{field: n for field, n in tuned.items() if field in free})
    if _trial is not None:
        _trial.asked[kernel] = Asked(chosen, free)
    return chosen


@contextlib.contextmanager
def trying(blocks: dict[KernelKey, Any]) -> Iterator[dict[KernelKey, Asked]]:
    """Run the kernels traced inside with these sizes; yield the keys they ask for with the blocks they got."""
    global _trial
    before, _trial = _trial, _Trial(blocks, {})
    try:
        yield _trial.asked
    finally:
        _trial = before


def record(chip: str, measured: dict[KernelKey, Any], path: Path | None = None) -> None:
    """Write sizes for a chip, by JAX's name for it, into the table."""
    path = path or TABLE
    table = json.loads(path.read_text(encoding="utf-8"))
    said = {str(kernel): {field: n for field, n in best._asdict().items() if n} for kernel, best in measured.items()}
    table.setdefault(chip, {}).update(said)
    table = {chip: dict(sorted(rows.items())) for chip, rows in sorted(table.items())}
    path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _table.cache_clear()


def state() -> Hashable:
    """Return a cache key that changes whenever `blocks` may return something else, and within each `trying`."""
    return _trial, _table()


@functools.cache
def _table() -> _Table:
    return _Table(json.loads(TABLE.read_text(encoding="utf-8")))
