"""Grammars of answers: what is thought before, what is said, and calls, as Lark grammars of llguidance."""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxlm.server.answers.call_formats import CallFormat
from jaxlm.server.answers.reasoning import ThoughtFormat

Controls = Mapping[str, int]
# The terminal of any text: a lexeme takes as much as it can, unless its rule is lazy.
_ANY = "ANY: /(?s:.*)/"


class LarkRules(NamedTuple):
    """An expression of a Lark grammar, and the rules that it is made of."""

    expression: str
    rules: tuple[str, ...] = ()


Arguments = Mapping[str, LarkRules]
"""The arguments of each function."""


def text_rule(text: str, controls: Controls) -> str:
    """Return the expression of a text in which names of control tokens are these tokens; "" for no text."""
    names = sorted(controls, key=len, reverse=True)
    cut = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(f"<[{controls[piece]}]>" if piece in controls else json.dumps(piece) for piece in cut if piece)


def grammar_of(start: LarkRules, *others: LarkRules) -> str:
    """Return the grammar whose texts are those of `start`; `others` have rules of it."""
    rules = dict.fromkeys(rule for each in (start, *others) for rule in each.rules)
    return "\n".join([f"start: {start.expression}", *rules])


def thought_before(form: ThoughtFormat | None, controls: Controls, is_inside: bool) -> LarkRules:
    """Return what may be thought before anything else: from its beginning, or from within it where the prompt has begun
    it."""
    if form is None:
        return LarkRules("")
    thought = LarkRules(f"thought_text {text_rule(form.end, controls)}", ("thought_text: ANY", _ANY))
    if form.end not in controls:
        thought = LarkRules("thought_text", (f"thought_text[lazy]: ANY {json.dumps(form.end)}", _ANY))
    inside = f"{thought.expression} thought_break"
    rules = *thought.rules, r"thought_break: /\n{0,2}/"
    return LarkRules(inside if is_inside else f"({text_rule(form.start, controls)} {inside})?", rules)


def calls_behind(
    form: CallFormat, arguments: Arguments, controls: Controls, name: str | None, parallel: bool
) -> LarkRules:
    """Return the rest of an answer behind the beginning of a call, of any function or of `name`.

    Args:
      parallel: whether several calls may follow each other; of a named function there is one.
    """
    _, before, after = form.opening
    closing = text_rule(form.closing, controls)
    if name is not None:
        return LarkRules(f"{arguments[name].expression} {closing}", arguments[name].rules)
    more = f"({text_rule(form.between, controls)} call)*" if parallel else ""
    call = call_rule(arguments, after, controls)
    return LarkRules(f"{text_rule(before, controls)} call {more} {closing}", call.rules)


def call_rule(arguments: Arguments, after: str, controls: Controls) -> LarkRules:
    """Return the rule `call`: the name of any function, the text `after` it, and its arguments."""
    calls = (f"{text_rule(name + after, controls)} {rule.expression}" for name, rule in arguments.items())
    rules = (rule for each in arguments.values() for rule in each.rules)
    return LarkRules("call", (f"call: {' | '.join(calls)}", *rules))


def free_text(thoughts: ThoughtFormat | None, controls: Controls, is_inside: bool, pattern: str = "(?s:.*)") -> str:
    """Return the terminal `FREE` of any text that is no thought: one whose mark is text would be a part of it."""
    rule = f"FREE: /{pattern}/"
    if thoughts is None or is_inside or thoughts.start in controls:
        return rule
    mark = re.escape(thoughts.start).replace("/", r"\/")
    return f"{rule} & ~/\\s*{mark}(?s:.*)/"


def said_or_called(form: CallFormat, speech: str | None, calls: LarkRules, controls: Controls) -> LarkRules:
    """Return an answer that says something, calls functions, or both; `FREE` is the terminal of any text.

    Args:
      speech: the expression of what is said, without calls then; None for any text, behind which calls may follow.
      calls: what follows the beginning of a call.
    """
    trigger = text_rule(form.opening[0], controls)
    rules = f"calls: {calls.expression}", *calls.rules
    if speech is not None or form.start is None:  # without a mark calls are answers as a whole
        return LarkRules(f"{speech or 'FREE'} | {trigger} calls", rules)
    if trigger.startswith("<["):
        return LarkRules(f"said | said {trigger} calls", ("said: FREE", *rules))
    return LarkRules("said | before_call calls", ("said: FREE", f"before_call[lazy]: FREE {trigger}", *rules))
