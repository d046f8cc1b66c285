"""A parallel map over processes, one per core."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import TypeVar

from jaxlm.core import plugins
from jaxlm.core.cores import usable_cores

Item, Result = TypeVar("Item"), TypeVar("Result")
_AHEAD = 8  # items in flight per process


def in_order(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yield `function(item)` for every item, in order, computed by one process per core.

    Processes are spawned: function, items and results must pickle. A single item or core is computed in this process.
    Closing the iterator, or an exception, ends running processes. Raise whatever `function` raises, and
    BrokenProcessPool if a process was killed.
    """
    workers = min(usable_cores(), len(items))
    if workers < 2:
        yield from map(function, items)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(plugins.files(),)
    )
    try:
        waiting = iter(items)
        begun: deque[Future[Result]] = deque(pool.submit(function, item) for item in islice(waiting, workers * _AHEAD))
        while begun:
            yield begun.popleft().result()
            begun.extend(pool.submit(function, item) for item in islice(waiting, 1))
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _begin(plugin_files: dict[str, str]) -> None:
    plugins.add_files(plugin_files)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would oversubscribe the cores
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # the parent was killed, and needs no result
