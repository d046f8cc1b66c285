"""Python's garbage collector, which a command that counts and ends does without."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Run a block, or a function that this decorates, without the garbage collector, which looks at every imported
    object again as imports and counts make more; nor does it at the end of the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
