"""Calls of tools: what they are, and the reader of answers that may hold them.

A call is given once it is whole, so that a stream never holds a part of its JSON, nor the same part twice.
"""

import uuid
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from jaxlm.core.json_text import json_text, json_value
from jaxlm.server.answers.call_formats import CallFormat
from jaxlm.server.answers.call_syntax import Schemas


class CalledFunction(NamedTuple):
    """A call of a function: its name, and the JSON of its arguments."""

    id: str
    name: str
    arguments: str


class AnswerParts(NamedTuple):
    """The parts that a piece of an answer adds: what is said, what is thought before, and calls, each whole."""

    said: str = ""
    thought: str = ""
    calls: tuple[CalledFunction, ...] = ()


class CallReader:
    """A reader of an answer's text, piece by piece: what is said, and calls. What is no call of a known
    name, or a call that breaks off, is said."""

    def __init__(self, form: CallFormat, schemas: Schemas):
        self._form, self._schemas = form, schemas
        self._marks = [mark for mark in (form.start, *form.dropped) if mark]
        self._held, self._blank = "", ""
        self._searched = 0  # characters of what is held before which no call ends
        self._in_call = self._has_called = self._is_behind_call = False
        self._is_open = form.start is None  # has yet to see whether the answer is calls as a whole

    def add(self, piece: str) -> tuple[str, list[CalledFunction]]:
        """Return what a piece adds."""
        self._held += piece
        if self._is_open and self._may_be_calls():
            return "", []
        self._is_open = False
        texts, calls = [], []
        while True:
            if not self._in_call:
                if (first := first_mark(self._held, self._marks)) is None:
                    kept = len(self._held) - max((overlap(self._held, mark) for mark in self._marks), default=0)
                    texts.append(self._held[:kept])
                    self._held = self._held[kept:]
                    break
                at, mark = first
                texts.append(self._held[:at])
                self._held, self._in_call = self._held[at + len(mark) :], mark == self._form.start
                self._searched = 0
            if not self._in_call:
                continue
            end = self._form.end
            if end is None:
                break
            first = first_mark(self._held, [end], self._is_inside_value, self._searched)
            if first is None:
                self._searched = len(self._held) - overlap(self._held, end)
                break
            at, _ = first
            body, self._held, self._in_call = self._held[:at], self._held[at + len(end) :], False
            body_calls = self._calls(body)
            calls += body_calls
            if not body_calls:
                texts.append(f"{self._form.start}{body}{end}")
        return self._spoken("".join(texts), bool(calls)), calls

    def _is_inside_value(self, text: str) -> bool:
        return self._form.syntax.is_inside(text, self._schemas)

    def _may_be_calls(self) -> bool:
        """Return whether an answer so far may be calls as a whole, without what is dropped before it."""
        text = self._held.lstrip()
        for mark in self._form.dropped:
            if text.startswith(mark):
                self._held = text = text[len(mark) :].lstrip()
        return not text or text[0] == "{" or any(mark.startswith(text) for mark in self._form.dropped)

    def rest(self) -> tuple[str, list[CalledFunction]]:
        """Return the end of an answer, which was held back."""
        rest, self._held = self._held, ""
        is_whole = self._is_open or (self._in_call and (self._form.end is None or self._form.syntax.ends_itself))
        unfinished = overlap(rest, self._form.end) if self._form.end else 0  # of a mark that the answer broke off in
        calls = self._calls(rest[: len(rest) - unfinished]) if is_whole else []
        said = "" if calls else (self._form.start or "") * self._in_call + rest
        spoken = self._spoken(said, bool(calls))
        return (spoken if self._has_called else spoken + self._blank), calls

    def _spoken(self, text: str, has_called: bool) -> str:
        """Return a text without the blanks at its end, which are kept until something follows: none before a call."""
        self._has_called |= has_called
        text = self._blank + text
        spoken = text.rstrip()
        self._is_behind_call = has_called or (self._is_behind_call and not spoken)
        self._blank = "" if self._is_behind_call and not spoken else text[len(spoken) :]
        return spoken

    def _calls(self, body: str) -> list[CalledFunction]:
        """Return the calls that a text holds; none where the text holds anything but calls of known names."""
        try:
            written = self._form.syntax.calls(body, self._schemas)
        except (ValueError, RecursionError):
            return []
        calls = [called(*each) for each in written]
        if not all(call and call.name in self._schemas for call in calls):
            return []
        return [call for call in calls if call]


def called(name: Any, arguments: Any) -> CalledFunction | None:
    """Return a call; None where its arguments are no object that JSON can hold."""
    if not isinstance(name, str):
        return None
    try:
        value = json_value(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(value, dict | None):
            return None
        return CalledFunction(f"call_{uuid.uuid4().hex[:24]}", name, json_text(value or {}))
    except (ValueError, RecursionError):
        return None


def first_mark(
    text: str, marks: Collection[str], is_inside: Callable[[str], bool] | None = None, start: int = 0
) -> tuple[int, str] | None:
    """Return the place of the first of some marks in a text from `start` on, and the mark; None without any.

    Args:
      is_inside: whether the text before a mark breaks off inside a value, of which the mark is a part then.
    """
    while (at := min(((at, mark) for mark in marks if (at := text.find(mark, start)) >= 0), default=None)) is not None:
        if is_inside is None or not is_inside(text[: at[0]]):
            return at
        start = at[0] + len(at[1])
    return None


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is a beginning of a mark, and not all of it."""
    return next(n for n in range(min(len(text), len(mark) - 1), -1, -1) if text.endswith(mark[:n]))
