"""/v1/completions: texts that go on."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, NotRequired

from anyio import to_thread
from pydantic import Field
from typing_extensions import TypedDict

from jaxlm.inference.generation import Token
from jaxlm.inference.requests import MAX_LOGPROBS
from jaxlm.server.events import Streamed
from jaxlm.server.prompt_scores import PromptLogprobs, prompt_logprobs
from jaxlm.server.refusals import Refusal
from jaxlm.server.schema import DrawingBody, drawing, in_words, neutral
from jaxlm.server.served import Caller, ServedModel
from jaxlm.server.text_offsets import TextOffsets
from jaxlm.server.texts import CompletionRequest, CompletionStream, TextDelta, Usage, truncated

_MAX_TOKENS = 16  # as OpenAI's API has it

TokenId = Annotated[int, Field(ge=0)]


class CompletionBody(DrawingBody):
    """A request for continuations of prompts."""

    prompt: Annotated[
        str | list[str] | list[TokenId] | list[list[TokenId]],
        in_words("a text, a list of texts, a list of token ids, or a list of lists of token ids"),
    ]
    """Texts, which begin as documents do, or token ids as they are."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """The most tokens to follow each prompt (16); 0 is for `echo` and `prompt_logprobs`."""
    echo: bool | None = None
    """Begin each text with its prompt; with `logprobs`, with the log-probabilities of its tokens too."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Give the log-probability of each token, and of so many likeliest ones beside it."""
    suffix: neutral("", why="the models here continue texts, and fill no gaps in them") = None
    best_of: neutral(1, why="all that is drawn is returned, `n` of each prompt") = None


class CompletionLogprobs(TypedDict):
    """For each token its text, its log-probability, the likeliest tokens in its place and itself, and where its text
    begins. The first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]  # in a stream with the first chunk of a choice alone


class CompletionAnswer(TypedDict):
    """Continuations: all of them, or, in a stream, what was drawn since the chunk before."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


async def complete(served: ServedModel, caller: Caller, body: CompletionBody) -> CompletionAnswer | Streamed:
    """Answer a request for continuations."""
    includes_usage = body.includes_usage
    texts, shown = await to_thread.run_sync(_texts, served, caller, body)
    answer = _Completion(served, body, texts, shown)
    if body.stream:
        await texts.begin()
        return Streamed(texts, answer.chunks(includes_usage))
    async with texts:
        return await answer.whole()


