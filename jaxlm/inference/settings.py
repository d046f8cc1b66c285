"""The sizes of an engine. Imports no JAX."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    """The sizes of an engine.

    Attributes:
      context: the most tokens of a sequence; None is the model's context length, or as many as the cache holds.
      slots: the most sequences that are under way, rounded up to equal numbers on each shard of the devices.
      cache_bytes: the most memory of keys and values on each device, where fewer than all slots could need make some
        wait; None is 1 GiB on a CPU, 80 % of what is free on other devices, and at least what one sequence of `context`
        needs.
      page: tokens of a page, a multiple of `step_shapes.TILE`.
      chunk_tokens: the most rows of prompts in a step on each shard, rounded up to whole tiles.
      max_queued, max_queued_tokens: the most requests that wait, and the most of their tokens.
      exact: compute each row in one way on a CPU, whatever shares its step; if false, XLA may choose another way for
        each number of rows.
      drafts: the most next tokens of a sequence that a step reads before they are drawn (`speculation`); 0 for none.
    """

    context: int | None = None
    slots: int = 64
    cache_bytes: int | None = None
    page: int = 128
    chunk_tokens: int = 512
    max_queued: int = 1 << 20
    max_queued_tokens: int = 1 << 40
    exact: bool = True
    drafts: int = 0
