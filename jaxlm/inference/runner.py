"""The programs of the engine on its devices: compiled for few numbers of rows, one step ahead of what is read."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxlm.core.errors import InputError
from jaxlm.inference.paged_cache import PageLayout
from jaxlm.inference.pages import PageGroup
from jaxlm.inference.ragged_step import Batch, SlotState, StepResults, StepShape, ragged_step
from jaxlm.inference.requests import Sampling
from jaxlm.inference.sampling import NO_TOKEN, Drawn, RowSampling, row_sampling
from jaxlm.inference.scheduler import Generation, StepPlan
from jaxlm.inference.weights import WeightLayout
from jaxlm.models.config import Kernels, ModelConfig
from jaxlm.models.kernels import using_kernels
from jaxlm.models.positions import depends_on_length
from jaxlm.models.tree import Tree
from jaxlm.parallel.partition import replicated, using_rules
from jaxlm.parallel.rules import ENGINE

TILE = 32  # rows of a prompt that read their keys together
_FEW = 8  # sequences that decode in the smaller of two programs; with fewer rows products go to other kernels
# Products alone go to the library that computes a row in one way, whatever the number of rows: its sums along rows do
# not.
_EXACT_ON_CPU = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
_GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class PendingStep:
    """A step that was dispatched and not read."""

    plan: StepPlan
    shape: StepShape
    results: StepResults


class TokenDrawn(NamedTuple):
    """One token, its ln p, and ids and ln p of the likeliest ones, as far as they were asked for."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Reading(NamedTuple):
    """The results of a step on the host, by the id of the generation.

    `tokens`: drawn. `hidden`: float32 [D], the normalised stream that they were drawn from. `scores`: of the rows of a
    chunk, ln p of the token after each, float32, and whether it is the likeliest; where scores were asked for.
    """

    tokens: dict[int, TokenDrawn]
    hidden: dict[int, np.ndarray]
    scores: dict[int, tuple[np.ndarray, np.ndarray]]


