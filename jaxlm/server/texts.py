"""The continuations that one request asks for, as text, while the engine draws them."""

import hashlib
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from typing_extensions import TypedDict

from jaxlm.inference.continuation import ContinuationText
from jaxlm.inference.engine import Event
from jaxlm.inference.generation import Token
from jaxlm.inference.grammar import Grammar, GrammarError
from jaxlm.inference.requests import Request, Sampling, check_biases, check_prompts, check_stop_tokens
from jaxlm.inference.service import EventStream
from jaxlm.inference.stop_strings import stops_that_are_tokens
from jaxlm.server.answers.answer_formats import AnswerFormat
from jaxlm.server.answers.call_syntax import Schemas
from jaxlm.server.answers.calls import CalledFunction
from jaxlm.server.answers.text import AnswerText
from jaxlm.server.prompt_scores import PromptScores
from jaxlm.server.refusals import Refusal, refusing
from jaxlm.server.served import Caller, ServedModel


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    """Tokens that were read and drawn; each prompt counts once, whatever `n`, and an id that ends a text not at all."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class AnswerOptions(NamedTuple):
    """The form in which the model writes answers, and what they may hold.

    Attributes:
      schemas: of the functions that may be called.
      parallel: whether one answer may have several calls.
      prompt_end: the end of the conversation as it is shown, with control tokens.
      begun: what the answer begins with, as the end of the prompt.
      continued: the beginning of the answer, which was given, and is no part of what is answered.
    """

    form: AnswerFormat
    schemas: Schemas = MappingProxyType({})
    parallel: bool = True
    prompt_end: str = ""
    begun: str = ""
    continued: str = ""


@dataclass(frozen=True)
class CompletionRequest:
    """Prompts to continue, and how.

    Attributes:
      max_tokens: the most tokens to follow each prompt; None is what the context leaves, and 0 draws none.
      n: continuations of each prompt.
      seed: of the random numbers of each prompt; None draws a seed for each prompt.
      stop, stop_token_ids, ignores_stop_tokens, min_tokens, includes_stop: as `Request` has them.
      priority: smaller is sooner.
      salt: divides what is found in the cache beside the caller's.
      is_answer: whether a continuation is a text of its own, which does not continue the prompt's last word.
      answer: the form of an answer; None for text alone.
      scores: of so many likeliest tokens in the place of each token of a prompt the log-probabilities are asked for,
        beside that of the token; None: not even that.
      ranks: the ranks of the prompts' tokens are asked for too.
      grammar: of the continuations.
      grammar_param: the parameter that gave it.
    """

    prompts: Sequence[Sequence[int]]
    max_tokens: int | None
    sampling: Sampling
    n: int = 1
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Collection[int] = ()
    ignores_stop_tokens: bool = False
    min_tokens: int = 0
    includes_stop: bool = False
    priority: int = 0
    salt: str | None = None
    is_answer: bool = False
    answer: AnswerOptions | None = None
    scores: int | None = None
    ranks: bool = False
    grammar: Grammar | None = None
    grammar_param: str = ""


class TextDelta(NamedTuple):
    """The text that a token adds to the continuation of an index, and why the continuation ended. `token` is None where
    a stop token, which is not shown, ended it; `text` may be empty while it is held back. `thought`: the text that the
    token adds to what is thought. `calls`: calls of functions, each whole."""

    index: int
    text: str
    token: Token | None
    finish_reason: str | None
    thought: str = ""
    calls: tuple[CalledFunction, ...] = ()


class CompletionStream:
    """The continuations of a request: `n` of its first prompt, then of the next. A context, which submits the
    continuations, and cancels at its end those that have not ended.

    A stream may be made in any thread. Raises Refusal for a request that cannot be served.

    Attributes:
      prompt_scores: for each index, the prompt's tokens after the first with their log-probabilities, as draws have
        them, once the first delta of the index is there; empty unless scores are asked for.
    """

    def __init__(self, served: ServedModel, caller: Caller, completion: CompletionRequest):
        self.served, self.completion = served, completion
        engine, count = served.service.engine, len(completion.prompts) * completion.n
        if count > engine.settings.max_queued:
            raise Refusal(f"{count} texts are more than the queue takes, {engine.settings.max_queued}; ask for fewer")
        stops = {*completion.stop_token_ids, *stops_that_are_tokens(completion.stop, served.tokenizer.controls)}
        with refusing("logit_bias"):
            check_biases(engine.model, completion.sampling)
        with refusing("stop_token_ids"):
            check_stop_tokens(engine.model, completion.stop_token_ids)
        limits = [
            served.room(len(prompt)) if completion.max_tokens is None else completion.max_tokens
            for prompt in completion.prompts
        ]
        for place, prompt in enumerate(completion.prompts):
            where = "" if len(completion.prompts) == 1 else f"prompt {place}: "
            _check(served, prompt, limits[place], where)
            if completion.min_tokens > limits[place]:
                raise Refusal(
                    f"{where}min_tokens = {completion.min_tokens} exceeds the {limits[place]} tokens that may follow",
                    param="min_tokens",
                )
        scores_from = None if completion.scores is None else 0
        self._requests = [
            Request(
                prompt,
                max(limit, 1),
                completion.sampling,
                completion.stop,
                sample,
                stops,
                completion.ignores_stop_tokens,
                completion.min_tokens,
                completion.includes_stop,
                completion.is_answer,
                scores_from=scores_from,
                ranks=completion.ranks or (completion.scores or 0) > 1,
                grammar=completion.grammar if completion.max_tokens != 0 else None,
                adapter=served.adapter,
            )
            for prompt, limit in zip(completion.prompts, limits, strict=True)
            for sample in range(completion.n)
        ]
        self._seeds = [
            seed
            for seed in [
                secrets.randbits(63) if completion.seed is None else completion.seed for _ in completion.prompts
            ]
            for _ in range(completion.n)
        ]
        self._salt = caller.salt
        if completion.salt is not None:
            self._salt = hashlib.sha256(b"key" + caller.salt + b"salt" + completion.salt.encode()).digest()
        self._texts = [_text_of(served, request, completion) for request in self._requests]
        self._called: set[int] = set()
        scored = self._requests if completion.scores is not None else []
        self._scored = [PromptScores(request.prompt) for request in scored]
        self.prompt_scores: list[list[Token]] = [[] for _ in self._requests]
        self._prompt_tokens = sum(map(len, completion.prompts))
        self._cached_tokens = self._completion_tokens = self._reasoning_tokens = 0
        self._stream: EventStream | None = None

    async def begin(self) -> None:
        """Compile the grammar, and submit all requests. Raises as `ServedModel.compiled` and `EngineService.stream`
        do."""
        compiled = None
        if (grammar := self.completion.grammar) is not None:
            compiled = await self.served.compiled(grammar, self.completion.grammar_param)
        self._stream = self.served.service.stream(
            self._requests, seeds=self._seeds, priority=self.completion.priority, salt=self._salt, compiled=compiled
        )

    async def __aenter__(self) -> "CompletionStream":
        if self._stream is None:
            await self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what has not ended."""
        if self._stream is not None:
            self._stream.close()

    @property
    def count(self) -> int:
        """The number of continuations."""
        return len(self._texts)

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
        }

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """Yield what is drawn, until all continuations have ended. Raises Refusal where one fails."""
        assert self._stream is not None
        begun = set()
        async for index, event in self._stream:
            if isinstance(event.error, GrammarError):
                raise Refusal(str(event.error), code="grammar_failed")
            if event.end == "error":
                raise Refusal(f"the model failed: {event.error}", 500, code="generation_failed")
            if event.scores is not None:
                self._scored[index].add(event.scores)
                continue
            if index not in begun:
                begun.add(index)
                self._begin(index, event)
            yield self._delta(index, event)

    def _begin(self, index: int, event: Event) -> None:
        if index % self.completion.n == 0:
            self._cached_tokens += event.cached
        if self._scored:
            self.prompt_scores[index] = self._scored[index].tokens(self.completion.scores or 0)

    def _delta(self, index: int, event: Event) -> TextDelta:
        if self.completion.max_tokens == 0:
            return TextDelta(index, "", None, "length")
        text, end, piece, token = self._texts[index], event.end, "", None
        if event.token is not None:
            self._completion_tokens += 1
            token = event.token
            piece = text.add(token.id)
        if end and not text.stopped:
            piece += text.rest(event.ended_by)
        thought, calls = text.taken() if isinstance(text, AnswerText) else ("", ())
        if isinstance(text, AnswerText) and token is not None:
            self._reasoning_tokens += text.is_inside
        if calls:
            self._called.add(index)
        is_single = self.completion.answer is not None and not self.completion.answer.parallel
        if self._stream and (text.stopped or (calls and is_single)):
            self._stream.finish(index)
            end, calls = "stop", calls[:1] if is_single else calls
        finish_reason = "tool_calls" if end == "stop" and index in self._called else end
        return TextDelta(index, piece, token, finish_reason, thought, calls)


