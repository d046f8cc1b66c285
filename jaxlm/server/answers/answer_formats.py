"""The form in which a model writes answers, as its chat template shows it."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxlm.core.errors import InputError
from jaxlm.core.json_text import json_value
from jaxlm.data.chat_template import ChatTemplate
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.grammar import Grammar, GrammarError, json_rule
from jaxlm.server.answers import harmony
from jaxlm.server.answers.call_formats import FORMATS, CallFormat
from jaxlm.server.answers.call_syntax import Schemas, TaggedSyntax
from jaxlm.server.answers.calls import AnswerParts, CallReader
from jaxlm.server.answers.grammars import (
    Arguments,
    Controls,
    LarkRules,
    calls_behind,
    free_text,
    grammar_of,
    said_or_called,
    thought_before,
)
from jaxlm.server.answers.harmony import HarmonyReader
from jaxlm.server.answers.reasoning import ReasoningParser, ThoughtFormat, thoughts_of
from jaxlm.server.answers.tagged_grammars import tagged_arguments

_PROMPT_END = 16  # tokens of a prompt that say where its answer begins


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
        """Return the control tokens that a reader of calls of these functions is given as text."""
        ...

    @property
    def shows_tools(self) -> bool:
        """Return whether the form has calls."""
        ...

    def reader(self, schemas: Schemas, prompt_end: str) -> AnswerReader:
        """Return a reader of calls of these functions; `prompt_end` is the end of the prompt, with control tokens."""
        ...

    def opening(self, name: str | None, prompt_end: str) -> str:
        """Return the text that begins a call behind a prompt, of any function (its first mark) or of one."""
        ...

    def arguments(self, schemas: Mapping[str, Mapping[str, Any]], lenient: Collection[str]) -> Arguments:
        """Return the arguments of functions by their schemas, for `grammar`.

        Args:
          lenient: functions of whose schemas only what can be held to is.

        Raises GrammarError for a schema that the form cannot be held to.
        """
        ...

    def grammar(
        self, speech: str | None, arguments: Arguments, controls: Controls, prompt_end: str, parallel: bool
    ) -> str | None:
        """Return the Lark grammar of whole answers; None where the form has none for want of control tokens.

        Args:
          speech: the expression of what is said; None for any text.
          arguments: of functions that may be called.
          controls: the ids of control tokens.
          parallel: whether an answer may have several calls.
        """
        ...

    def grammar_behind_opening(self, name: str | None, arguments: Arguments, controls: Controls, parallel: bool) -> str:
        """Return the Lark grammar of what follows `opening`."""
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

    def reader(self, schemas: Schemas, prompt_end: str) -> AnswerReader:
        calls = CallReader(self.calls, schemas) if self.calls and schemas else None
        return _PlainReader(self.thoughts and ReasoningParser(self.thoughts, self._is_inside(prompt_end)), calls)

    def opening(self, name: str | None, prompt_end: str) -> str:
        assert self.calls is not None
        thought = f"{self.thoughts.end}\n\n" if self.thoughts and self._is_inside(prompt_end) else ""
        return thought + _begun(self.calls.opening, name)

    def arguments(self, schemas: Mapping[str, Mapping[str, Any]], lenient: Collection[str]) -> Arguments:
        assert self.calls is not None
        tags, syntax = self.calls.tags, self.calls.syntax
        if tags is None:
            return _json_arguments(schemas, lenient)
        assert isinstance(syntax, TaggedSyntax)
        return {
            name: tagged_arguments(tags, syntax, schema, prefix=f"{place}_", is_lenient=name in lenient)
            for place, (name, schema) in enumerate(schemas.items())
        }

    def grammar(
        self, speech: str | None, arguments: Arguments, controls: Controls, prompt_end: str, parallel: bool
    ) -> str:
        is_inside = self._is_inside(prompt_end)
        thought = thought_before(self.thoughts, controls, is_inside)
        body, pattern = LarkRules(speech or "FREE"), "(?s:.*)"
        if arguments:
            assert self.calls is not None
            calls = calls_behind(self.calls, arguments, controls, None, parallel)
            body = said_or_called(self.calls, speech, calls, controls)
            if self.calls.start is None:
                pattern = r"([^{\s](?s:.*))?"  # what begins otherwise is a call
        free = free_text(self.thoughts, controls, is_inside, pattern)
        return grammar_of(LarkRules(f"{thought.expression} ({body.expression})"), thought, body, LarkRules("", (free,)))

    def grammar_behind_opening(self, name: str | None, arguments: Arguments, controls: Controls, parallel: bool) -> str:
        assert self.calls is not None
        return grammar_of(calls_behind(self.calls, arguments, controls, name, parallel))

    def _is_inside(self, prompt_end: str) -> bool:
        return self.thoughts is not None and prompt_end.rstrip().endswith(self.thoughts.start)


@dataclass(frozen=True)
class HarmonyForm:
    """Messages in channels, as gpt-oss writes them."""

    shows_tools: bool = True

    def marks(self, names: Collection[str]) -> frozenset[str]:
        return frozenset(harmony.MARKS)

    def reader(self, schemas: Schemas, prompt_end: str) -> AnswerReader:
        return HarmonyReader(schemas)

    def opening(self, name: str | None, prompt_end: str) -> str:
        return _begun(harmony.OPENING, name)

    def arguments(self, schemas: Mapping[str, Mapping[str, Any]], lenient: Collection[str]) -> Arguments:
        return _json_arguments(schemas, lenient)

    def grammar(
        self, speech: str | None, arguments: Arguments, controls: Controls, prompt_end: str, parallel: bool
    ) -> str | None:
        return harmony.grammar(speech, arguments, controls) if controls.keys() >= set(harmony.MARKS) else None

    def grammar_behind_opening(self, name: str | None, arguments: Arguments, controls: Controls, parallel: bool) -> str:
        return harmony.grammar_behind_opening(name, arguments, controls)


def _json_arguments(schemas: Mapping[str, Mapping[str, Any]], lenient: Collection[str]) -> Arguments:
    """Return arguments that are written as JSON."""
    return {name: LarkRules(json_rule(schema, is_lenient=name in lenient)) for name, schema in schemas.items()}


def prompt_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """Return the end of a prompt as text, with the names of control tokens."""
    return tokenizer.spelled_out(prompt[-_PROMPT_END:])


def grammar_of_answer(
    form: AnswerFormat | None, grammar: Grammar, tokenizer: Tokenizer, prompt: Sequence[int]
) -> Grammar:
    """Return the grammar of answers that say a text of `grammar`, behind anything that is thought.

    Args:
      form: of the model's answers; None for text alone.
      prompt: which may have begun a thought.

    Raises GrammarError for a form that has no grammar.
    """
    if form is None:
        return grammar
    rules = form.grammar("@text", {}, tokenizer.controls, prompt_end(tokenizer, prompt), parallel=True)
    if rules is None:
        raise GrammarError("the model's form of answers cannot be held to a grammar: it has no control tokens for it")
    return grammar._replace(around=rules)


def _begun(opening: tuple[str, str, str], name: str | None) -> str:
    """Return the text that begins a call, of any function or of one."""
    start, before, after = opening
    return start if name is None else f"{start}{before}{name}{after}"


# A call that each template is asked to show.
_PROBE, _ARGUMENTS = "jaxlm_probe", {"city": "Oslo", "days": 7}
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": []}
_TOOL = {"type": "function", "function": {"name": _PROBE, "description": "A probe.", "parameters": _SCHEMA}}
_QUESTION = {"role": "user", "content": "?"}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "callprobe", "type": "function", "function": {"name": _PROBE, "arguments": _ARGUMENTS}},
    ],
}


def form_of(template: ChatTemplate) -> AnswerFormat | None:
    """Return the form of answers that a chat template shows; None for text alone.

    The form of its calls is the one in which a call is read back as it was given, once the template has shown it.
    """
    written = _probe_answer(template)
    if "<|channel|>" in template.source and "<|message|>" in template.source:
        return HarmonyForm(written is not None and written.is_read_by(HarmonyForm()))
    thoughts = thoughts_of(template.source)
    forms = [form for form in FORMATS.values() if written and written.is_read_by(PlainForm(form, thoughts))]
    calls = next((form for form in forms if written and written.begins_as(form)), forms[0] if forms else None)
    return PlainForm(calls, thoughts) if calls or thoughts else None


@dataclass(frozen=True)
class _ProbeAnswer:
    """The answer that is a call of the probe, with the names of all control tokens; and what stands before it."""

    text: str
    prompt: str
    controls: Collection[str]

    def is_read_by(self, form: AnswerFormat) -> bool:
        text, shown = self.text, form.marks([_PROBE])
        for name in sorted(self.controls, key=len, reverse=True):
            if name not in shown:  # a reader is not given it
                text = text.replace(name, "")
        reader = form.reader({_PROBE: _SCHEMA}, self.prompt)
        calls = [call for parts in (reader.add(text), reader.rest()) for call in parts.calls]
        return [(call.name, json_value(call.arguments)) for call in calls] == [(_PROBE, _ARGUMENTS)]

    def begins_as(self, form: CallFormat) -> bool:
        """Return whether the call begins with the form's opening, but for blanks."""
        return "".join(_begun(form.opening, _PROBE).split()) in "".join(self.text.split())


def _probe_answer(template: ChatTemplate) -> _ProbeAnswer | None:
    """Return a call as a template shows it; None where it shows no tools, or refuses to show a call."""
    try:
        before = [template.render([_QUESTION], reply=reply, tools=[_TOOL]) for reply in (True, False)]
        shown = template.render([_QUESTION, _CALL], reply=False, tools=[_TOOL])
    except InputError:
        return None
    # A prompt may go on as no answer of the history does, such as with the beginning of a thought.
    prompt = next((text for text in before if shown.startswith(text)), os.path.commonprefix([before[1], shown]))
    if _PROBE not in before[0]:
        return None
    return _ProbeAnswer(shown[len(prompt) :], prompt, template.tokenizer.controls)


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
