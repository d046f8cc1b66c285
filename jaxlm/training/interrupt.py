"""Requests to stop a process early: Ctrl-C, SIGTERM, a closed terminal, or the end of its allotted hours."""

import math
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from jaxlm.core.errors import InputError
from jaxlm.training.goodput import process_age

# The reason to stop is the number of a signal, and 0 means none, so that processes can agree on it by its maximum. The
# hours end with an alarm.
OUT_OF_TIME = int(signal.SIGALRM)
# Signals that may repeat one request: shell and system both report a closed terminal.
_REPEATED = (signal.SIGALRM, signal.SIGHUP)
# Time for the main thread to notice a signal: inside a compiler it does not.
_NOTICE_S = 2.0
# A signal that follows the first within this time is the same request: a launcher, or a terminal, tells a process and
# its parent, which passes it on.
_SAME_REQUEST_S = 0.25
# The shortest timer: 0 would disable it.
_SOON_S = 0.01
# The longest timer that every system accepts.
_LONGEST_S = 1e8


class Stopped(BaseException):
    """Raised where a signal arrived, or the time ended, while there was nothing to save."""

    def __init__(self, reason: int):
        super().__init__(named(reason))
        self.reason = reason


class StopRequest:
    """A context in which the first SIGINT, SIGTERM or SIGHUP requests a stop, and a second SIGINT or SIGTERM ends the
    process at once. If SIGHUP is ignored, as under nohup, it stays ignored.

    Outside `noted()` there is nothing to save: the first signal, or the end of the `hours` that this process may last,
    raises Stopped. Stopped is raised again if it was lost, for example in a destructor. If the main thread does not
    notice a signal for two seconds, `leave(reason)` is called in another thread, and its result is the exit status.
    Inside `noted()` nothing is raised: the loop asks `reason`, which reports signals and the end of the hours.
    """

    def __init__(self, leave: Callable[[int], int], hours: float | None = None):
        if hours is not None and not (hours > 0 and math.isfinite(hours)):
            raise InputError(f"--max-hours {hours:g} is no time to train in; give a finite number above 0")
        self._leave, self._limit_s = leave, math.inf if hours is None else hours * 3600
        self._signal, self._noting, self._noticed, self._heard = 0, False, False, False
        self._raised: weakref.ref[Stopped] | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # Signal numbers arrive in the pipe whatever the main thread does.
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._notice)
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        self._unraisable_before, sys.unraisablehook = sys.unraisablehook, self._not_of_stops
        if math.isfinite(self._limit_s):
            left_s = max(self._limit_s - process_age(), _SOON_S)
            signal.setitimer(signal.ITIMER_REAL, min(left_s, _LONGEST_S))
        return self

    def __exit__(self, *_: object) -> None:
        self._noting = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write)
        self._watcher.join()  # it sends alarms
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        if sys.unraisablehook == self._not_of_stops:  # a hook that was set later is kept
            sys.unraisablehook = self._unraisable_before

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Enter a block in which the first signal is noted and raises nothing."""
        self._noting = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            yield
        finally:
            self._noting = False

    def reason(self, ahead_s: float = 0.0) -> int:
        """Return 0, or the reason to stop now: a signal, or OUT_OF_TIME if `ahead_s` more seconds do not fit."""
        return self._signal or (OUT_OF_TIME if process_age() + ahead_s > self._limit_s else 0)

    def _notice(self, number: int, _: FrameType | None) -> None:
        first, self._heard = not self._heard, True
        self._signal, self._noticed = self._signal or number, True
        if not self._noting and (first or self._lost()):
            stopped = Stopped(self._signal)
            self._raised = weakref.ref(stopped)
            try:
                raise stopped
            finally:
                del stopped  # breaks the cycle of exception and frame

    def _lost(self) -> bool:
        """Return whether Stopped was raised and then dropped: Python drops exceptions of destructors."""
        return self._raised is not None and self._raised() is None

    def _not_of_stops(self, dropped: "sys.UnraisableHookArgs") -> None:
        """Show exceptions that a destructor dropped, except Stopped, which is raised again."""
        if not isinstance(dropped.exc_value, Stopped):
            self._unraisable_before(dropped)

    def _watch(self) -> None:
        first_signal, heard = 0, 0.0
        while True:
            if select.select([self._read], [], [], _NOTICE_S if first_signal else None)[0]:
                number = int.from_bytes(os.read(self._read, 1))
                if not number:  # the context ended
                    return
                if number in self._before:
                    now = time.monotonic()
                    heard = heard if first_signal else now
                    if first_signal and number not in _REPEATED and now - heard > _SAME_REQUEST_S:
                        os._exit(128 + number)
                    first_signal = self._signal = first_signal or number
            elif not self._noting and not self._noticed:
                os._exit(self._leave(first_signal))
            elif not self._noting and self._lost():
                self._noticed = False
                signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)


def named(reason: int) -> str | None:
    """Return the name of a reason, such as "SIGTERM" or "max_hours"; None for 0."""
    return None if not reason else "max_hours" if reason == OUT_OF_TIME else signal.Signals(reason).name