def _texts(served: ServedModel, caller: Caller, body: CompletionBody) -> tuple[CompletionStream, list[str]]:
    """Return what is asked for, and the prompts as texts for `echo`."""
    max_tokens = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if not max_tokens and not body.echo and body.prompt_logprobs is None:
        raise Refusal("max_tokens = 0 gives nothing; give 1 or more, or echo = true", param="max_tokens")
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    tokenizer = served.tokenizer
    whole = [tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    if not whole:
        raise Refusal("prompt = [] holds nothing to go on with; give a text", param="prompt")
    encoded = [
        truncated(served, ids, body.truncate_prompt_tokens, max_tokens, tokenizer.begin * isinstance(prompt, str))
        for prompt, ids in zip(prompts, whole, strict=True)
    ]
    echoed = []
    if body.echo:
        echoed = [
            prompt if isinstance(prompt, str) and len(ids) == len(before) else tokenizer.decode(ids)
            for prompt, before, ids in zip(prompts, whole, encoded, strict=True)
        ]
    sampling = body.sampling(served.sampling, body.logprobs)
    asked = [body.logprobs if body.echo else None, body.prompt_logprobs]
    scores = max((likeliest for likeliest in asked if likeliest is not None), default=None)
    options = drawing(body) | {"scores": scores, "grammar": body.grammar, "grammar_param": body.grammar_param}
    completion = CompletionRequest(encoded, max_tokens, sampling, **options)
    return CompletionStream(served, caller, completion), echoed


class _Completion:
    """The answer to a request, whole or in chunks."""

    def __init__(self, served: ServedModel, body: CompletionBody, texts: CompletionStream, shown: list[str]):
        self._served, self._texts, self._shown, self._likeliest = served, texts, shown, body.prompt_logprobs
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }
        self._logprobs = (
            None
            if body.logprobs is None
            else [_Logprobs(served, body.logprobs, self._prompt(index)) for index in range(texts.count)]
        )
        self._begun: set[int] = set()

    async def whole(self) -> CompletionAnswer:
        """Return all continuations."""
        choices = [self._choice(index, "", None) | {"prompt_logprobs": None} for index in range(self._texts.count)]
        pieces: list[list[str]] = [[] for _ in choices]
        async for delta in self._texts.deltas():
            if delta.index not in self._begun:
                choices[delta.index]["prompt_logprobs"] = self._prompt_logprobs(delta.index)
            pieces[delta.index].append(self._added(delta))
            choices[delta.index]["finish_reason"] = delta.finish_reason
        for index, choice in enumerate(choices):
            choice["text"] = "".join(pieces[index])
            choice["logprobs"] = self._logprobs and self._logprobs[index].taken()
        return {**self._head, "choices": choices, "usage": self._texts.usage}

    async def chunks(self, includes_usage: bool) -> AsyncIterator[CompletionAnswer]:
        """Yield what is drawn, chunk by chunk."""
        usage = {"usage": None} if includes_usage else {}
        async for delta in self._texts.deltas():
            prompt = None if delta.index in self._begun else self._prompt_logprobs(delta.index)
            text = self._added(delta)
            if text or delta.finish_reason or self._logprobs or prompt:
                logprobs = self._logprobs and self._logprobs[delta.index].taken()
                choice = self._choice(delta.index, text, delta.finish_reason, logprobs)
                choice |= {"prompt_logprobs": prompt} if prompt else {}
                yield {**self._head, "choices": [choice], **usage}
        if includes_usage:
            yield {**self._head, "choices": [], "usage": self._texts.usage}

    def _added(self, delta: TextDelta) -> str:
        """Return the text of a delta, with its prompt before the first, and note its log-probabilities."""
        index, text = delta.index, delta.text
        logprobs = self._logprobs and self._logprobs[index]
        if index not in self._begun:
            self._begun.add(index)
            if self._shown:
                text = self._echoed(index) + text
                if logprobs:
                    logprobs.echo(self._echoed(index), self._texts.prompt_scores[index])
        if logprobs and delta.token:
            logprobs.add(delta.token)
        return text

    def _prompt(self, index: int) -> Sequence[int]:
        return self._texts.completion.prompts[index // self._texts.completion.n]

    def _echoed(self, index: int) -> str:
        return self._shown[index // self._texts.completion.n]

    def _prompt_logprobs(self, index: int) -> PromptLogprobs | None:
        if self._likeliest is None:
            return None
        return prompt_logprobs(self._served, self._texts.prompt_scores[index], self._likeliest)

    def _choice(
        self, index: int, text: str, finish_reason: Any, logprobs: CompletionLogprobs | None = None
    ) -> CompletionChoice:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class _Logprobs:
    """The log-probabilities of one continuation, but for the ones that were taken before."""

    def __init__(self, served: ServedModel, top: int, prompt: Sequence[int]):
        self._served, self._top, self._prompt = served, top, prompt
        self._offsets = TextOffsets(served.tokenizer, served.token_bytes, prompt)
        self._tokens: list[tuple[Token, int]] = []

    def echo(self, shown: str, scores: Sequence[Token]) -> None:
        """Add the tokens of the prompt, which the text begins with as it is shown."""
        tokens = [Token(self._prompt[0]), *scores]
        self._tokens += zip(tokens, self._offsets.echo(shown), strict=True)

    def add(self, token: Token) -> None:
        """Add a token."""
        self._tokens.append((token, self._offsets.add(token.id)))

    def taken(self) -> CompletionLogprobs:
        """Return the log-probabilities of the tokens since the last call of this method."""
        taken, self._tokens = self._tokens, []
        return {
            "tokens": [self._name(token.id) for token, _ in taken],
            "token_logprobs": [token.logprob for token, _ in taken],
            "top_logprobs": [self._likeliest(token) for token, _ in taken],
            "text_offset": [offset for _, offset in taken],
        }

    def _likeliest(self, token: Token) -> dict[str, float] | None:
        """Return the likeliest tokens, and the token itself; of several with one name the likeliest."""
        if token.logprob is None:
            return None
        logprobs: dict[str, float] = {}
        for id, logprob in (*token.top[: self._top], (token.id, token.logprob)):
            logprobs.setdefault(self._name(id), logprob)
        return logprobs

    def _name(self, id: int) -> str:
        """Return a token as text; a part of a character as OpenAI's API spells it."""
        content = self._served.token_bytes(id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
