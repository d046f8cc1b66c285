"""Ctrl-C and SIGTERM as a request to stop at the next step."""

import signal
from types import FrameType


class StopRequest:
    """While it is the context, the first SIGINT or SIGTERM is noted in `signal`; a second one acts as usual."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for other, handler in self._before.items():
            signal.signal(other, handler)
