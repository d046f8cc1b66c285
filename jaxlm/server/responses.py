"""/v1/responses, without memory: an answer to a conversation that is sent whole each time."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal, NotRequired

from anyio import to_thread
from pydantic import Field
from typing_extensions import TypedDict

from jaxlm.server.answers.answer_formats import grammar_of_answer, prompt_end
from jaxlm.server.events import Streamed
from jaxlm.server.formats import TextFormat
from jaxlm.server.messages import MessageBody, Role, TextPart, encoded, template_of
from jaxlm.server.refusals import Refusal, refusing
from jaxlm.server.request_body import RequestBody
from jaxlm.server.schema import Salt, SamplingBody, Seed, in_words, neutral
from jaxlm.server.served import Caller, ServedModel
from jaxlm.server.texts import AnswerOptions, CompletionRequest, CompletionStream

_NO_MEMORY = "nothing is stored; send the whole conversation"
_NO_TOOLS = "tools are those of /v1/chat/completions alone"


class ResponsePart(RequestBody):
    """A part of a message: text that is said to the model, or that it has said."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: neutral([], why="they are no part of what a template shows") = None
    logprobs: neutral([], why="they are no part of what a template shows") = None


class ResponseItem(RequestBody):
    """A message of a conversation."""

    type: Literal["message"] | None = None
    """There are no others than messages."""
    role: Role
    """Who says it, as in a message of a chat."""
    content: Annotated[
        str | list[ResponsePart],
        in_words('a text, or a list of parts such as {"type": "input_text", "text": "Hello"}'),
    ]
    """A text; parts are lines of one."""
    id: str | None = None
    """Of a message that was answered before; nothing depends on it."""
    status: str | None = None
    """Of such a message; nothing depends on it."""


class ReasoningOptions(RequestBody):
    """Options of what is thought before an answer."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """How much is thought, for a model whose chat template reads it."""
    summary: neutral("auto", why="what is thought is given whole") = None


class TextOptions(RequestBody):
    """Options of the text of an answer."""

    format: TextFormat | None = None
    """The form of the text: any, an object of JSON, or the values of a JSON schema."""
    verbosity: neutral("medium", why="the models here have no such dial") = None


class ResponsesBody(SamplingBody):
    """A request for an answer."""

    input: Annotated[str | list[ResponseItem], Field(union_mode="left_to_right")]
    """What the user says, or a whole conversation."""
    instructions: str | None = None
    """A system message before it."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most tokens of the answer; what the context leaves where it is not given."""
    seed: Seed | None = None
    """Of the random numbers."""
    cache_salt: Salt | None = None
    """Prefixes of prompts are found again under one salt alone; keys of the API are salts already."""
    text: TextOptions | None = None
    """Options of the text."""
    reasoning: ReasoningOptions | None = None
    """Options of reasoning."""
    previous_response_id: neutral(why=_NO_MEMORY) = None
    conversation: neutral(why=_NO_MEMORY) = None
    background: neutral(False, why=_NO_MEMORY) = None
    include: neutral([], why="an answer has its text alone") = None
    prompt: neutral(why="there are no prompts by reference") = None
    tools: neutral([], why=_NO_TOOLS) = None
    tool_choice: neutral("none", "auto", why=_NO_TOOLS) = None
    max_tool_calls: neutral(why=_NO_TOOLS) = None
    parallel_tool_calls: bool | None = None
    """Nothing depends on it without tools."""
    top_logprobs: neutral(0, why="an answer has its text alone") = None
    truncation: neutral("disabled", why="a conversation that does not fit is refused") = None
    service_tier: neutral("auto", "default", why="there is one tier") = None
    prompt_cache_key: str | None = None
    """A hint where prompts may be found again, of which nothing is needed here."""
    safety_identifier: str | None = None
    """A name for the caller's end user; nothing depends on it."""


class ResponseUsage(TypedDict):
    """Tokens that were read and drawn."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(TypedDict):
    """An answer, with what it was asked."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str
    tools: list[Any]
    top_p: float
    truncation: str
    usage: ResponseUsage | None


