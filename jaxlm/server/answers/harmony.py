"""Answers in the form of gpt-oss, "harmony": several messages with a channel each, of thoughts, text or calls.

Source: https://github.com/openai/harmony, docs/format.md.
"""

import re
from collections.abc import Collection

from jaxlm.server.answers.call_syntax import is_inside_json_string
from jaxlm.server.answers.calls import AnswerParts, CalledFunction, called, first_mark, overlap
from jaxlm.server.answers.grammars import Arguments, Controls, LarkRules, call_rule, grammar_of, text_rule

_START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN, _CONSTRAIN = MARKS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
)
_ENDS = (_END, _CALL, _RETURN, _START, _CHANNEL)  # of a message
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
OPENING = f"{_CHANNEL}commentary to=functions.", "", f" {_CONSTRAIN}json{_MESSAGE}"


def grammar(speech: str | None, arguments: Arguments, controls: Controls) -> str:
    """Return the Lark grammar of an answer: thoughts and comments, then a message that says `speech` (None: any text)
    or a call."""
    begin, message = text_rule(_CHANNEL, controls), text_rule(_MESSAGE, controls)
    next_one = text_rule(f"{_END}{_START}assistant", controls)
    before = f'({begin} ("analysis" | "commentary") {message} other {next_one})*'
    last = f'{begin} "final" {message} {speech or "other"}'
    rules = ["other: /(?s:.*)/"]
    if arguments:
        last += f" | {text_rule(OPENING[0], controls)} call"
        rules += call_rule(arguments, OPENING[2], controls).rules
    return grammar_of(LarkRules(f"{before} ({last})", tuple(rules)))


def grammar_behind_opening(name: str | None, arguments: Arguments, controls: Controls) -> str:
    """Return the Lark grammar of the rest of a call, of any function or of one, behind the text that begins it."""
    if name is not None:
        return grammar_of(arguments[name])
    return grammar_of(call_rule(arguments, OPENING[2], controls))


class HarmonyReader:
    """A reader of an answer's text, piece by piece, in which control tokens are spelled out: what is said, what is
    thought, and calls of known names."""

    def __init__(self, names: Collection[str]):
        self._names, self._held, self._body = frozenset(names), "", ""
        self._is_header = True
        self._kind = ""  # "said", "thought", or the name of a function

    @property
    def is_inside(self) -> bool:
        """True while it reads what is thought."""
        return not self._is_header and self._kind == "thought"

    def add(self, piece: str) -> AnswerParts:
        """Return what a piece adds."""
        self._held += piece
        answer, thought = [], []
        calls: list[CalledFunction] = []
        while True:
            if self._is_header:
                if (at := self._held.find(_MESSAGE)) < 0:
                    break
                self._begin(self._held[:at])
                self._held = self._held[at + len(_MESSAGE) :]
            first_end = first_mark(self._held, _ENDS, self._is_inside_value)
            end = first_end[0] if first_end else len(self._held) - max(overlap(self._held, mark) for mark in _ENDS)
            text, self._held = self._held[:end], self._held[end:]
            if self._kind in ("said", "thought"):
                (answer if self._kind == "said" else thought).append(text)
            else:
                self._body += text
            if first_end is None:
                break
            more, ended = self._ended()
            answer.append(more)
            calls += ended
            mark = first_end[1]
            self._is_header, self._held = True, self._held.removeprefix(mark if mark not in (_START, _CHANNEL) else "")
        return AnswerParts("".join(answer), "".join(thought), tuple(calls))

    def rest(self) -> AnswerParts:
        """Return the end of an answer, which was held back."""
        text, self._held = self._held, ""
        if self._is_header:  # a header that breaks off, or an answer without any
            return AnswerParts("" if self._kind else text)
        if self._kind in ("said", "thought"):
            return AnswerParts(**{self._kind: text})
        self._body += text
        said, calls = self._ended()
        return AnswerParts(said, calls=tuple(calls))

    def _begin(self, header: str) -> None:
        """Begin the message of a header."""
        recipient, channel = _RECIPIENT.search(header), header.partition(_CHANNEL)[2]
        self._is_header, self._body = False, ""
        self._kind = recipient[1] if recipient else "thought" if channel.startswith("analysis") else "said"

    def _is_inside_value(self, text: str) -> bool:
        """Return whether the body breaks off inside a string of a call's arguments behind this text."""
        return self._kind not in ("said", "thought") and is_inside_json_string(self._body + text)

    def _ended(self) -> tuple[str, list[CalledFunction]]:
        """Return the call that has ended, or its body as text where it is no call of a known name."""
        if self._kind in ("said", "thought"):
            return "", []
        body, self._body = self._body, ""
        call = called(self._kind, body) if self._kind in self._names else None
        return ("", [call]) if call else (body, [])
