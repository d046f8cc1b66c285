"""Checks of messages before a chat template shows them: the same ones for training, evaluation, answers and the server.

Most templates write any role, or leave a message out, without a word.
"""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.data.call_shapes import Message

_ROLES = "system", "user", "assistant"  # of every template


def known_role(role: str, source: str, place: int) -> str:
    """Return a role as a template of this source reads it: "developer" is "system" where it knows no developer. Raises
    InputError, which names the `place` of the message, for a misspelt role of every template."""
    if role == "developer" and "developer" not in source:
        return "system"
    if role not in _ROLES and role not in source and (near := get_close_matches(role.lower(), _ROLES, 1, 0.8)):
        raise InputError(f"messages.{place}.role: the template knows no {role!r}; did you mean {near[0]!r}?")
    return role


def check_shown(messages: Sequence[Message], render: Callable[[Sequence[Message]], str], calls: bool) -> None:
    """Raise InputError where a template drops the result of a call, a message of a role that it does not know, or, with
    `calls`, the name of a call.

    Each of these has a mark in its place, which must be in the text that `render` returns.
    """
    marked, dropped = [], {}
    for place, message in enumerate(messages):
        other, where = dict(message), f"messages.{place}: the model's chat template does not show"
        if message["role"] not in _ROLES:
            other["content"] = f"jaxlm_content_{place}."
            dropped[other["content"]] = f"{where} a message of the role {message['role']!r} here; leave it out"
        if functions := _functions(message) if calls else []:
            beside = "where it stands beside a text; leave its content" if message.get("content") else "here; leave it"
            other["tool_calls"] = []
            for number, (call, function) in enumerate(functions):
                name = f"jaxlm_call_{place}_{number}."
                renamed = {**function, "name": name}
                other["tool_calls"].append(renamed if function is call else {**call, "function": renamed})
                dropped[name] = f"{where} the call of {function.get('name')!r} {beside} out"
        marked.append(other)
    if not dropped:
        return
    try:
        text = render(marked)
    except InputError:  # it reads what stands there
        return
    if why := next((why for mark, why in dropped.items() if mark not in text), None):
        raise InputError(why)


def _functions(message: Message) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return each call of a message with its function, which may be the call itself."""
    calls = message.get("tool_calls") or []
    return [
        (call, function if isinstance(function := call.get("function"), Mapping) else call)
        for call in (calls if isinstance(calls, list) else [])
        if isinstance(call, Mapping)
    ]
