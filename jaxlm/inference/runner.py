"""The programs of the engine on its devices: compiled for few numbers of rows, one step ahead of what is read."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxlm.inference.paged_cache import PageLayout
from jaxlm.inference.pages import PageGroup
from jaxlm.inference.ragged_step import Batch, SlotState, StepResults, StepShape, ragged_step
from jaxlm.inference.requests import Sampling
from jaxlm.inference.sampling import NO_TOKEN, Drawn, RowSampling, row_sampling
from jaxlm.inference.scheduler import StepPlan
from jaxlm.inference.weights import WeightLayout
from jaxlm.models.config import Kernels, ModelConfig
from jaxlm.models.kernels import using_kernels
from jaxlm.models.tree import Tree
from jaxlm.parallel.partition import replicated, using_rules
from jaxlm.parallel.rules import ENGINE

TILE = 32  # rows of a prompt that read their keys together
# Products alone go to the library that computes a row in one way, whatever the number of rows: its sums along rows do
# not. As fast (measured on two cores with AVX-512).
_EXACT_ON_CPU = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


class CacheSize(NamedTuple):
    """Room for the keys and values of sequences: the tokens of a `page`, the pages of each group of layers, and the
    most tokens of a sequence, `context`."""

    page: int
    counts: tuple[int, ...]
    context: int


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
      slots: the most generations that are under way.
      size: of the cache, of `cache_size`.
      decode: the numbers of sequences that there are programs for, ascending.
      chunk_tokens: the most rows of prompts in a step; there are programs without any, with two tiles, and with these.
      exact: compute each row in one way on a CPU, whatever shares its step.
    """

    def __init__(
        self,
        model: ModelConfig,
        parameters: Tree,
        mesh: Mesh,
        size: CacheSize,
        *,
        known: np.ndarray | None = None,
        slots: int = 64,
        decode: Sequence[int] = (8, 64),
        chunk_tokens: int = 512,
        kernels: Kernels = "auto",
        exact: bool = True,
    ):
        self._mesh, self._kernels, self._slots, self.size = mesh, kernels, slots, size
        most = max(-(-chunk_tokens // TILE), 1)
        self.tile, self._tiles = TILE, tuple(sorted({0, min(2, most), most}))
        self._decode = sorted({max(min(n, slots), min(decode)) for n in decode})
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self._options = _EXACT_ON_CPU if on_cpu and exact else None
        self._weights = WeightLayout(model, by_outputs=on_cpu)
        self.layout = page_layout(model, mesh, size.page)
        self.dtype = jax.tree.leaves(parameters)[0].dtype
        stored = jnp.dtype("float32") if on_cpu else self.dtype  # widened there in each step otherwise
        self._shardings = self.layout.shardings(size.counts, mesh, ENGINE)
        with jax.set_mesh(mesh):
            allocate = jax.jit(partial(self.layout.allocate, size.counts, stored), out_shardings=self._shardings)
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
    def cache_bytes(self) -> int:
        """The bytes of all pages."""
        return sum(x.nbytes for x in jax.tree.leaves(self._pages))

    @property
    def chunk_tokens(self) -> int:
        """The most rows of prompts in a step."""
        return self._tiles[-1] * TILE

    @property
    def decode_rows(self) -> int:
        """The most sequences that decode in a step."""
        return self._decode[-1]

    def shapes(self, scores: bool = False) -> list[StepShape]:
        """Return the shapes that there are programs for, without those of scores or with."""
        plain = [StepShape(decode, tiles, TILE) for decode in self._decode for tiles in self._tiles]
        scored = [StepShape(self._decode[0], tiles, TILE, True) for tiles in self._tiles[1:]]
        return plain + scored if scores else plain

    def warm(self, scores: bool = False) -> None:
        """Compile all programs, several at a time, so that no request waits for one."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._program, self.shapes(scores)))
        self._count([], 0, self._slots)

    def dispatch(self, plan: StepPlan, scores: bool = False) -> PendingStep:
        """Start a step and return at once. `scores`: of the rows of its chunks."""
        shape = self._shape(plan, scores)
        batch, samplings = self._batch(plan, shape)
        how = row_sampling(*map(list, zip(*samplings, strict=True)))
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
        greedy = Sampling(temperature=0.0), 0, 0
        samplings = [greedy] * shape.runs
        for run, (generation, position) in enumerate(zip(plan.decode, plan.positions, strict=True)):
            batch.token_R[run], batch.position_R[run], batch.slot_Q[run] = -1, position, plan.slots[run]
            samplings[run] = generation.request.sampling, generation.request.seed, generation.request.stream
            self._write_table(batch, 0, run, plan.tables[run])
        run = shape.decode
        for i, chunk in enumerate(plan.chunks, len(plan.decode)):
            tokens = chunk.generation.tokens
            for start in range(chunk.start, chunk.stop, TILE):
                stop = min(start + TILE, chunk.stop)
                first = shape.decode + (run - shape.decode) * TILE
                rows = slice(first, first + stop - start)
                batch.token_R[rows], batch.position_R[rows] = tokens[start:stop], range(start, stop)
                after = tokens[start + 1 : stop + 1]
                batch.target_R[first - shape.decode :][: len(after)] = after
                batch.last_Q[run] = first + stop - start - 1
                self._write_table(batch, 1, run - shape.decode, plan.tables[i])
                run += 1
            if chunk.draws:
                request = chunk.generation.request
                batch.slot_Q[run - 1] = plan.slots[i]
                samplings[run - 1] = request.sampling, request.seed, request.stream
        return batch, samplings

    def _empty(self, shape: StepShape) -> Batch:
        """Return the arrays of a step whose rows are all padding."""
        last_Q = np.arange(shape.runs, dtype=np.int32)
        last_Q[shape.decode :] = shape.decode + np.arange(shape.tiles) * TILE
        pages = -(-self.size.context // self.size.page)
        sections = shape.decode, shape.tiles
        return Batch(
            token_R=np.zeros(shape.rows, np.int32),
            position_R=np.full(shape.rows, -1, np.int32),
            slot_Q=np.full(shape.runs, self._slots, np.int32),
            last_Q=last_Q,
            tables=tuple(tuple(np.zeros((Q, pages), np.int32) for Q in sections) for _ in self.layout.groups),
            target_R=np.zeros(shape.tiles * TILE, np.int32),
        )

    @staticmethod
    def _write_table(batch: Batch, section: int, run: int, tables: Sequence[Sequence[int]]) -> None:
        for group, table in zip(batch.tables, tables, strict=True):
            group[section][run, : len(table)] = table

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


def page_layout(model: ModelConfig, mesh: Mesh, page: int) -> PageLayout:
    """Return the pages of a model on a mesh, whose shards of the query heads decide what key/value heads are copied.

    Raises InputError for a model that the engine cannot page.
    """
    weights = WeightLayout(model, by_outputs=False)
    with jax.set_mesh(mesh), using_rules(ENGINE):
        return PageLayout.of(nnx.merge(weights.graph, weights.abstract).slots(), page)


def cache_size(layout: PageLayout, context: int, slots: int, most_bytes: int, dtype: jnp.dtype) -> CacheSize:
    """Return the pages of each group within so many bytes: those that `slots` sequences of `context` tokens hold, or
    the same share of them in each group. A layer with a window holds the pages that a token of a sequence reads, and
    one more."""
    page = layout.size
    whole = -(-context // page)
    most = [whole if window is None else min(whole, -(-window // page) + 2) for window in layout.groups]
    each = [layout.page_bytes(group, dtype) for group in range(len(most))]
    asked = slots * sum(n * size for n, size in zip(most, each, strict=True))
    share = min(1.0, most_bytes / asked)
    return CacheSize(page, tuple(max(2, math.ceil(n * slots * share) + 1) for n in most), context)


def page_groups(layout: PageLayout, size: CacheSize) -> list[PageGroup]:
    """Return the groups of pages that an allocator hands out."""
    return [PageGroup(count, window) for count, window in zip(size.counts, layout.groups, strict=True)]


def self_check(runner: Runner, vocabulary: int) -> bool:
    """Return whether a token's results are the same to the bit in every program: alone and with others, read as part
    of a prompt or by itself. Pages of a runner that is idle are overwritten."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, TILE + 3)
    found = set(_read_in_each(runner, tokens))
    return len(found) == 1


def _read_in_each(runner: Runner, tokens: np.ndarray) -> Iterator[bytes]:
    """Yield the last hidden state of a sequence as each program computes it, at another row each time."""
    page = runner.size.page
    pages = -(-len(tokens) // page)
    greedy = Sampling(temperature=0.0)

    def read(shape: StepShape, start: int, stop: int, run: int) -> bytes:
        """Read some tokens as one row, or as tiles from this run on."""
        batch, in_tiles = runner._empty(shape), run >= shape.decode
        for at in range(start, stop, TILE):
            first = shape.decode + (run - shape.decode) * TILE if in_tiles else run
            end = min(at + TILE, stop)
            rows = slice(first, first + end - at)
            batch.token_R[rows], batch.position_R[rows] = tokens[at:end], range(at, end)
            batch.last_Q[run] = rows.stop - 1
            place = run - shape.decode if in_tiles else run
            runner._write_table(batch, int(in_tiles), place, [range(1, pages + 1)] * len(batch.tables))
            run += 1
        results = runner._run(shape, batch, row_sampling([greedy] * shape.runs, 0))
        return np.asarray(results.hidden_QD[run - 1]).tobytes()

    for shape in runner.shapes():
        if shape.tiles:
            for run in {shape.decode, shape.runs - 2}:
                yield read(shape, 0, len(tokens), run)
    for shape in runner.shapes():
        for run in {0, shape.decode - 1}:
            yield read(shape, len(tokens) - 1, len(tokens), run)
