"""The form in which a model writes answers, as its chat template shows it."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from jaxlm.server.answers import harmony
from jaxlm.server.answers.calls import AnswerParts, CallFormat, CallReader, format_of
from jaxlm.server.answers.harmony import HarmonyReader
from jaxlm.server.answers.reasoning import ReasoningParser, ThoughtFormat, thoughts_of


class AnswerReader(Protocol):
    """A reader of an answer's text, piece by piece."""

    @property
    def is_inside(self) -> bool:
        """True while it reads what is thought."""
        ...

    def add(self, piece: str) -> AnswerParts:
        """Return what a piece adds."""
        ...

    def rest(self) -> AnswerParts:
        """Return the end of an answer, which was held back."""
        ...


class AnswerFormat(Protocol):
    """A form in which models write answers."""

    def marks(self, names: Collection[str]) -> frozenset[str]:
        """Return the control tokens that a reader of calls of these names is given as text."""
        ...

    @property
    def shows_tools(self) -> bool:
        """Return whether the form has calls."""
        ...

    def reader(self, names: Collection[str], prompt_end: str) -> AnswerReader:
        """Return a reader of calls of these names; `prompt_end` is the end of the prompt, with control tokens."""
        ...

    def opening(self, name: str | None, prompt_end: str) -> str:
        """Return the text that begins a call, of any function or of one, behind a prompt."""
        ...


@dataclass(frozen=True)
class PlainForm:
    """Text that may hold calls, and before which thoughts may stand between marks."""

    calls: CallFormat | None
    thoughts: ThoughtFormat | None

    def marks(self, names: Collection[str]) -> frozenset[str]:
        thoughts = frozenset([self.thoughts.start, self.thoughts.end]) if self.thoughts else frozenset()
        return thoughts | (self.calls.marks if self.calls and names else frozenset())

    @property
    def shows_tools(self) -> bool:
        return self.calls is not None

    def reader(self, names: Collection[str], prompt_end: str) -> AnswerReader:
        calls = CallReader(self.calls, names) if self.calls and names else None
        return _PlainReader(self.thoughts and ReasoningParser(self.thoughts, self._is_inside(prompt_end)), calls)

    def opening(self, name: str | None, prompt_end: str) -> str:
        assert self.calls is not None
        before, after = self.calls.opening
        thought = f"{self.thoughts.end}\n\n" if self.thoughts and self._is_inside(prompt_end) else ""
        return thought + (before if name is None else f"{before}{name}{after}")

    def _is_inside(self, prompt_end: str) -> bool:
        return self.thoughts is not None and prompt_end.rstrip().endswith(self.thoughts.start)


class HarmonyForm:
    """Messages in channels, as gpt-oss writes them."""

    shows_tools = True

    def marks(self, names: Collection[str]) -> frozenset[str]:
        return frozenset(harmony.MARKS)

    def reader(self, names: Collection[str], prompt_end: str) -> AnswerReader:
        return HarmonyReader(names)

    def opening(self, name: str | None, prompt_end: str) -> str:
        before, after = harmony.OPENING
        return before if name is None else f"{before}{name}{after}"


def form_of(template: str) -> AnswerFormat | None:
    """Return the form of answers that a chat template shows; None for text alone."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HarmonyForm()
    calls, thoughts = format_of(template), thoughts_of(template)
    return PlainForm(calls, thoughts) if calls or thoughts else None


class _PlainReader:
    def __init__(self, thoughts: ReasoningParser | None, calls: CallReader | None):
        self._thoughts, self._calls = thoughts, calls

    @property
    def is_inside(self) -> bool:
        return self._thoughts is not None and self._thoughts.is_inside

    def add(self, piece: str) -> AnswerParts:
        said, thought = self._thoughts.add(piece) if self._thoughts else (piece, "")
        said, calls = self._calls.add(said) if self._calls and said else (said, [])
        return AnswerParts(said, thought, tuple(calls))

    def rest(self) -> AnswerParts:
        said, thought = self._thoughts.rest() if self._thoughts else ("", "")
        if self._calls is None:
            return AnswerParts(said, thought)
        said, calls = self._calls.add(said)
        more, others = self._calls.rest()
        return AnswerParts(said + more, thought, (*calls, *others))
