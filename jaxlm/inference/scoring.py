"""Log-likelihoods of given continuations after their contexts."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.engine import Engine
from jaxlm.inference.requests import Request, Sampling

# Characters before a continuation that is encoded apart from its context, of which one does not merge with it.
_BEFORE_WORDS, _BEFORE_SIGNS = "xqzjkvXQZJ07", "|~#.;0x"


class Score(NamedTuple):
    """`logprob`: ln p(continuation | context). `greedy`: each token of the continuation is the likeliest after the
    tokens before it. `truncated`: the context lost its beginning."""

    logprob: float
    greedy: bool
    truncated: bool


class Scorer:
    """A scorer of continuations by an engine, which reads contexts that begin alike once, as far as its cache goes."""

    def __init__(self, engine: Engine):
        self._engine, self._longest = engine, engine.longest

    def __call__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[int, Score]]:
        """Yield the index and Score of each (context, continuation) of token ids, as the scores come.

        A pair of more tokens than the engine's context and one loses the beginning of its context. Raises InputError
        for a context or continuation without tokens, for a continuation longer than that context, and where logits are
        not finite.
        """
        for context, continuation in pairs:
            _check(context, continuation, self._longest)
        indices: dict[int, int] = {}
        try:
            for index, pair in enumerate(pairs):
                indices[self._engine.submit(self._request(*pair))] = index
            logprobs = {id: np.zeros(len(pairs[index][1])) for id, index in indices.items()}
            greedy = dict.fromkeys(indices, True)
            for event in self._engine.answers(indices):
                if event.error:
                    raise event.error
                context, continuation = pairs[indices[event.id]]
                if event.scores:
                    at = event.scores.first - min(len(context), self._longest + 1 - len(continuation)) + 1
                    rows = slice(at, at + len(event.scores.logprob))
                    logprobs[event.id][rows] = event.scores.logprob
                    greedy[event.id] &= event.scores.top[:, 0].tolist() == [*continuation[rows]]
                if event.end:
                    truncated = len(context) + len(continuation) > self._longest + 1
                    yield indices[event.id], Score(float(logprobs[event.id].sum()), greedy[event.id], truncated)
        finally:
            for id in indices:
                self._engine.cancel(id)

    def _request(self, context: Sequence[int], continuation: Sequence[int]) -> Request:
        *prompt, last = [*context, *continuation][-self._longest - 1 :]
        first = len(prompt) - len(continuation)  # the index of the token before the continuation
        return Request(prompt, 1, Sampling(temperature=0.0), scores_from=first, following=last)


def _check(context: Sequence[int], continuation: Sequence[int], longest: int) -> None:
    if not context or not continuation:
        empty = "continuation" if context else "context"
        raise InputError(f"a {empty} without tokens cannot be scored")
    if len(continuation) > longest:
        raise InputError(f"a continuation of {len(continuation)} tokens exceeds the context of {longest}")


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a context and of its continuation, whose log-likelihood is that of the text after it.

    Blanks at the end of the context go to the continuation, as in the lm-evaluation-harness. Where the tokens of the
    context begin those of the whole text, the continuation is the rest of these. Where tokens reach over the boundary,
    the continuation is encoded apart, so that all continuations of a context follow the same tokens: after "th", "e" is
    `e`, though "the" is one token. Raises InputError for text that cannot be encoded.
    """
    before = context.rstrip()
    after = context[len(before) :] + continuation
    ids, whole = tokenizer.encode_prompt(before), tokenizer.encode_prompt(before + after)
    if whole[: len(ids)] == ids and (len(whole) > len(ids) or not after):
        return ids, whole[len(ids) :]
    return ids, _encoded_apart(tokenizer, before, after)


def _encoded_apart(tokenizer: Tokenizer, before: str, after: str) -> list[int]:
    """Return the token ids of a text that does not begin one, without the blank that some tokenizers put first."""
    signs = _BEFORE_WORDS if before[-1:].isalnum() else _BEFORE_SIGNS
    for sign in (*(before[-size:] for size in (1, 2, 3) if size <= len(before)), *signs):
        try:
            ids, whole = tokenizer.encode(sign), tokenizer.encode(sign + after)
        except InputError:  # the tokenizer has no such sign
            continue
        if ids and whole[: len(ids)] == ids and len(whole) > len(ids):
            return whole[len(ids) :]
    return tokenizer.encode(after)
