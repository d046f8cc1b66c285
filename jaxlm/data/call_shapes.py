"""Messages with calls of tools, in the shape in which a chat template shows them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.core.json_text import json_text, json_value

Message = Mapping[str, Any]

_SHOWN = 200  # characters of arguments in an error
_NAME, _KEY, _VALUE = "jaxlm_name", "jaxlm_key", "jaxlm_value"
_CALL = {"id": "callprobe", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
_PROBE: list[Message] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "callprobe", "content": "!"},
]


class CallShape(NamedTuple):
    """The shape of messages with calls.

    Attributes:
      content: of a message that has calls and no text.
      is_json: whether arguments are JSON in a text, for templates that write them as they are.
    """

    content: str | None = ""
    is_json: bool = False

    def shaped(self, message: Message) -> Message:
        """Return a message in this shape. Raises InputError for arguments that are no JSON."""
        message = with_arguments_as_tables(message)
        if message.get("role") != "assistant" or not isinstance(calls := message.get("tool_calls"), list) or not calls:
            return message
        if self.is_json:
            calls = [_with_arguments(call, lambda arguments: json_text(arguments)) for call in calls]
        return {**message, "content": message.get("content") or self.content, "tool_calls": calls}


def shape_of(render: Callable[[Sequence[Message], CallShape], str]) -> CallShape:
    """Return the shape in which a template shows a call.

    Some write arguments as a text, and some show calls only where content is none. Of several shapes it is the one with
    the least beside the call: an empty answer, or the word None.

    Args:
      render: shows messages in a shape, and raises InputError where the template refuses them.
    """
    for is_json in (False, True):
        lengths = {}
        for shape in (CallShape("", is_json), CallShape(None, is_json)):
            for messages in (_PROBE[:2], _PROBE):
                try:
                    text = render(messages, shape)
                except InputError:  # it asks for other messages
                    continue
                # A table that is written as it is has Python's quotes.
                if _NAME in text and _VALUE in text and f"'{_KEY}'" not in text:
                    lengths.setdefault(shape, len(text))
                break
        if lengths:
            return min(lengths, key=lambda shape: lengths[shape])
    return CallShape()


def with_arguments_as_tables(message: Message) -> Message:
    """Return a message as templates read it: the arguments of its calls are values, where JSON in a text is given, as
    OpenAI's records have it. Raises InputError for a text that is no JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    return {**message, "tool_calls": [_with_arguments(call, _table) for call in calls]}


def _with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    """Return a call with other arguments."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _with_arguments(function, change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _table(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json_value(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        raise InputError(f"the arguments of a call must be JSON, and are {arguments[:_SHOWN]!r}") from None
