"""A request that is being answered: its tokens, and the parts of them that steps read. Imports no JAX."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxlm.inference.acceptance import Acceptance
from jaxlm.inference.grammar import Matcher
from jaxlm.inference.host_drafts import HostDrafts
from jaxlm.inference.pages import SequencePages
from jaxlm.inference.requests import BarredTokens, Request

# "stop": one of its `stop_token_ids`, or `finish`; "length": its `max_tokens`; "error": it cannot go on.
EndReason = Literal["stop", "length", "cancelled", "error"]


class Token(NamedTuple):
    """A token, and log-probabilities of the model as far as a request asks for them (`Sampling.logprobs`).

    Attributes:
      logprob: ln p of the token; None where it is not asked for.
      top: ids and ln p of the likeliest tokens in its place, the likeliest first.
      rank: one more than the number of likelier tokens; None where it is not asked for, as of tokens that are drawn.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(eq=False)
class Generation:
    """A request that is being answered.

    Attributes:
      tokens: the prompt and what has been drawn and read back, without an id among `stop_token_ids`.
      prompt: tokens of the prompt, the boundary for penalties and usage.
      stop_token_ids: the ids that end the generation.
      priority: smaller is sooner; then the smaller id.
      seed: of its random numbers.
      salt: prefixes are shared under one salt alone.
      matcher: of its grammar, behind its tokens; None without a grammar.
      shard: the index of the shard of devices that has its pages and its slot; -1 while it waits.
      holding: its pages; None while it waits.
      slot: the index of its state on the shard; -1 while it waits.
      computed: the fewest tokens whose keys may be dispatched: drafts that are dispatched may be refused.
      reach: the most.
      pending: what draws tokens, is dispatched and is not read back, in order.
      acceptance: of its drafts so far.
      drafts: with a grammar, the tokens that the host expects.
      scored: the prompt's tokens before this index are scored, as far as scores are asked for, in dispatched steps.
      cached: prompt tokens that were found when it first began.
      preemptions: times that its pages went to another, to be computed again.
      end: None while it lives.
    """

    id: int
    request: Request
    tokens: list[int]
    prompt: int
    stop_token_ids: frozenset[int]
    priority: int
    seed: int
    salt: bytes
    matcher: Matcher | None = None
    shard: int = -1
    holding: SequencePages | None = None
    slot: int = -1
    computed: int = 0
    reach: int = 0
    pending: "deque[Chunk | DecodeRun]" = field(default_factory=deque, repr=False)
    acceptance: Acceptance = field(default_factory=Acceptance, repr=False)
    drafts: HostDrafts = field(default_factory=HostDrafts, repr=False)
    scored: int = 0
    cached: int = 0
    preemptions: int = 0
    end: EndReason | None = None
    is_reading: bool = field(default=True, repr=False)  # has yet to draw since it was admitted

    @property
    def order(self) -> tuple[int, int]:
        """The place among all generations: a smaller one is served first."""
        return self.priority, self.id

    @property
    def barred(self) -> BarredTokens:
        """The tokens that it may not draw yet: the ids that end it, before `Request.min_tokens`."""
        if not self.request.min_tokens:
            return BarredTokens()
        return BarredTokens(self.stop_token_ids, self.prompt + self.request.min_tokens)

    @property
    def drawn(self) -> int:
        """The tokens drawn and read back, without a token that ended the generation."""
        return len(self.tokens) - self.prompt

    @property
    def is_drawn(self) -> bool:
        """True once the last token that it may draw is dispatched, however many drafts are refused."""
        return not self.is_reading and self.computed >= self.request.most_tokens

    @property
    def awaits_draw(self) -> bool:
        """True while its next draw must wait: which tokens its grammar allows depends on one that is not read back."""
        return self.matcher is not None and len(self.pending) > 1

    def take(self, token: int) -> EndReason | None:
        """Add a token that was read back, and return why the generation ends with it, if it does."""
        self.tokens.append(token)
        is_last = self.drawn == self.request.max_tokens
        if self.matcher is not None:
            self.matcher.accept(token)
            if self.matcher.has_ended:
                return "stop"
            if self.matcher.error and not is_last:
                return "error"
        return "length" if is_last else None

    @property
    def unscored(self) -> range:
        """The indices of the prompt's tokens after which log-probabilities are asked for that no dispatched step gives:
        each is given once, also where the generation is read again."""
        first, count = self.request.scores_from, self.prompt - (self.request.following is None)
        return range(0) if first is None else range(max(first, self.scored), count)

    @property
    def shareable(self) -> list[int]:
        """The tokens that need not be read if another generation has read them: up to the first one that is to be
        scored."""
        return self.tokens[: self.unscored.start + 1] if self.unscored else self.tokens

    def decode(self, run: "DecodeRun") -> None:
        """Count a run that is dispatched: it reads a token in each step at least, while these are below its limit."""
        self.computed += max(0, min(run.steps, run.limit - self.computed))
        self.reach = max(self.reach, min(self.reach + run.steps + run.drafts, run.limit))

    def settle(self) -> None:
        """Count anew what is dispatched of a generation with pages: all tokens that were read back but the last, and
        what pending runs read."""
        self.computed = self.reach = len(self.tokens) - 1
        for run in self.pending:
            assert isinstance(run, DecodeRun), "a chunk draws before any run"
            self.decode(run)
        # Pages of a window that no later token reads come back when the next token is planned.
        self.holding.tokens = max(self.holding.tokens, self.computed)


@dataclass(frozen=True)
class DecodeRun:
    """Rows of a step that read the last token of a generation, and up to `drafts` tokens that may follow it; or without
    drafts a row in each of several steps. Tokens at positions from `limit` on are not read. `tokens`: the drafts, where
    they come from the host."""

    generation: Generation
    drafts: int
    limit: int
    tokens: tuple[int, ...] = ()
    steps: int = 1


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a generation, to be read. `draws`: whether they are its last, so the next is drawn.
    `scored`: the indices of those after which the step gives log-probabilities."""

    generation: Generation
    start: int
    stop: int
    draws: bool
    scored: range
