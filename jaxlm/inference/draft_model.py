"""A smaller model that draws the drafts of another, over pages of its own that lie as the other's do."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.inference.cache_memory import CacheSize, shared_group
from jaxlm.inference.programs import EnginePrograms, compiled_proposal, compiled_step, empty_pages
from jaxlm.inference.ragged_step import Batch, NextTokens, SlotState
from jaxlm.inference.step_shapes import StepShape
from jaxlm.models.config import ModelConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.tree import Tree
from jaxlm.parallel.rules import ENGINE


class DraftModel(NamedTuple):
    """A model that draws drafts, of the same token ids. `parameters`, `quantized`: as the engine takes its own, on the
    engine's mesh and in its dtype."""

    model: ModelConfig
    parameters: Tree
    quantized: Quantization | None = None


def draft_programs(of: EnginePrograms, model: ModelConfig, quantized: Quantization | None) -> EnginePrograms:
    """Return the programs of a draft model: of the sizes of the engine's."""
    return replace(of, model=model, history=0, quantized=quantized, adapters=None)


def draft_cache(cache: CacheSize, programs: EnginePrograms, of: EnginePrograms) -> CacheSize:
    """Return the cache of a draft model's programs beside that of the engine's (`of`), with as many pages. Raises
    InputError for a cache of longer sequences than the draft model's, or of pages that the engine has freed."""
    if (longest := programs.model.context_length) < cache.context:
        raise InputError(
            f"the draft model has a context of {longest:,} tokens, and sequences have up to {cache.context:,}; "
            f"give inference.context={longest} (--max-context {longest})"
        )
    return CacheSize(cache.context, tuple(cache.counts[group] for group in _shared_groups(programs, of)))


def _shared_groups(programs: EnginePrograms, of: EnginePrograms) -> list[int]:
    """Return the engine's group of pages beside which each group of the draft model's lies."""
    return [shared_group(window, of.layout.groups) for window in programs.layout.groups]


class Drafter:
    """The draft model of an engine. It reads what the engine's model reads, over the same page tables.

    Args:
      of: the programs of the engine.
      valid_token_mask: bool [V], the ids that the engine draws.

    Raises InputError for a model with layers that read what the engine has freed, or a shorter context.
    """

    def __init__(self, of: EnginePrograms, draft: DraftModel, valid_token_mask: np.ndarray):
        self.programs = draft_programs(of, draft.model, draft.quantized)
        self._parameters = self.programs.weights.stored(draft.parameters, of.mesh, ENGINE)
        self._groups = _shared_groups(self.programs, of)
        self._of = of
        valid_V = np.zeros(draft.model.vocab_size, bool)
        valid_V[: len(valid_token_mask)] = valid_token_mask[: len(valid_V)]
        self._valid_V = valid_V

    def page_bytes(self) -> list[int]:
        """Return the bytes on each device that the draft model keeps for each page of the engine's groups."""
        beside = [0] * len(self._of.layout.groups)
        for group, size in zip(self._groups, self.programs.page_bytes, strict=True):
            beside[group] += size
        return beside

    def allocate(self, cache: CacheSize) -> None:
        """Make the pages, as many as the engine's cache has. Raises InputError for a cache of longer sequences than the
        model's."""
        self.cache = draft_cache(cache, self.programs, self._of)
        self._pages = empty_pages(self.programs, self.cache)

    def warm(self, shape: StepShape) -> None:
        """Compile the programs that follow a step of a shape."""
        compiled_step(self.programs, self.cache, shape._replace(scores=False))
        compiled_proposal(self.programs, self.cache, self._sequences(shape))

    def read(self, shape: StepShape, upcoming: NextTokens, batch: Batch) -> None:
        """Read the rows of the engine's step."""
        own = batch._replace(tables=tuple(batch.tables[group] for group in self._groups), adapter_R=None)
        step = compiled_step(self.programs, self.cache, shape._replace(scores=False))
        self._pages, _ = step(self._parameters, self._pages, upcoming, own, self._valid_V)

    def propose(self, shape: StepShape, state: SlotState, batch: Batch) -> SlotState:
        """Return the state after a step and its draw, with drafts after the last token of each sequence that drew."""
        sequences, shards = self._sequences(shape), self.programs.shards
        rows = self.programs.empty_draft_rows(sequences, self.cache)
        for index in range(shards):
            drawn, into = batch.shard(index, shards), rows.shard(index, shards)
            first = np.flatnonzero((drawn.draft_Q == 0) & (drawn.slot_Q < self.programs.slots))
            into.slot_N[: len(first)] = drawn.slot_Q[first]
            into.length_N[: len(first)] = drawn.length_R[first]
            for table, group in zip(into.tables, self._groups, strict=True):
                table[: len(first)] = drawn.tables[group][0][first]
        program = compiled_proposal(self.programs, self.cache, sequences)
        upcoming = state.upcoming
        self._pages, draft_SK = program(self._parameters, self._pages, upcoming, state.how, rows, self._valid_V)
        return state._replace(upcoming=upcoming._replace(draft_SK=draft_SK))

    def _sequences(self, shape: StepShape) -> int:
        """Return how many sequences may draw in a step."""
        return min(shape.decode, self.programs.slots)
