"""Python's garbage collector, which takes a quarter of a start if nothing is done about it."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_FEW_CYCLES = 500_000, 20, 100  # objects until the collector runs, and its runs until it looks at older objects


@cache
def begin_rarely() -> None:
    """Let the collector begin after 500,000 new objects, in place of 700 to 2,000, and not at the end of the process.

    Imports and traces make millions that stay, over which it would walk again and again.
    """
    gc.set_threshold(*_FEW_CYCLES)
    atexit.register(gc.freeze)


@contextmanager
def paused() -> Iterator[None]:
    """Run a block, or a function that this decorates, without Python's garbage collector: for a command that counts
    and ends."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
