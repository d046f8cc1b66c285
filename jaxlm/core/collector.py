"""Python's garbage collector, which a command that counts and ends does without."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Run a block, or a function that this decorates, without Python's garbage collector.

    The collector would walk over all imported objects each time that more are allocated, and once more at the end of
    the process, which freezing them prevents.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
