"""Stop strings in a text that comes piece by piece. Imports no JAX."""

from collections.abc import Sequence


class StopScanner:
    """A scanner of a text for the first of some strings, of which no character is handed out.

    The end of the text so far is held back while it may be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """Return the text that is known to stand before any stop string. `found`: a stop string has ended the text."""
        text = self._held + piece
        first = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if first is not None:
            self.found, self._held = True, ""
            return text[:first]
        end = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[end:]
        return text[:end]

    def rest(self) -> str:
        """Return the end that was held back, of a text that ends here."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that is a beginning of a stop string, and not all of it."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
