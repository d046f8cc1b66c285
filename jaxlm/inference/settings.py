"""The sizes of an engine. Imports no JAX."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

CacheDtype = Literal["int8", "fp8"]  # of keys and values that are rounded

LOOK_UP = "ngram"  # the source of drafts that is no model
_DRAFTS, _MOST = 4, 16
_STATE_INTERVAL = 512  # tokens


class Speculation(NamedTuple):
    """Drafts of the next tokens, which a step reads before they are drawn. `source`: `LOOK_UP` in the sequence itself,
    or the model that draws them. `drafts`: the most of a sequence in a step."""

    source: str
    drafts: int

    @classmethod
    def parse(cls, text: str) -> "Speculation":
        """Return the value of "SOURCE:N" or "SOURCE". Raises ValueError for another text."""
        source, colon, number = text.rpartition(":")
        if source != LOOK_UP and not (colon and number.isdecimal()):
            source, number = text, str(_DRAFTS)
        if not source or not number.isdecimal() or not 1 <= int(number) <= _MOST:
            raise ValueError(f"{text!r} must be {LOOK_UP} or a model, with :N for at most N drafts, from 1 to {_MOST}")
        return cls(source, int(number))


@dataclass(frozen=True)
class EngineSettings:
    """The sizes of an engine.

    Attributes:
      context: the most tokens of a sequence; None is the model's context length, or as many as the cache holds.
      slots: the most sequences that are under way, rounded up to equal numbers on each shard of the devices.
      cache_bytes: the most memory of keys and values on each device, where fewer than all slots could need make some
        wait; None is 1 GiB on a CPU, 80 % of what is free on other devices, and at least what one sequence of `context`
        needs.
      cache_dtype: of keys and values, where they are rounded to eight bits; None keeps them as they are computed.
      page: tokens of a page, a multiple of `step_shapes.TILE`.
      state_interval: the tokens between states of recurrent layers that stay for prefixes, a multiple of `page`; None
        is 512, or the next multiple.
      chunk_tokens: the most rows of prompts in a step on each device, rounded up to whole tiles.
      max_queued, max_queued_tokens: the most requests that wait, and the most of their tokens.
      exact: compute each row in one way on a CPU, whatever shares its step; if false, XLA may choose another way for
        each number of rows.
      speculation: the drafts of next tokens, which a step reads before they are drawn; None for none.
      steps_per_dispatch: the decoding steps of one program where no request waits; None is 1 until the engine is
        warmed, or with drafts, and then as many as take 20 ms (`step_shapes.steps_per_dispatch`).
    """

    context: int | None = None
    slots: int = 64
    cache_bytes: int | None = None
    cache_dtype: CacheDtype | None = None
    page: int = 128
    state_interval: int | None = None
    chunk_tokens: int = 512
    max_queued: int = 1 << 20
    max_queued_tokens: int = 1 << 40
    exact: bool = True
    speculation: Speculation | None = None
    steps_per_dispatch: int | None = None

    @property
    def states_every(self) -> int:
        """The tokens between states that stay for prefixes."""
        return self.state_interval or -(-_STATE_INTERVAL // self.page) * self.page

    @property
    def drafts(self) -> int:
        """The most drafts of a sequence in a step."""
        return self.speculation.drafts if self.speculation else 0

    @property
    def looks_up(self) -> bool:
        """Return whether drafts are looked up in the sequence."""
        return self.speculation is not None and self.speculation.source == LOOK_UP