class ResponseEvent(TypedDict):
    """A part of an answer, or the whole of it at its beginning and end, by its `type`."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseAnswer]
    item_id: NotRequired[str]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item: NotRequired[dict[str, Any]]
    part: NotRequired[dict[str, Any]]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[Any]]


async def respond(served: ServedModel, caller: Caller, body: ResponsesBody) -> ResponseAnswer | Streamed:
    """Answer a request."""
    if body.stream_options is not None and body.stream_options.include_usage is not None:
        raise Refusal("the last event of a stream has its usage; leave include_usage out", param="stream_options")
    body.includes_usage  # noqa: B018  refuses options of a stream without one
    texts = await to_thread.run_sync(_texts, served, caller, body)
    answer = _Response(served, body, texts)
    if body.stream:
        await texts.begin()
        return Streamed(texts, answer.events())
    async with texts:
        async for _ in answer.events():
            pass
    return answer.whole()


def _texts(served: ServedModel, caller: Caller, body: ResponsesBody) -> CompletionStream:
    messages = [MessageBody(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        messages.append(MessageBody(role="user", content=body.input))
    else:
        messages += [MessageBody(role=item.role, content=_content(item)) for item in body.input]
    if not messages:
        raise Refusal("input is empty; say something", param="input")
    template = template_of(served, effort=body.reasoning and body.reasoning.effort)
    form, prompt = served.answer_format, encoded(template, messages)
    grammar = body.text and body.text.format and body.text.format.grammar
    if grammar is not None:
        with refusing("text.format", "text.format: "):
            grammar = grammar_of_answer(form, grammar, served.tokenizer, prompt)
    completion = CompletionRequest(
        [prompt],
        body.max_output_tokens,
        body.sampling(served.sampling, None),
        seed=body.seed,
        stop_token_ids=template.stop_token_ids,
        salt=body.cache_salt,
        is_answer=True,
        answer=form and AnswerOptions(form, prompt_end=prompt_end(served.tokenizer, prompt)),
        grammar=grammar,
        grammar_param="text.format",
    )
    return CompletionStream(served, caller, completion)


def _format(body: ResponsesBody) -> dict[str, Any]:
    """Return the form of the text as the answer repeats it."""
    given = body.text and body.text.format
    return given.model_dump(by_alias=True, exclude_none=True) if given else {"type": "text"}


def _content(item: ResponseItem) -> str | list[TextPart]:
    if isinstance(item.content, str):
        return item.content
    return [TextPart(type="text", text=part.text) for part in item.content]


class _Response:
    """An answer while it is drawn."""

    def __init__(self, served: ServedModel, body: ResponsesBody, texts: CompletionStream):
        self._body, self._texts = body, texts
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created, self._model = int(time.time()), served.name
        self._status, self._events = "in_progress", 0
        self._items: list[_Item] = []

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a stream, and gather the answer."""
        for name in ("created", "in_progress"):
            yield self._event(name, response=self.whole())
        finish_reason = None
        async for delta in self._texts.deltas():
            finish_reason = delta.finish_reason
            for kind, text in ((_Thought, delta.thought), (_Message, delta.text)):
                for event in self._said(kind, text):
                    yield event
        self._status = "incomplete" if finish_reason == "length" else "completed"
        for event in (*self._begun(_Message), *self._ended()):
            yield event
        yield self._event(self._status, response=self.whole())

    def _said(self, kind: "type[_Item]", text: str) -> Iterator[dict[str, Any]]:
        """Add text to the item of a kind, and yield the events of it."""
        if text:
            yield from self._begun(kind)
            self._items[-1].text += text
            more = {"logprobs": []} if kind is _Message else {}
            yield self._event(f"{kind.text_name}.delta", **self._place, delta=text, **more)

    def _begun(self, kind: "type[_Item]") -> Iterator[dict[str, Any]]:
        """Let the last item be of a kind, and yield the events of a new one."""
        if self._items and isinstance(self._items[-1], kind):
            return
        if self._items:
            yield from self._ended()
        item = kind()
        self._items.append(item)
        yield self._event("output_item.added", output_index=self._place["output_index"], item=item.shown(False))
        yield self._event("content_part.added", **self._place, part=item.part())

    def _ended(self) -> Iterator[dict[str, Any]]:
        """End the last item, and yield the events of its end."""
        item, more = self._items[-1], {"logprobs": []} if isinstance(self._items[-1], _Message) else {}
        item.status = "completed" if self._status == "in_progress" else self._status
        yield self._event(f"{item.text_name}.done", **self._place, text=item.text, **more)
        yield self._event("content_part.done", **self._place, part=item.part())
        yield self._event("output_item.done", output_index=self._place["output_index"], item=item.shown())

    @property
    def _place(self) -> dict[str, Any]:
        """The place of the last item."""
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1, "content_index": 0}

    def whole(self) -> ResponseAnswer:
        """Return the answer as far as it is there."""
        body, sampling, is_done = self._body, self._texts.completion.sampling, self._status != "in_progress"
        usage = self._texts.usage
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,  # type: ignore[typeddict-item]
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [item.shown() for item in self._items] if is_done else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": _format(body)},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {**usage["completion_tokens_details"]},
                "total_tokens": usage["total_tokens"],
            }
            if is_done
            else None,
        }

    def _event(self, name: str, **content: Any) -> dict[str, Any]:
        number, self._events = self._events, self._events + 1
        return {"type": f"response.{name}", "sequence_number": number, **content}


class _Item:
    """A part of an answer: its text, under a name of its own."""

    prefix = text_name = ""

    def __init__(self):
        self.id, self.text, self.status = f"{self.prefix}_{uuid.uuid4().hex}", "", "in_progress"

    def part(self) -> dict[str, Any]:
        """Return the text of the item as a part."""
        raise NotImplementedError

    def shown(self, with_part: bool = True) -> dict[str, Any]:
        """Return the item, with its text or as the item begins."""
        raise NotImplementedError


class _Message(_Item):
    """A message: text that is said."""

    prefix, text_name = "msg", "output_text"

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def shown(self, with_part: bool = True) -> dict[str, Any]:
        content = [self.part()] if with_part else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": self.status, "content": content}


class _Thought(_Item):
    """Text that is thought before a message."""

    prefix, text_name = "rs", "reasoning_text"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def shown(self, with_part: bool = True) -> dict[str, Any]:
        content = [self.part()] if with_part else []
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": content}
