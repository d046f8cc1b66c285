"""Messages of a conversation, and the tools that they may call, as chat templates read them."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxlm.core.errors import InputError
from jaxlm.data.chat_template import ChatTemplate
from jaxlm.server.refusals import Refusal
from jaxlm.server.schema import RequestBody, in_words, neutral
from jaxlm.server.served import ServedModel

_NO_AUDIO = "the models here read and write text"
_PROMPT_END = 16  # tokens of a prompt that say where its answer begins
_THOUGHTS = ("reasoning_content", "thinking")  # keys of messages, as templates read them
_EFFORT = "reasoning_effort"
_NOT_SHOWN = "it is no part of what a template shows"


class TextPart(RequestBody):
    """A part of a message. There are no others than text."""

    type: Literal["text"]
    text: str


class FunctionBody(RequestBody):
    """A function that an answer may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments, which the model is shown."""
    strict: neutral(False, why="arguments are not held to their schema yet") = None


class ToolBody(RequestBody):
    """A tool: a function."""

    type: Literal["function"]
    function: FunctionBody


class CallArguments(RequestBody):
    """The function of a call, with its arguments as JSON."""

    name: str
    arguments: str


class CallBody(RequestBody):
    """A call in a message of the assistant's."""

    id: str | None = None
    type: Literal["function"]
    function: CallArguments


class MessageBody(RequestBody):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who says it; "developer" is "system" where the template knows no developer."""
    content: Annotated[
        str | list[TextPart] | None, in_words('a text, or a list of parts such as {"type": "text", "text": "Hello"}')
    ] = None
    """A text; parts are lines of one."""
    name: str | None = None
    """For templates that show it."""
    tool_calls: list[CallBody] | None = None
    """What an answer before has called."""
    reasoning_content: str | None = None
    """What an answer before has thought, for templates that show it."""
    tool_call_id: str | None = None
    """The call that a message of a tool answers."""
    refusal: neutral(why=_NOT_SHOWN) = None
    annotations: neutral([], why=_NOT_SHOWN) = None
    audio: neutral(why=_NO_AUDIO) = None
    function_call: neutral(why="tool_calls say the same") = None


def template_of(
    served: ServedModel, kwargs: Mapping[str, Any] | None = None, effort: str | None = None
) -> ChatTemplate:
    """Return the chat template, with variables of a request. Raises Refusal where the model has no template, or the
    template reads no such variable."""
    if served.chat_template is None:
        raise Refusal(f"{served.name} has no chat template; send a prompt to /v1/completions", code="no_chat_template")
    if effort is not None and _EFFORT not in served.chat_template.reads:
        raise Refusal(
            f"{_EFFORT} is not supported: the model's chat template does not read it; leave it out",
            param=_EFFORT,
            code="unsupported_parameter",
        )
    try:
        return served.chat_template.with_kwargs((kwargs or {}) | ({} if effort is None else {_EFFORT: effort}))
    except InputError as error:
        raise Refusal(str(error), param="chat_template_kwargs") from None


def encoded(template: ChatTemplate, messages: list[MessageBody], tools: Sequence[ToolBody] = ()) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins. Raises Refusal where the template refuses
    it."""
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    try:
        return template.encode(
            [_shown(message, template.source) for message in messages], reply=True, tools=shown or None
        )
    except InputError as error:
        raise Refusal(str(error), param="messages") from None


def prompt_end(served: ServedModel, prompt: Sequence[int]) -> str:
    """Return the end of a prompt as text, with the names of control tokens."""
    return served.tokenizer.spelled_out(prompt[-_PROMPT_END:])


def _shown(message: MessageBody, template: str) -> dict[str, Any]:
    """Return a message as templates read it."""
    content = message.content
    if content is None and not message.tool_calls:
        raise Refusal("messages: content is missing", param="messages", code="missing_parameter")
    if content is not None and not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    role = message.role
    if role == "developer" and "developer" not in template:
        role = "system"
    shown: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        if not re.search(r"\bname\b", template):
            raise Refusal("messages: the model's chat template shows no name; leave it out", param="messages")
        shown["name"] = message.name
    if (message.tool_calls or role == "tool") and not re.search(r"\btool", template):
        raise Refusal("messages: the model's chat template shows no calls of tools; leave them out", param="messages")
    if message.tool_calls:
        shown["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    if message.reasoning_content is not None:
        key = next((key for key in _THOUGHTS if re.search(rf"\b{key}\b", template)), None)
        if key is None:
            raise Refusal(
                "messages: the model's chat template shows no reasoning_content; leave it out", param="messages"
            )
        shown[key] = message.reasoning_content
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown
