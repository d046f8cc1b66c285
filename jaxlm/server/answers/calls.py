"""Calls of tools: the forms in which families of models write them, as data, and their reader.

A call is given once it is whole, so that a stream never holds a part of its JSON, nor the same part twice.
"""

import json
import re
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


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


@dataclass(frozen=True)
class CallFormat:
    """A form in which models write calls.

    Attributes:
      known_by: texts that all are in the chat templates of such models.
      start: what stands before a call; None where an answer that begins with a brace is calls as a whole.
      end: what stands behind a call; None where a call ends with the answer.
      patterns: of the text between, with groups `name` and `arguments`; where none is found the text is JSON: an object
        with `name` and `arguments` (or `parameters`), a list of them, or several with semicolons between.
      controls: control tokens that are parts of a call. Those in `dropped` stand around calls and say nothing.
      opening: what begins a call up to the name of its function, and from there to its arguments.
    """

    known_by: tuple[str, ...]
    start: str | None
    end: str | None
    patterns: tuple[re.Pattern[str], ...] = ()
    controls: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    opening: tuple[str, str] = ("", "")

    @property
    def marks(self) -> frozenset[str]:
        """The control tokens and texts that are parts of the form."""
        return frozenset(mark for mark in (self.start, self.end, *self.controls, *self.dropped) if mark)


# The form of a template is the first whose signs are all in the template.
_DEEPSEEK = CallFormat(
    ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    (
        re.compile(r"function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<arguments>.*?)\n?```", re.S),  # V3, R1
        re.compile(r"(?P<name>[^<\n]+)<｜tool▁sep｜>(?P<arguments>.*)", re.S),  # V3.1
    ),
    ("<｜tool▁sep｜>",),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
)
_MISTRAL = CallFormat(
    ("[TOOL_CALLS]", "[ARGS]"),  # from v11 of its tokenizers on
    "[TOOL_CALLS]",
    None,
    (re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\](?P<arguments>.*?)(?:\[TOOL_CALLS\]|\Z)", re.S),),
    ("[ARGS]", "[CALL_ID]"),
    opening=("[TOOL_CALLS]", "[ARGS]"),
)
FORMATS = {
    "deepseek-v3": replace(
        _DEEPSEEK,
        known_by=(*_DEEPSEEK.known_by, "```json"),
        opening=(f"{_DEEPSEEK.opening[0]}function<｜tool▁sep｜>", "\n```json\n"),
    ),
    "deepseek": _DEEPSEEK,
    "mistral": _MISTRAL,
    "mistral-list": replace(
        _MISTRAL, known_by=("[TOOL_CALLS]",), opening=('[TOOL_CALLS][{"name": "', '", "arguments": ')
    ),
    "hermes": CallFormat(  # Qwen among others
        ("<tool_call>", "</tool_call>"),
        "<tool_call>",
        "</tool_call>",
        opening=('<tool_call>\n{"name": "', '", "arguments": '),
    ),
    "llama3": CallFormat(
        ("ipython", '"parameters": '),
        None,
        None,
        dropped=("<|python_tag|>",),
        opening=('{"name": "', '", "parameters": '),
    ),
}


def format_of(template: str) -> CallFormat | None:
    """Return the form of calls that a chat template shows; None where it shows no tools, or in no form known."""
    if not re.search(r"\btools\b", template):
        return None
    return next((each for each in FORMATS.values() if all(sign in template for sign in each.known_by)), None)


class CallReader:
    """A reader of an answer's text, piece by piece: what is said, and calls. What is no call of a known
    name, or a call that breaks off, is said."""

    def __init__(self, form: CallFormat, names: Collection[str]):
        self._form, self._names = form, frozenset(names)
        self._marks = [mark for mark in (form.start, *form.dropped) if mark]
        self._held, self._blank = "", ""
        self._in_call = self._has_called = False
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
                first_mark = min(
                    ((at, mark) for mark in self._marks if (at := self._held.find(mark)) >= 0), default=None
                )
                if first_mark is None:
                    kept = len(self._held) - max((overlap(self._held, mark) for mark in self._marks), default=0)
                    texts.append(self._held[:kept])
                    self._held = self._held[kept:]
                    break
                at, mark = first_mark
                texts.append(self._held[:at])
                self._held, self._in_call = self._held[at + len(mark) :], mark == self._form.start
            if not self._in_call:
                continue
            if self._form.end is None or (at := self._held.find(self._form.end)) < 0:
                break
            body, self._held, self._in_call = self._held[:at], self._held[at + len(self._form.end) :], False
            body_calls = self._calls(body)
            calls += body_calls
            if not body_calls:
                texts.append(f"{self._form.start}{body}{self._form.end}")
        return self._spoken("".join(texts), bool(calls)), calls

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
        calls = self._calls(rest) if self._is_open or (self._in_call and self._form.end is None) else []
        said = "" if calls else (self._form.start or "") * self._in_call + rest
        spoken = self._spoken(said, bool(calls))
        return (spoken if self._has_called else spoken + self._blank), calls

    def _spoken(self, text: str, has_called: bool) -> str:
        """Return a text without the blanks at its end, which are kept until something follows: none before a call."""
        self._has_called |= has_called
        text = self._blank + text
        spoken = text.rstrip()
        self._blank = text[len(spoken) :]
        if self._has_called and not spoken:
            self._blank = ""
        return spoken

    def _calls(self, body: str) -> list[CalledFunction]:
        """Return the calls that a text holds; none where the text holds anything but calls of known names."""
        pairs: list[tuple[Any, Any]] = []
        for pattern in self._form.patterns:
            if matches := list(pattern.finditer(body)):
                pairs = [(match["name"].strip(), match["arguments"]) for match in matches]
                break
        else:
            try:
                for value in _values(body):
                    pairs += [(each["name"], each.get("arguments", each.get("parameters"))) for each in _listed(value)]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return []
        calls = [called(name, arguments) for name, arguments in pairs]
        if not all(call and call.name in self._names for call in calls):
            return []
        return [call for call in calls if call]


def called(name: Any, arguments: Any) -> CalledFunction | None:
    """Return a call; None where its arguments are no JSON object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        return None
    return CalledFunction(f"call_{uuid.uuid4().hex[:24]}", name, json.dumps(arguments or {}, ensure_ascii=False))


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, with semicolons between."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text := text.strip()):
        value, at = decoder.raw_decode(text, at)
        yield value
        rest = text[at:].lstrip()
        at = len(text) - len(rest)
        if rest:
            if rest[0] != ";":
                raise ValueError("text after a call")
            at += 1 + len(rest[1:]) - len(rest[1:].lstrip())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is a beginning of a mark, and not all of it."""
    return next(n for n in range(min(len(text), len(mark) - 1), -1, -1) if text.endswith(mark[:n]))
