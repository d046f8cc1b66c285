"""Drafts of a text that is held to a grammar, made on the host behind its last token. Imports no JAX."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxlm.inference.acceptance import Acceptance
from jaxlm.inference.grammar import Matcher
from jaxlm.inference.ngrams import NO_DRAFT, look_up

_FORCED = 0.9  # at first: a model may cut a text in another way than its tokenizer


@dataclass
class HostDrafts:
    """The tokens that are expected after those of a text: first those that the grammar leaves no choice about, then
    what followed the same end earlier in the text, as far as the grammar allows it.

    Attributes:
      tokens: that are expected, in order.
      forced: how many of them the grammar forces.
      after: the tokens of the text when they were expected; -1 before.
      acceptance: of the forced ones so far.
    """

    tokens: list[int] = field(default_factory=list)
    forced: int = 0
    after: int = -1
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(_FORCED))

    def expect(self, matcher: Matcher, text: Sequence[int], most: int) -> None:
        """Expect up to `most` tokens after a text that the matcher has read."""
        if self.after == len(text):
            return
        self.after, expected = len(text), matcher.forced(most)
        self.forced = len(expected)
        if left := most - len(expected):
            history_1L = np.array([[*text, *expected]], np.int32)
            found = look_up(history_1L, np.array([history_1L.shape[1]]), left)[0].tolist()
            expected += itertools.takewhile(NO_DRAFT.__ne__, found)
        self.tokens = matcher.possible(expected)

    def worth(self, looked_up: Acceptance, worth: float) -> list[int]:
        """Return the tokens that are accepted with a probability from `worth` on."""
        shares = [(self.acceptance if at < self.forced else looked_up).share for at in range(len(self.tokens))]
        probable = itertools.accumulate(shares, lambda all, one: all * one)
        return self.tokens[: sum(probability >= worth for probability in probable)]

    def compare(self, drawn: Sequence[int]) -> int:
        """Return how many tokens that were drawn after the text are those that were expected."""
        right = sum(itertools.takewhile(bool, map(int.__eq__, self.tokens, drawn)))
        forced = min(len(drawn), self.forced)
        self.acceptance.update(min(right, forced), wrong=right < forced)
        return right
