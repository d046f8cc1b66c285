"""Messages of a conversation, and the tools that they may call, as chat templates read them."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxlm.core.errors import InputError
from jaxlm.data.chat_template import ChatTemplate
from jaxlm.data.message_checks import known_role
from jaxlm.server.refusals import Refusal, refusing
from jaxlm.server.request_body import RequestBody
from jaxlm.server.schema import in_words, neutral
from jaxlm.server.served import ServedModel

_NO_AUDIO = "the models here read and write text"
_THOUGHTS = ("reasoning_content", "thinking")  # keys of messages, as templates read them
_EFFORT = "reasoning_effort"
_NOT_SHOWN = "it is no part of what a template shows"


Role = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]


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
    strict: bool | None = None
    """Hold the arguments of calls to their schema (false)."""


class ToolBody(RequestBody):
    """A tool: a function."""

    type: Literal["function"]
    function: FunctionBody

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as a template shows it: models know nothing of `strict`."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


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

    role: Role
    """Who says it: "system", "user", "assistant", "tool", or a role of the template's own. "developer" is "system"
    where the template knows no developer."""
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


class ConversationBody(RequestBody):
    """The end of a conversation, where the model begins."""

    add_generation_prompt: bool | None = None
    """Begin a message of the assistant's behind the conversation (true, unless the final message is continued)."""
    continue_final_message: bool | None = None
    """End within the final message, behind its content, which the model then continues (false)."""

    @property
    def ending(self) -> dict[str, bool]:
        """The arguments of `ChatTemplate.encode` for it. Raises Refusal where two are asked for."""
        if self.continue_final_message and self.add_generation_prompt:
            raise Refusal(
                "continue_final_message and add_generation_prompt exclude each other; give one of them",
                param="continue_final_message",
            )
        continues = bool(self.continue_final_message)
        return {"reply": not continues and self.add_generation_prompt is not False, "continues": continues}


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


def encoded(
    template: ChatTemplate,
    messages: list[MessageBody],
    tools: Sequence[ToolBody] = (),
    *,
    reply: bool = True,
    continues: bool = False,
) -> list[int]:
    """Return the token ids of a conversation, by default up to where the answer begins (`ChatTemplate.encode`). Raises
    Refusal where the template refuses it."""
    shown_tools = [tool.shown for tool in tools] or None
    shown = [_shown(message, template.source, place) for place, message in enumerate(messages)]
    with refusing("messages"):
        ids = template.encode(shown, reply=reply, tools=shown_tools, continues=continues)
        template.check_shown(shown, reply=True, tools=shown_tools)
    return ids


def continued_text(
    template: ChatTemplate, messages: list[MessageBody], tools: Sequence[ToolBody] = ()
) -> tuple[str, str]:
    """Return the end of the conversation before an answer that is its final message, and the answer so far, both with
    the names of control tokens, as the template shows them."""
    shown = [tool.shown for tool in tools] or None
    *before, last = [_shown(message, template.source, place) for place, message in enumerate(messages)]
    with refusing("messages"):
        whole = template.render([*before, last], reply=False, tools=shown, continues=True)
    try:
        begun = template.render(before, reply=True, tools=shown)
    except InputError:  # a template may want a message
        return "", last["content"]
    at = len(os.path.commonprefix([begun, whole]))
    return whole[:at], whole[at:]


def _shown(message: MessageBody, template: str, place: int) -> dict[str, Any]:
    """Return a message as templates read it."""
    content = message.content
    if content is None and not message.tool_calls:
        where = f"messages.{place}.content"
        raise Refusal(f"{where} is missing", param=where, code="missing_parameter")
    if content is not None and not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    with refusing(f"messages.{place}.role"):
        role = known_role(message.role, template, place)
    shown: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        if not re.search(r"\bname\b", template):
            raise _not_shown(f"messages.{place}.name", "name; leave it")
        shown["name"] = message.name
    if (message.tool_calls or role == "tool") and not re.search(r"\btool", template):
        where = f"messages.{place}.{'tool_calls' if message.tool_calls else 'role'}"
        raise _not_shown(where, "calls of tools; leave them")
    if message.tool_calls:
        shown["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    if message.reasoning_content is not None:
        key = next((key for key in _THOUGHTS if re.search(rf"\b{key}\b", template)), None)
        if key is None:
            raise _not_shown(f"messages.{place}.reasoning_content", "reasoning_content; leave it")
        shown[key] = message.reasoning_content
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _not_shown(where: str, what: str) -> Refusal:
    """Return the refusal of a part of a message that the template has no place for."""
    return Refusal(f"{where}: the model's chat template shows no {what} out", param=where)
