"""Python's garbage collector, which takes a quarter of a start if nothing is done about it."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FEW_CYCLES = 500_000, 20, 100  # objects until the collector runs, and its runs until it looks at older objects
_USUAL = gc.get_threshold()


def begin_rarely() -> None:
    """Let the collector begin after 500,000 new objects, in place of 700 to 2,000, and not at the end of the process.

    Imports and traces make millions that stay, over which it would walk again and again. What runs for long calls
    `begin_as_usual` once it has started, lest cycles keep arrays.
    """
    gc.set_threshold(*_FEW_CYCLES)
    atexit.register(gc.freeze)


def begin_as_usual() -> None:
    """End `begin_rarely`, where it began, and leave out of later collections what there is now."""
    if gc.get_threshold() == _FEW_CYCLES:
        gc.freeze()
        gc.set_threshold(*_USUAL)


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
