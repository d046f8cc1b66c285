"""An adapter of a model to EleutherAI's lm-evaluation-harness. Needs the extra `lm-eval`."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from math import inf
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from pydantic import TypeAdapter, ValidationError
from tqdm import tqdm

from jaxlm.core.errors import InputError
from jaxlm.core.explain import message_of
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.completion import Completer, TextChunk, completions
from jaxlm.inference.engine import Engine
from jaxlm.inference.requests import Request, Sampling
from jaxlm.inference.scoring import Scorer, encode_pair

Pair = tuple[list[int], list[int]]  # token ids of a context and of its continuation

_SECTION = "generation_kwargs"
_TYPES = {
    **dict.fromkeys(("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"), int),
    **{"do_sample": bool, "temperature": float, "top_k": int, "top_p": float, "min_p": float},
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), float),
    **{"logit_bias": dict[int, float], "until": str | list[str]},
}
# Values by which tasks switch an option off.
_OFF = {
    **{"top_k": (0, -1), "min_p": (0,), "typical_p": (1,), "num_beams": (1,)},
    **{"repetition_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,)},
}
_MAX_TOKENS = 256  # the harness's default, used unless the task gives a number or the context is too short


class HarnessModel(LM):
    """The three request types of `lm_eval`, answered by an engine.

    As in training, a text begins after the tokenizer's separator. A request that is too long for the context loses its
    beginning, as everywhere in the harness; `truncated` counts these requests by task. A request that the tokenizer
    cannot encode, or that has no token before what is asked for, scores −∞ or gives no text; `unanswered` counts these.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        super().__init__()
        self._context, self._tokens = engine.longest, tokenizer
        self.truncated: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        self._score, self._complete = Scorer(engine), Completer(engine, tokenizer)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (ln p(continuation | context), whether greedy decoding gives the continuation) for each request."""
        pairs = [self._pair(*request.args) for request in requests]
        for request, pair in zip(requests, pairs, strict=True):
            self.truncated[request.task_name] += sum(map(len, pair or ())) > self._context + 1
        return self._answers(requests, pairs)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return ln p of whole texts, each token after the context that the windows of the harness give it.

        Raises InputError for a tokenizer without separator.
        """
        if self._tokens.separator is None:
            raise InputError("the run's tokenizer has no separator, so that nothing stands before a text's first token")
        pairs = [self._pair("", request.args[0]) for request in requests]
        return [logprob for logprob, _ in self._answers(requests, pairs)]

    def _pair(self, context: Any, continuation: Any) -> Pair | None:
        """Return the token ids of a context and a continuation; None if they cannot be encoded, or if no token stands
        before the continuation."""
        try:
            ids, following = encode_pair(self._tokens, _text(context), _text(continuation))
        except InputError:
            return None
        return (ids, following) if ids or not following else None

    def _answers(self, requests: list[Instance], pairs: list[Pair | None]) -> list[tuple[float, bool]]:
        """Return (ln p, whether it is greedy): (0, True) of no tokens, (−∞, False) without a pair."""
        windows = [self._windows(*pair) if pair else [] for pair in pairs]
        scores: list[Any] = [None] * sum(map(len, windows))
        with tqdm(total=len(scores), desc="scoring", disable=None) as bar:
            for index, score in self._score([*chain.from_iterable(windows)]):
                scores[index] = score
                bar.update()
        answers, left = [], iter(scores)
        for request, pair, some in zip(requests, pairs, windows, strict=True):
            parts = [next(left) for _ in some]
            self.unanswered[request.task_name] += pair is None
            logprob = -inf if pair is None else sum(part.logprob for part in parts)
            answers.append((logprob, pair is not None and all(part.greedy for part in parts)))
        return answers

    def _windows(self, context: list[int], continuation: list[int]) -> list[Pair]:
        """Return the pairs to score: several for a continuation that is longer than the model's context."""
        longest = self._context
        if len(continuation) <= longest:
            return [(context, continuation)] if continuation else []
        return [*map(make_disjoint_window, get_rolling_token_windows(continuation, context[-1], longest, 1))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to a separator, a stop string or the maximum of tokens.

        Random draws depend on the place of a request among all requests, and not on batches.

        Raises InputError for generation options that jaxlm does not have.
        """
        numbered: dict[int, Request] = {}
        for index, request in enumerate(requests):
            context, options = request.args
            sampling, max_tokens, stops = generation_options(options, self._context)
            prompt = self._prompt(context)
            if not prompt:
                self.unanswered[request.task_name] += 1
                continue
            longest = self._context - max_tokens + 1
            self.truncated[request.task_name] += len(prompt) > longest
            numbered[index] = Request(prompt[-longest:], max_tokens, sampling, stops, stream=index)
        with tqdm(total=len(numbered), desc="generating", disable=None) as bar:
            drawn = completions(self._with_progress([*numbered.values()], bar), len(numbered))
        texts = [""] * len(requests)
        for index, completion in zip(numbered, drawn, strict=True):
            texts[index] = completion.text or ""
        return texts

    def _with_progress(self, requests: list[Request], bar: tqdm) -> Iterator[TextChunk]:
        for piece in self._complete(requests):
            bar.update(piece.finish_reason is not None)
            yield piece

    def _prompt(self, context: Any) -> list[int]:
        """Return the token ids of a context; no ids if the context cannot be encoded."""
        try:
            return self._tokens.encode_prompt(_text(context))
        except InputError:
            return []


def _text(value: Any) -> str:
    """Return a text of a request, where a task may give a number, or nothing."""
    return "" if value is None else str(value)


def generation_options(kwargs: dict, context: int) -> tuple[Sampling, int, tuple[str, ...]]:
    """Return the sampling, the maximum of tokens and the stop strings of a task's `generation_kwargs`.

    Raises InputError for options that jaxlm does not have, unless the task switches these options off.
    """
    kwargs = {key: _read(key, value) for key, value in kwargs.items() if value is not None}
    options = normalize_gen_kwargs(kwargs, min(_MAX_TOKENS, context // 2))
    options = {key: value for key, value in options.items() if value not in _OFF.get(key, ())}
    is_greedy = not options.pop("do_sample")
    drawn = Sampling(**{name: options.pop(name) for name in Sampling._fields if name in options and name != "logprobs"})
    max_tokens, stops = options.pop("max_gen_toks"), tuple(options.pop("until"))
    if options:
        raise InputError(f"{_SECTION}: {', '.join(options)} is nothing that jaxlm can generate with")
    if not 0 < max_tokens <= context:
        raise InputError(f"{_SECTION}.max_gen_toks = {max_tokens} must be 1 to model.context_length = {context}")
    if is_greedy:
        drawn = drawn._replace(temperature=0.0, top_k=None, top_p=None, min_p=None)
    return drawn.check((_SECTION + ".{} =").format), max_tokens, stops


def _read(key: str, value: Any) -> Any:
    """Return a value in the type of its key. Raises InputError if the value has another type."""
    try:
        return TypeAdapter(_TYPES.get(key, Any)).validate_python(value)
    except ValidationError as error:
        raise InputError(f"{_SECTION}.{key} = {value!r}: {message_of(error.errors()[0])}") from None
