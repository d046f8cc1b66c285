"""Logits that an engine's programs give for tokens that are written for it, without drawing any."""

from collections.abc import Sequence

import jax.numpy as jnp
import meshes
import numpy as np

from jaxlm.inference.cache_memory import CacheSize
from jaxlm.inference.programs import EnginePrograms, compiled_step, empty_pages
from jaxlm.inference.ragged_step import NextTokens
from jaxlm.inference.settings import EngineSettings
from jaxlm.inference.step_shapes import TILE, StepShape, fitting
from jaxlm.parallel.rules import ENGINE

SETTINGS = EngineSettings(slots=4, page=32, chunk_tokens=4 * TILE)


class ForcedSteps:
    """The programs of an engine on one device, with a cache of so many pages for each of a few sequences.

    `read(chunks)` reads tokens of some sequences, each chunk as part of a prompt or, of one token, as one that decodes,
    and returns the logits [chunks, V] after the last token of each.
    """

    def __init__(self, model, parameters, pages: int = 2, settings: EngineSettings = SETTINGS):
        mesh = meshes.make()
        self.programs = EnginePrograms.of(model, mesh, jnp.dtype("float32"), settings)
        groups, sequences = self.programs.layout.groups, settings.slots
        self.cache = CacheSize(pages * settings.page, tuple(1 + pages * sequences for _ in groups))
        self._parameters = self.programs.weights.stored(parameters, mesh, ENGINE)
        self._pages = empty_pages(self.programs, self.cache)
        self._table = 1 + np.arange(pages * sequences).reshape(sequences, pages)
        self.lengths = np.zeros(sequences, int)
        self._valid = np.ones(model.vocab_size, bool)

    def read(self, chunks: dict[int, Sequence[int]], decodes: bool = False) -> np.ndarray:
        """Read the next tokens of sequences, by their numbers."""
        rows = 0 if decodes else sum(-(-len(tokens) // TILE) * TILE for tokens in chunks.values())
        shape = fitting(self.programs.shapes.all(), len(chunks), rows)
        batch, run = self.programs.empty_batch(shape, self.cache), 0
        for draw, (sequence, tokens) in enumerate(chunks.items()):
            first = draw if decodes else shape.decode + run * TILE
            part = slice(first, first + len(tokens))
            batch.token_R[part] = tokens
            batch.position_R[part] = self.lengths[sequence] + np.arange(len(tokens))
            batch.length_R[part] = self.cache.context
            batch.row_Q[draw] = part.stop - 1
            for table in batch.tables:
                for tile in [draw] if decodes else range(run, run - -len(tokens) // TILE):
                    table[0 if decodes else 1][tile] = self._table[sequence]
            run += -(-len(tokens) // TILE)
            self.lengths[sequence] += len(tokens)
        return self._run(shape, batch)[: len(chunks)]

    def _run(self, shape: StepShape, batch) -> np.ndarray:
        upcoming = NextTokens.empty(self.programs.slots + 1)
        step = compiled_step(self.programs, self.cache, shape)
        self._pages, results = step(self._parameters, self._pages, upcoming, batch, self._valid)
        return np.asarray(results.logits_QV)


def assert_reads_as_the_full_pass(model, parameters, tokens, prompts, expected, same) -> None:
    """Check the logits of an engine that reads prompts of these lengths together, then token by token.

    Args:
      tokens: of each sequence.
      expected: logits after each token, of one forward pass.
      same: compares two arrays.
    """
    steps = ForcedSteps(model, parameters)
    sequences = range(len(prompts))
    logits = steps.read({i: tokens[i][: prompts[i]] for i in sequences})
    for at in range(min(len(row) - n for row, n in zip(tokens, prompts, strict=True))):
        for i in sequences:
            same(logits[i], expected[i][prompts[i] + at - 1])
        logits = steps.read({i: tokens[i][prompts[i] + at : prompts[i] + at + 1] for i in sequences}, decodes=True)
