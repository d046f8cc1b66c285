"""/v1/chat/completions: answers to messages, which the model's chat template shows."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, NotRequired

from anyio import to_thread
from pydantic import Field
from typing_extensions import TypedDict

from jaxlm.inference.generation import Token
from jaxlm.inference.grammar import Grammar
from jaxlm.inference.requests import MAX_LOGPROBS
from jaxlm.server.answers.answer_formats import prompt_end
from jaxlm.server.answers.call_formats import FORMATS
from jaxlm.server.answers.calls import CalledFunction
from jaxlm.server.answers.text import with_controls
from jaxlm.server.events import Streamed
from jaxlm.server.messages import (
    ConversationBody,
    MessageBody,
    ToolBody,
    continued_text,
    encoded,
    template_of,
)
from jaxlm.server.prompt_scores import PromptLogprobs, prompt_logprobs
from jaxlm.server.refusals import Refusal, refusing
from jaxlm.server.request_body import RequestBody
from jaxlm.server.schema import DrawingBody, drawing, in_words, neutral
from jaxlm.server.served import Caller, ServedModel
from jaxlm.server.texts import AnswerOptions, CompletionRequest, CompletionStream, TextDelta, Usage, truncated

_OLD = "tools and tool_choice say the same"
_NO_PARAMETERS = {"additionalProperties": False}
_NO_AUDIO = "the models here read and write text"


class FunctionName(RequestBody):
    """The name of a function."""

    name: str


class ToolChoice(RequestBody):
    """The function that an answer calls."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(DrawingBody, ConversationBody):
    """A request for answers to a conversation."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    """The conversation, which the answer follows."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most tokens of an answer; what the context leaves where it is not given."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The former name of `max_completion_tokens`."""
    logprobs: bool | None = None
    """Give the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Give those of so many likeliest tokens too."""
    tools: list[ToolBody] | None = None
    """Functions that an answer may call, in the form that the model's chat template shows."""
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolChoice | None,
        in_words('"none", "auto", "required", or {"type": "function", "function": {"name": …}}'),
    ] = None
    """"none" shows the model no tools; with "required", or a function, an answer is calls."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables that the model's chat template reads, such as `enable_thinking`."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls (true); otherwise it ends with its first."""
    functions: neutral([], why=_OLD) = None
    function_call: neutral("none", "auto", why=_OLD) = None
    modalities: neutral(["text"], why=_NO_AUDIO) = None
    audio: neutral(why=_NO_AUDIO) = None
    prediction: neutral(why="nothing is guessed ahead") = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """How much is thought before the answer, for a model whose chat template reads it."""
    verbosity: neutral("medium", why="the models here have no such dial") = None
    service_tier: neutral("auto", "default", why="there is one tier") = None
    web_search_options: neutral(why="the model searches nothing") = None
    prompt_cache_key: str | None = None
    """A hint where prompts may be found again, of which nothing is needed here."""
    safety_identifier: str | None = None
    """A name for the caller's end user; nothing depends on it."""

    @property
    def shown_tools(self) -> list[ToolBody]:
        """The tools that the model is shown. Raises Refusal for the choice of one that is not there."""
        names, choice = [tool.function.name for tool in self.tools or []], self.tool_choice
        if choice == "required" and not names:
            raise Refusal('tool_choice = "required" needs tools', param="tool_choice")
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise Refusal(f"tool_choice: no function {choice.function.name!r} is in tools", param="tool_choice")
        return [] if choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        """True if the answer begins with a call. Raises Refusal where it has begun already."""
        must_call = self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)
        if must_call and not self.ending["reply"]:
            raise Refusal("tool_choice begins an answer; leave it out to go on with a message", param="tool_choice")
        return must_call

    @property
    def chosen(self) -> str | None:
        """The function that the answer calls, if one is named."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, ToolChoice) else None

    @property
    def role(self) -> str:
        """The role of the answer."""
        return "assistant" if self.ending["reply"] else self.messages[-1].role

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of an answer. Raises Refusal where two are given that differ."""
        limits = {limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None}
        if len(limits) > 1:
            raise Refusal(
                f"max_tokens = {self.max_tokens} and max_completion_tokens = {self.max_completion_tokens} are one "
                "limit; give one of them",
                param="max_tokens",
            )
        return next(iter(limits), None)

    @property
    def asked_logprobs(self) -> int | None:
        """The number of likeliest tokens whose log-probabilities are asked for; None: not even the drawn token's is."""
        if self.top_logprobs and not self.logprobs:
            raise Refusal("top_logprobs needs logprobs = true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class LikelyToken(TypedDict):
    token: str
    bytes: list[int]
    logprob: float


class ChatToken(LikelyToken):
    """A token with its log-probability, and those of the likeliest ones in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(TypedDict):
    content: list[ChatToken]
    refusal: None


class ToolCallFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a function, with its arguments as JSON; in a stream with its index, and whole."""

    index: NotRequired[int]
    id: str
    type: Literal["function"]
    function: ToolCallFunction


class AssistantMessage(TypedDict):
    """An answer. Its role is the assistant's, or that of the final message where no message of the assistant's was
    begun behind it."""

    role: str
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatAnswer(TypedDict):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None


class ChatDelta(TypedDict):
    role: NotRequired[str]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(TypedDict):
    """The parts of answers that were drawn since the chunk before."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_logprobs: NotRequired[PromptLogprobs]


async def answer_chat(served: ServedModel, caller: Caller, body: ChatBody) -> ChatAnswer | Streamed:
    """Answer a conversation."""
    includes_usage = body.includes_usage
    texts = await to_thread.run_sync(_texts, served, caller, body)
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": served.name}
    if body.stream:
        await texts.begin()
        return Streamed(texts, _chunks(served, texts, body.role, head, includes_usage))
    async with texts:
        return await _whole(served, texts, body.role, head)


def _texts(served: ServedModel, caller: Caller, body: ChatBody) -> CompletionStream:
    sampling, options = body.sampling(served.sampling, body.asked_logprobs), drawing(body)
    tools, template = body.shown_tools, template_of(served, body.chat_template_kwargs, body.reasoning_effort)
    form, schemas = served.answer_format, {tool.function.name: tool.function.parameters for tool in tools}
    if tools and not (form and form.shows_tools):
        raise Refusal(
            f"{served.name} has no chat template that shows tools in a form that is known here: "
            f"{', '.join([*FORMATS, 'gpt-oss'])}; leave tools out",
            param="tools",
            code="unsupported_parameter",
        )
    prompt, answer = encoded(template, body.messages, tools, **body.ending), None
    if form:
        answer = AnswerOptions(
            form, schemas, body.parallel_tool_calls is not False, prompt_end(served.tokenizer, prompt)
        )
        if body.continue_final_message:
            before, begun = continued_text(template, body.messages, tools)
            answer = answer._replace(prompt_end=before, continued=begun)
        if body.must_call:
            begun = form.opening(body.chosen, answer.prompt_end)
            answer, prompt = answer._replace(begun=begun), [*prompt, *with_controls(served.tokenizer, begun)]
    grammar, param = _grammar(served, body, tools, answer)
    prompt = truncated(served, prompt, body.truncate_prompt_tokens, body.most_tokens)
    if not body.ignore_eos:
        options["stop_token_ids"] = (*options["stop_token_ids"], *template.stop_token_ids)
    completion = CompletionRequest(
        [prompt],
        body.most_tokens,
        sampling,
        is_answer=True,
        answer=answer,
        grammar=grammar,
        grammar_param=param,
        **options,
    )
    return CompletionStream(served, caller, completion)


def _grammar(
    served: ServedModel, body: ChatBody, tools: list[ToolBody], answer: AnswerOptions | None
) -> tuple[Grammar | None, str]:
    """Return the grammar of an answer, of what it says and of its calls, as far as either is asked for, and the
    parameter that asks for it. Raises Refusal where the model's form has none."""
    grammar, controls = body.grammar, served.tokenizer.controls
    is_strict = any(tool.function.strict for tool in tools)
    param = body.grammar_param if grammar is not None and not body.must_call else "tools"
    if answer is None or (body.continue_final_message and not tools):
        return grammar, param
    if grammar is None and not is_strict and not body.must_call:
        return None, param
    functions = [tool.function for tool in tools]
    schemas = {each.name: {"type": "object", **(each.parameters or _NO_PARAMETERS)} for each in functions}
    with refusing("tools", "tools: "):
        # Of a tool that is not strict, what can be held to of its schema is.
        lenient = [each.name for each in functions if not each.strict]
        arguments = answer.form.arguments(schemas, lenient) if schemas else {}
    parallel = body.parallel_tool_calls is not False
    if body.must_call:
        rules = answer.form.grammar_behind_opening(body.chosen, arguments, controls, parallel)
        return Grammar("lark", rules), param
    speech = None if grammar is None else "@text"
    rules = answer.form.grammar(speech, arguments, controls, answer.prompt_end, parallel)
    if rules is None:
        raise Refusal(
            f"{param}: the form in which {served.name} writes {'calls' if tools else 'answers'} cannot be held to a "
            "grammar; leave out strict tools, and tools beside a form of the text",
            param=param,
            code="unsupported_parameter",
        )
    return Grammar("lark", rules) if grammar is None else grammar._replace(around=rules), param


async def _whole(served: ServedModel, texts: CompletionStream, role: str, head: dict[str, Any]) -> ChatAnswer:
    pieces: list[list[TextDelta]] = [[] for _ in range(texts.count)]
    async for delta in texts.deltas():
        pieces[delta.index].append(delta)
    has_logprobs = texts.completion.sampling.logprobs is not None
    choices: list[Any] = [
        {
            "index": index,
            "message": _message(role, deltas),
            "logprobs": _logprobs(served, [delta.token for delta in deltas if delta.token]) if has_logprobs else None,
            "finish_reason": deltas[-1].finish_reason,
        }
        for index, deltas in enumerate(pieces)
    ]
    prompt = _prompt_logprobs(served, texts, 0)
    return {**head, "object": "chat.completion", "choices": choices, "usage": texts.usage, "prompt_logprobs": prompt}  # type: ignore[typeddict-item]


def _prompt_logprobs(served: ServedModel, texts: CompletionStream, index: int) -> PromptLogprobs | None:
    """Return the log-probabilities of the prompt, if they are asked for, once an answer has begun."""
    likeliest = texts.completion.scores
    return None if likeliest is None else prompt_logprobs(served, texts.prompt_scores[index], likeliest)


def _message(role: str, deltas: list[TextDelta]) -> AssistantMessage:
    text, calls = "".join(delta.text for delta in deltas), [call for delta in deltas for call in delta.calls]
    message: AssistantMessage = {"role": role, "content": text, "refusal": None}
    if thought := "".join(delta.thought for delta in deltas):
        message["reasoning_content"] = thought
    if calls:
        message |= {"content": text or None, "tool_calls": [_call(call) for call in calls]}
    return message


def _call(call: CalledFunction) -> ToolCall:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def _chunks(
    served: ServedModel, texts: CompletionStream, role: str, head: dict[str, Any], includes_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    usage = {"usage": None} if includes_usage else {}
    has_logprobs = texts.completion.sampling.logprobs is not None

    def chunk(index: int, delta: ChatDelta, logprobs: ChatLogprobs | None, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**head, "object": "chat.completion.chunk", "choices": [choice], **usage}

    for index in range(texts.count):
        yield chunk(index, {"role": role, "content": ""}, None, None)
    called, has_prompt = [0] * texts.count, False
    async for index, text, token, finish_reason, thought, calls in texts.deltas():
        if not has_prompt and (prompt := _prompt_logprobs(served, texts, index)):
            yield chunk(index, {}, None, None) | {"prompt_logprobs": prompt}
        has_prompt = True
        logprobs = _logprobs(served, [token]) if has_logprobs and token else None
        if thought:
            yield chunk(index, {"reasoning_content": thought}, None, None)
        if text or logprobs:
            yield chunk(index, {"content": text}, logprobs, None)
        for call in calls:
            yield chunk(index, {"tool_calls": [{"index": called[index], **_call(call)}]}, None, None)
            called[index] += 1
        if finish_reason:
            yield chunk(index, {}, None, finish_reason)
    if includes_usage:
        yield {**head, "object": "chat.completion.chunk", "choices": [], "usage": texts.usage}


def _logprobs(served: ServedModel, tokens: list[Token]) -> ChatLogprobs:
    def likely(id: int, logprob: float) -> LikelyToken:
        content = served.token_bytes(id)
        return {"token": content.decode(errors="replace"), "bytes": list(content), "logprob": logprob}

    content: list[ChatToken] = [
        {**likely(token.id, token.logprob or 0.0), "top_logprobs": [likely(*each) for each in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}
