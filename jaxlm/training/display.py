"""The messages of a run to whoever watches it, and its end. Imports no JAX."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """The end of a run: the last step, None before the first step was saved; the reason of an early stop
    (`interrupt.named`), 0 for a whole run; and the text that a whole run generated, unless the run generates none."""

    step: int | None
    reason: int
    sample: str | None = None


class Display:
    """Watches a run in silence; a context around data preparation and training. Others show what they are told."""

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def mute(self) -> None:
        """Show nothing from here on: another process speaks for the job."""

    def say(self, line: str) -> None:
        """Something happened."""

    def example(self, title: str, pieces: Sequence[tuple[str, bool]]) -> None:
        """A conversation, in pieces of text, and whether each is learned."""

    def progress(self, doing: str, done: int, size: int) -> None:
        """`done` of `size` bytes are read, before the first step."""

    def begin(self, step: int, steps: int) -> None:
        """Training begins, with `step` of `steps` steps done before."""

    def advance(self, step: int, metrics: dict[str, Any] | None) -> None:
        """`step` steps are done; metrics come with those that are recorded."""

    def summary(self, goodput: Any, rungs: dict[str, Any] | None) -> None:
        """Training is over: where the time went (`goodput.Goodput`), and the ladder where steps were recorded."""

    def ended(self, ended: Ended) -> int | None:
        """The run ended, stopped early or whole. The exit status, where the process is to end with it at once if it was
        stopped with nothing to save; None where `Stopped` is to be raised then."""
        return None