def _text_of(served: ServedModel, request: Request, completion: CompletionRequest) -> ContinuationText | AnswerText:
    if completion.answer:
        form, schemas, _, prompt_end, begun, continued = completion.answer
        return AnswerText(served.tokenizer, request, form, schemas, prompt_end, begun, continued)
    return ContinuationText(served.tokenizer, request)


def truncated(
    served: ServedModel, prompt: list[int], most: int | None, max_tokens: int | None, begin: Sequence[int] = ()
) -> list[int]:
    """Return the last `most` tokens of a prompt: -1 is as many as leave room for `max_tokens`, or for one where that is
    None; with None the prompt stays whole.

    `begin`: ids at the beginning of the prompt that stay there. Raises Refusal for more tokens than there is room for.
    """
    if most is None:
        return prompt
    room = served.longest - max(max_tokens or 1, 1) + 1
    if most == 0 or most > room:
        raise Refusal(
            f"truncate_prompt_tokens = {most} must be from 1 to {room}, the tokens that leave room for an answer, or "
            "-1 for as many as do",
            param="truncate_prompt_tokens",
        )
    most = room if most < 0 else most
    if len(prompt) <= most or room < 1:  # without any room it is refused as it is
        return prompt
    kept = list(begin) if len(begin) < most and prompt[: len(begin)] == list(begin) else []
    return [*kept, *prompt[len(prompt) - most + len(kept) :]]


def _check(served: ServedModel, prompt: Sequence[int], max_tokens: int, where: str) -> None:
    model = served.service.engine.model
    if len(prompt) <= model.context_length:  # a longer one is refused below
        with refusing("prompt", where):
            check_prompts(model, [prompt], 1)
    needs = len(prompt) + max(max_tokens, 1) - 1
    if needs > served.longest:
        raise Refusal(
            f"{where}a prompt of {len(prompt)} tokens and max_tokens = {max_tokens} exceed the {served.longest} tokens "
            f"that a text may have here; shorten the prompt, or ask for at most {served.longest - len(prompt) + 1}"
            if len(prompt) <= served.longest
            else f"{where}a prompt of {len(prompt)} tokens exceeds the {served.longest} that a text may have here; "
            "shorten it",
            param="max_tokens" if len(prompt) <= served.longest else "prompt",
            code="context_length_exceeded",
        )