class Runner:
    """A model's weights and pages on a mesh, and the programs that run steps over them.

    Args:
      parameters: on `mesh`, in the dtype to compute in.
      known: bool [V], whether an id has a token; None where all have.
      page: tokens of a page.
      context: the most tokens of a sequence.
      slots: the most generations that are under way; there are programs for 8 that decode, and for these.
      chunk_tokens: the most rows of prompts in a step; there are programs without any, with two tiles, and with these.
      cache_bytes: the most memory of pages, over all devices.
      kernels: `training.kernels`.
      exact: compute each row in one way on a CPU, whatever shares its step.

    Raises InputError for a model or a page that the engine cannot serve.
    """

    def __init__(
        self,
        model: ModelConfig,
        parameters: Tree,
        mesh: Mesh,
        *,
        known: np.ndarray | None,
        page: int,
        context: int,
        slots: int,
        chunk_tokens: int,
        cache_bytes: int,
        kernels: Kernels,
        exact: bool,
    ):
        if page < TILE or page % TILE:
            raise InputError(f"a page of {page} tokens must be a multiple of {TILE}, which prompts are read by")
        if depends_on_length(model):
            raise InputError(
                "rotary angles of this model depend on the length of the whole text (model.position.scaling), and the "
                "engine reads a text in parts; generate without it"
            )
        self._mesh, self._kernels, self._slots = mesh, kernels, slots
        most = max(-(-chunk_tokens // TILE), 1)
        self._tiles, self._decode = sorted({0, min(2, most), most}), sorted({_FEW, max(_FEW, slots)})
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self._options = _EXACT_ON_CPU if on_cpu and exact else None
        self._weights = WeightLayout(model, by_outputs=on_cpu)
        with jax.set_mesh(mesh), using_rules(ENGINE):  # shards of query heads say which key/value heads are copied
            self.layout = PageLayout.of(nnx.merge(self._weights.graph, self._weights.abstract).slots(), page)
        dtype = jax.tree.leaves(parameters)[0].dtype
        stored = jnp.dtype("float32") if on_cpu else dtype  # widened there in each step otherwise
        self._most_pages = -(-context // page)
        self.counts = page_counts(self.layout, self._most_pages, slots, cache_bytes, stored)
        self._shardings = self.layout.shardings(self.counts, mesh, ENGINE)
        with jax.set_mesh(mesh):
            allocate = jax.jit(partial(self.layout.allocate, self.counts, stored), out_shardings=self._shardings)
            self._pages = allocate()
        self._parameters = self._weights.stored(parameters, mesh, ENGINE)
        whole = replicated(mesh)
        counts = np.zeros((slots + 1, model.vocab_size), np.int32)
        self._state = jax.device_put(SlotState(np.zeros(slots + 1, np.int32), counts), whole)
        self._set_counts = jax.jit(
            lambda counts_SV, slot, counts_V: counts_SV.at[slot].set(counts_V), donate_argnums=0, out_shardings=whole
        )
        self._known = jax.device_put(np.ones(model.vocab_size, bool) if known is None else known, whole)
        self._compiled: dict[StepShape, Callable] = {}

    @property
    def chunk_tokens(self) -> int:
        """The most rows of prompts in a step."""
        return self._tiles[-1] * TILE

    @property
    def page_groups(self) -> list[PageGroup]:
        """The groups of pages that an allocator hands out."""
        return [PageGroup(count, window) for count, window in zip(self.counts, self.layout.groups, strict=True)]

    def shapes(self, scores: bool = False) -> list[StepShape]:
        """Return the shapes that there are programs for, without those of scores or with."""
        plain = [StepShape(decode, tiles, TILE) for decode in self._decode for tiles in self._tiles]
        return [*plain, *(shape._replace(scores=True) for shape in plain if scores and shape.tiles)]

    def warm(self, scores: bool = False) -> None:
        """Compile all programs, several at a time, so that no request waits for one."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._program, self.shapes(scores)))
        self._count([], 0, self._slots)

    def dispatch(self, plan: StepPlan, scores: bool = False) -> PendingStep:
        """Start a step and return at once. `scores`: of the rows of its chunks."""
        shape = self._shape(plan, scores)
        batch, draws = self._batch(plan, shape)
        how = row_sampling(*map(list, zip(*draws, strict=True)))
        for chunk, slot in zip(plan.chunks, plan.slots[len(plan.decode) :], strict=True):
            if chunk.draws and chunk.generation.request.sampling.counts_tokens:
                self._count(chunk.generation.tokens, chunk.generation.prompt, slot)
        return PendingStep(plan, shape, self._run(shape, batch, how))

    def _run(self, shape: StepShape, batch: Batch, how: RowSampling) -> StepResults:
        self._pages, self._state, results = self._program(shape)(
            self._parameters, self._pages, self._state, batch, how, self._known
        )
        return results

    def _count(self, tokens: Sequence[int], prompt: int, slot: int) -> None:
        """Set the counts of a slot to those of a prompt and what was drawn after it."""
        counts_V = np.zeros(self._state.counts_SV.shape[1], np.int32)
        np.add.at(counts_V, tokens[prompt:], 2)
        counts_V[tokens[:prompt]] |= 1
        counts_SV = self._set_counts(self._state.counts_SV, np.int32(slot), counts_V)
        self._state = self._state._replace(counts_SV=counts_SV)

    def read(self, step: PendingStep) -> Reading:
        """Wait for a step and return its results."""
        plan, shape = step.plan, step.shape
        results = jax.device_get(step.results)
        scores, runs = {}, {generation.id: run for run, generation in enumerate(plan.decode)}
        run = shape.decode
        for chunk in plan.chunks:
            rows = slice((run - shape.decode) * TILE, (run - shape.decode) * TILE + chunk.stop - chunk.start)
            run += -(-(chunk.stop - chunk.start) // TILE)
            if shape.scores:
                scores[chunk.generation.id] = results.logprob_R[rows], results.greedy_R[rows]
            if chunk.draws:
                runs[chunk.generation.id] = run - 1
        tokens = {id: _token_drawn(results.drawn, run) for id, run in runs.items()}
        return Reading(tokens, {id: results.hidden_QD[run] for id, run in runs.items()}, scores)

    def _shape(self, plan: StepPlan, scores: bool) -> StepShape:
        """Return the smallest shape that a plan fits into."""
        tiles = sum(-(-(chunk.stop - chunk.start) // TILE) for chunk in plan.chunks)
        decode = next(n for n in self._decode if n >= len(plan.decode))
        return StepShape(decode, next(n for n in self._tiles if n >= tiles), TILE, scores and tiles > 0)

    def _batch(self, plan: StepPlan, shape: StepShape) -> tuple[Batch, list[tuple[Sampling, int, int]]]:
        """Return the arrays of a step, and how each of its runs draws: options, seed and stream."""
        batch = self._empty(shape)
        draws: list[tuple[Sampling, int, int]] = [(_GREEDY, 0, 0)] * shape.runs

        def draw(run: int, i: int, generation: Generation) -> None:
            batch.slot_Q[run] = plan.slots[i]
            draws[run] = generation.request.sampling, generation.seed, generation.request.stream

        for run, (generation, position) in enumerate(zip(plan.decode, plan.positions, strict=True)):
            _write_run(batch, shape, run, [-1], position, plan.tables[run])
            draw(run, run, generation)
        run = shape.decode
        for i, chunk in enumerate(plan.chunks, len(plan.decode)):
            tokens = chunk.generation.tokens
            for start in range(chunk.start, chunk.stop, TILE):
                stop = min(start + TILE, chunk.stop)
                _write_run(batch, shape, run, tokens[start:stop], start, plan.tables[i])
                after = tokens[start + 1 : stop + 1]
                batch.target_R[(run - shape.decode) * TILE :][: len(after)] = after
                run += 1
            if chunk.draws:
                draw(run - 1, i, chunk.generation)
        return batch, draws

    def _empty(self, shape: StepShape) -> Batch:
        """Return the arrays of a step whose rows are all padding."""
        last_Q = np.arange(shape.runs, dtype=np.int32)
        last_Q[shape.decode :] = shape.decode + np.arange(shape.tiles) * TILE
        sections = (shape.decode, shape.tiles) if shape.tiles else (shape.decode,)
        return Batch(
            token_R=np.zeros(shape.rows, np.int32),
            position_R=np.full(shape.rows, -1, np.int32),
            slot_Q=np.full(shape.runs, self._slots, np.int32),
            last_Q=last_Q,
            tables=tuple(
                tuple(np.zeros((Q, self._most_pages), np.int32) for Q in sections) for _ in self.layout.groups
            ),
            target_R=np.zeros(shape.tiles * TILE, np.int32),
        )

    def check(self) -> bool:
        """Return whether a token's results are the same to the bit in every program, at another row each time, read as
        part of a prompt or by itself. Pages of a runner that is idle are overwritten."""
        tokens = np.random.default_rng(0).integers(0, len(self._known), TILE + 3)
        table = range(1, -(-len(tokens) // self.layout.size) + 1)

        def read(shape: StepShape, first: int, run: int) -> bytes:
            """Read the tokens from this one on, in runs from this one on; return the last hidden state."""
            batch = self._empty(shape)
            for start in range(first, len(tokens), TILE):
                _write_run(batch, shape, run, tokens[start : start + TILE], start, [table] * len(self.layout.groups))
                run += 1
            results = self._run(shape, batch, row_sampling([_GREEDY] * shape.runs, 0))
            return np.asarray(results.hidden_QD[run - 1]).tobytes()

        plain = self.shapes()
        runs = [(shape, 0, run) for shape in plain if shape.tiles >= 2 for run in {shape.decode, shape.runs - 2}]
        runs += [(shape, len(tokens) - 1, run) for shape in plain for run in {0, shape.decode - 1}]
        return len({read(*each) for each in runs}) == 1

    def _program(self, shape: StepShape) -> Callable:
        """Return the compiled step of a shape."""
        if shape not in self._compiled:
            step = using_rules(ENGINE)(
                using_kernels(self._kernels)(partial(ragged_step, self._weights, self.layout, shape))
            )
            whole = replicated(self._mesh)
            jitted = jax.jit(
                step,
                donate_argnums=(1, 2),
                out_shardings=(self._shardings, whole, whole),
                compiler_options=self._options,
            )
            how = row_sampling([Sampling()] * shape.runs, 0)
            with jax.set_mesh(self._mesh):
                lowered = jitted.lower(self._parameters, self._pages, self._state, self._empty(shape), how, self._known)
                self._compiled[shape] = lowered.compile()
        return self._compiled[shape]


def _token_drawn(drawn: Drawn, run: int) -> TokenDrawn:
    """Return the draw of a run, from arrays on the host."""
    logprob = float(drawn.logprob[run])
    asked = zip(drawn.top_ids[run].tolist(), drawn.top_logprobs[run].tolist(), strict=True)
    top = tuple((id, ln_p) for id, ln_p in asked if id != NO_TOKEN)
    return TokenDrawn(int(drawn.token[run]), None if math.isnan(logprob) else logprob, top)


def _write_run(
    batch: Batch,
    shape: StepShape,
    run: int,
    tokens: Sequence[int] | np.ndarray,
    start: int,
    tables: Sequence[Sequence[int]],
) -> None:
    """Write tokens at positions from `start` on as a run: the row of a sequence that decodes, or rows of a tile."""
    tile = run - shape.decode
    section, place = (0, run) if tile < 0 else (1, tile)
    first = run if tile < 0 else shape.decode + tile * shape.tile
    rows = slice(first, first + len(tokens))
    batch.token_R[rows], batch.position_R[rows] = tokens, range(start, start + len(tokens))
    batch.last_Q[run] = rows.stop - 1
    for group, table in zip(batch.tables, tables, strict=True):
        group[section][place, : len(table)] = table


def page_counts(layout: PageLayout, most_pages: int, slots: int, most_bytes: int, dtype: jnp.dtype) -> tuple[int, ...]:
    """Return the pages of each group within so many bytes: those that `slots` sequences of `most_pages` pages hold, or
    the same share of them in each group. A layer with a window holds the pages that a token of a sequence reads, and
    one more."""
    page = layout.size
    most = [most_pages if window is None else min(most_pages, -(-window // page) + 2) for window in layout.groups]
    each = [layout.page_bytes(group, dtype) for group in range(len(most))]
    asked = slots * sum(n * size for n, size in zip(most, each, strict=True))
    share = min(1.0, most_bytes / asked)
    return tuple(max(2, math.ceil(n * slots * share) + 1) for n in most)
