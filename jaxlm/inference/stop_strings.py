"""Stop strings in a text that comes piece by piece. Imports no JAX.

Names of control tokens are no part of a text, but a stop string may hold them: such a token stands in the scanned text
as a mark, and in the stop string as its name or as that mark.
"""

import re
from collections.abc import Collection, Mapping, Sequence

# Lone surrogates, which no decoded text holds (Unicode 16, section 23.6): one for each control token.
_MARKS = [chr(code) for code in range(0xD800, 0xE000)]
_UNMARKED = dict.fromkeys(map(ord, _MARKS))


def stops_that_are_tokens(stops: Collection[str], controls: Mapping[str, int]) -> frozenset[int]:
    """Return the ids of the control tokens that stop strings name: drawing one ends a text. `controls`: ids by name."""
    return frozenset(controls[stop] for stop in stops if stop in controls)


class StopScanner:
    """A scanner of a text for some strings, which ends the text before the one that ends first, or with
    `includes_stop` behind it.

    The end of the text so far is held back while it may be the beginning of a stop string.

    Args:
      controls: the ids of control tokens by their names.
    """

    def __init__(self, stops: Sequence[str], controls: Mapping[str, int] = {}, includes_stop: bool = False):
        named = [name for name in controls if any(name in stop for stop in stops)]
        marks = dict(zip(sorted(named, key=len, reverse=True), _MARKS, strict=False))
        self._marks = {controls[name]: mark for name, mark in marks.items()}
        self._stops = {stop: stop for stop in stops if stop}  # the stop string by what is sought
        if marks:
            name = re.compile("|".join(map(re.escape, marks)))
            self._stops |= {name.sub(lambda found: marks[found[0]], stop): stop for stop in self._stops}
        self._includes_stop = includes_stop
        self._held = ""
        self._too_early = 0  # characters of `_held` with which no stop string may end
        self.found = False

    def mark(self, token: int) -> str:
        """Return what stands for a token in the text that `add` takes: "" for one that no stop string names."""
        return self._marks.get(token, "")

    def add(self, piece: str, is_early: bool = False) -> str:
        """Return the text that is known to be before any stop string. `found`: a stop string has ended the text. With
        `is_early` no stop string may end with this piece."""
        text = self._held + piece
        if is_early:
            self._too_early = len(text)
        ends = []
        for sought in self._stops:
            if (at := text.find(sought, max(self._too_early - len(sought) + 1, 0))) >= 0:
                ends.append((at + len(sought), at, sought))
        if ends:
            _, at, sought = min(ends)
            self.found, self._held = True, ""
            return _shown(text[:at]) + (self._stops[sought] if self._includes_stop else "")
        end = len(text) - max((_overlap(text, sought) for sought in self._stops), default=0)
        self._held, self._too_early = text[end:], max(self._too_early - end, 0)
        return _shown(text[:end])

    def rest(self) -> str:
        """Return the end that was held back, of a text that ends here."""
        rest, self._held = self._held, ""
        return _shown(rest)


def _shown(text: str) -> str:
    return text.translate(_UNMARKED)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that is a beginning of a stop string, and not all of it."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
