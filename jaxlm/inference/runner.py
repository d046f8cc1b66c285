"""The engine on its devices: weights, pages and slots, and steps that are dispatched one ahead of what is read."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlm.inference.cache_memory import cache_size
from jaxlm.inference.check_steps import CheckStep, check_steps, check_texts
from jaxlm.inference.draft_model import Drafter, DraftModel
from jaxlm.inference.generation import DecodeRun, Token
from jaxlm.inference.pages import PageGroup
from jaxlm.inference.programs import (
    EnginePrograms,
    compiled_draw,
    compiled_gather,
    compiled_multi_step,
    compiled_put,
    compiled_step,
    empty_pages,
)
from jaxlm.inference.ragged_step import FORESEEN, REFUSED, Batch, DrawResults, DrawRows, StepResults
from jaxlm.inference.requests import GREEDY, BarredTokens, Request, Sampling
from jaxlm.inference.sampling import NO_TOKEN, Drawn, row_sampling, token_counts
from jaxlm.inference.scheduler import ShardPlan, StepPlan
from jaxlm.inference.step_shapes import TILE, StepShape, fitting
from jaxlm.models.tree import Tree
from jaxlm.parallel.partition import replicated
from jaxlm.parallel.rules import ENGINE

_ALL_IDS = np.uint32(2**32 - 1)  # of 32


@dataclass(frozen=True)
class BegunStep:
    """A step that reads its rows and has drawn no tokens. `hidden_QD`: as `StepResults` has it, on all devices, where a
    request asks for it."""

    plan: StepPlan
    shape: StepShape
    batch: Batch
    results: StepResults
    hidden_QD: jax.Array | None


@dataclass(frozen=True)
class PendingStep:
    """A step, or several of one program, that was dispatched and not read. `scored`: the last four fields of
    `StepResults`. The other fields are as `BegunStep` and `multi_step` have them."""

    plan: StepPlan
    shape: StepShape
    draws: DrawResults
    scored: tuple[jax.Array, ...] = ()
    hidden_QD: jax.Array | None = None


class SlotSampling(NamedTuple):
    """The sampling of a slot: arguments of `row_sampling` for one row."""

    sampling: Sampling
    seed: int = 0
    stream: int = 0
    barred: BarredTokens = BarredTokens()


class Reading(NamedTuple):
    """The results of a step on the host, by the id of the generation.

    `tokens`: the drawn tokens: none, one, or with drafts more. `foreseen`: the generations of which the last of these
    equals the draft in its place. `hidden`: float32 [tokens, D], the normalised residual that each token was drawn
    from, where the request asks for it. `scores`: of the rows of a chunk, where the request asks for scores.
    """

    tokens: dict[int, list[Token]]
    foreseen: set[int]
    hidden: dict[int, np.ndarray]
    scores: dict[int, "Scores"]


class Scores(NamedTuple):
    """Log-probabilities of tokens of a prompt.

    `first`: the index of the token before the first scored token. The other fields are those of `StepResults` for each
    scored token: `logprob` float32 [N], `rank` int32 [N], `top` int32 [N, K] and `top_logprob` float32 [N, K]. Without
    `Request.ranks`, `rank` is None and K is 1.
    """

    first: int
    logprob: np.ndarray
    rank: np.ndarray | None
    top: np.ndarray
    top_logprob: np.ndarray


class Runner:
    """A model's weights and pages, and the programs that run steps over them.

    Args:
      parameters: on the programs' mesh, in their dtype.
      valid_token_mask: bool [V], whether an id has a token; None where all ids have one.
      context: the most tokens of a sequence; None is the model's, or as many as the cache holds.
      cache_bytes: the most memory of pages on each device; None as `cache_size` says.
      draft: draws the drafts, where `programs` have any that are not looked up.
      adapters: the names of the adapters of `programs`, in order.

    Raises InputError for too little memory, or a draft model that does not suit.
    """

    def __init__(
        self,
        programs: EnginePrograms,
        parameters: Tree,
        *,
        valid_token_mask: np.ndarray | None,
        context: int | None,
        cache_bytes: int | None,
        draft: DraftModel | None = None,
        adapters: Sequence[str] = (),
    ):
        self._adapters = {name: index for index, name in enumerate(adapters, 1)}
        self.programs, model, mesh = programs, programs.model, programs.mesh
        self._slots = programs.slots
        self._parameters = programs.weights.stored(parameters, mesh, ENGINE)
        valid_token_mask = np.ones(model.vocab_size, bool) if valid_token_mask is None else valid_token_mask
        self._drafter = Drafter(programs, draft, valid_token_mask) if draft else None
        self.cache = cache_size(
            programs.layout,
            programs.page_dtype,
            mesh,
            ENGINE,
            longest=model.context_length,
            context=context,
            slots=self._slots,
            most_bytes=cache_bytes,
            beside=self._drafter and self._drafter.page_bytes(),
        )
        if self._drafter:
            self._drafter.allocate(self.cache)
        self._pages = empty_pages(programs, self.cache)
        self._state = jax.device_put(programs.empty_state(), programs.by_shards)
        self._how: dict[tuple[int, int], SlotSampling] = {}  # of each slot of a shard
        self._valid_token_mask = jax.device_put(valid_token_mask, replicated(mesh))
        self._shapes = {scores: programs.shapes.all(scores) for scores in (False, True)}  # of steps without and with
        # Steps look their programs up by shape alone: comparing models takes time.
        self._step = cache(partial(compiled_step, programs, self.cache))
        self._draw = cache(partial(compiled_draw, programs))
        self._multi_step = cache(partial(compiled_multi_step, programs, self.cache))
        self._steps: dict[int, int] = {}  # of a dispatch, by the rows that decode, where its program is there
        self._loaded: set[tuple[StepShape, bool]] = set()  # shapes whose step and draw are there
        self._gather = cache(partial(compiled_gather, programs))
        self._put = cache(partial(compiled_put, programs))

    @property
    def chunk_tokens(self) -> int:
        """The most rows of prompts in a step on a shard."""
        return self.programs.shapes.tiles[-1] * TILE

    def page_groups(self, states_every: int) -> list[PageGroup]:
        """Return the groups of pages that the allocator of each shard hands out, with states that stay at each multiple
        of so many tokens."""
        layout = self.programs.layout
        return [
            PageGroup(count, window, states_every if group == layout.state_group else None)
            for group, (count, window) in enumerate(zip(self.cache.counts, layout.groups, strict=True))
        ]

    def warm(self, scores: bool = False, masks: bool = False) -> None:
        """Compile all programs, several at a time, so that no request waits for one; with `masks` also those of
        requests with a grammar. With `scores` the programs that give scores read chunks without scores too: fewer to
        compile."""
        self._shapes[False] = self._shapes[scores]
        with ThreadPoolExecutor() as pool:
            compiling = [*map(partial(pool.submit, self._step), self._shapes[scores])]
            draws = [partial(self._draw, is_masked=is_masked) for is_masked in {False, masks}]
            compiling.append(pool.submit(self.warm_multi_step))
            for program in (*draws, self._gather) if self.programs.shards > 1 else draws:
                compiling += [*map(partial(pool.submit, program), self.programs.shapes.decode)]
            if self._drafter:
                compiling += [*map(partial(pool.submit, self._drafter.warm), self._shapes[False])]
            for each in compiling:
                each.result()
        self._set_slot((0, self._slots), SlotSampling(GREEDY))
        self._count((0, self._slots), [], 0)
        self._remember((0, self._slots), [])

    def warm_multi_step(self) -> None:
        """Compile the programs of several steps. Plans have several from then on, or at once where their number is
        given: compiling takes longer than they save in a few texts."""
        for decode in self.programs.shapes.decode:
            if (steps := self.programs.steps_of(decode)) > 1:
                self._multi_step(decode)
                self._steps[decode] = steps

    def steps_of(self, rows: int) -> int:
        """Return the steps of a dispatch in which so many rows decode on a shard and nothing waits."""
        decode = next(n for n in self.programs.shapes.decode if n >= rows)
        return self.programs.steps or self._steps.get(decode, 1)

    def run(self, plan: StepPlan) -> PendingStep:
        """Start the several steps of a plan, with their draws, and return at once."""
        shape = self._shape(plan)
        batch = self._batch(plan, shape)
        self._pages, self._state, draws = self._multi_step(shape.decode)(
            self._parameters, self._pages, self._state, batch, self._valid_token_mask
        )
        return PendingStep(plan, shape, draws)

    def begin(self, plan: StepPlan) -> BegunStep:
        """Start to read the rows of a step and return at once. `draw` must follow before another step begins."""
        for index, shard in enumerate(plan.shards):
            for chunk, slot in zip(shard.chunks, shard.slots[len(shard.decode) :], strict=True):
                if chunk.draws:
                    generation, request = chunk.generation, chunk.generation.request
                    how = SlotSampling(request.sampling, generation.seed, request.stream, generation.barred)
                    self._set_slot((index, slot), how)
                    if request.sampling.counts_tokens:
                        self._count((index, slot), generation.tokens, generation.prompt)
                    self._remember((index, slot), generation.tokens)
        shape = self._shape(plan)
        self._load(shape, is_masked=any(generation.matcher for generation in plan.draws))
        batch = self._batch(plan, shape)
        results, hidden_QD = self._read_rows(shape, batch), None
        if any(generation.request.hidden for generation in plan.draws):
            is_whole = self.programs.shards == 1
            hidden_QD = results.hidden_QD if is_whole else self._gather(shape.decode)(results.hidden_QD)
        return BegunStep(plan, shape, batch, results, hidden_QD)

    def _read_rows(self, shape: StepShape, batch: Batch) -> StepResults:
        self._pages, results = self._step(shape)(
            self._parameters, self._pages, self._state.upcoming, batch, self._valid_token_mask
        )
        if self._drafter:
            self._drafter.read(shape, self._state.upcoming, batch)
        return results

    def draw(self, begun: BegunStep) -> PendingStep:
        """Start to draw the tokens of a step, from those that grammars allow now, and return at once."""
        shape, batch = begun.shape, begun.batch
        first_Q = np.arange(len(batch.row_Q)) // shape.decode * shape.rows  # rows before those of the draw's shard
        position_Q = batch.position_R[first_Q + batch.row_Q] + 1
        rows = DrawRows(batch.slot_Q, batch.draft_Q, batch.limit_Q, position_Q, batch.given_Q)
        allowed_QW = self._masks(begun.plan, shape)
        masks = () if allowed_QW is None else (allowed_QW,)
        drawing = self._draw(shape.decode, is_masked=bool(masks))
        self._state, draws = drawing(self._state, begun.results.logits_QV, rows, self._valid_token_mask, *masks)
        if self._drafter and not all(generation.matcher for generation in begun.plan.draws):
            self._state = self._drafter.propose(shape, self._state, batch)
        return PendingStep(begun.plan, shape, draws, tuple(begun.results[2:]), begun.hidden_QD)

    def _load(self, shape: StepShape, *, is_masked: bool) -> None:
        """Have the two programs of a step, made at a time where they are asked for the first time."""
        if (shape, is_masked) not in self._loaded:
            with ThreadPoolExecutor(1) as pool:
                drawing = pool.submit(self._draw, shape.decode, is_masked=is_masked)
                self._step(shape)
            drawing.result()
            self._loaded.add((shape, is_masked))

    def _masks(self, plan: StepPlan, shape: StepShape) -> np.ndarray | None:
        """Return the ids that each draw of a step may give, as `draw` takes them; None where no grammar bars any."""
        if not any(generation.matcher for generation in plan.draws):
            return None
        allowed_QW = np.full((len(plan.shards) * shape.decode, -(-self.programs.model.vocab_size // 32)), _ALL_IDS)
        for index, shard in enumerate(plan.shards):
            for part, rows in shard.rows_of_draws():
                generation, drafts = part.generation, part.tokens if isinstance(part, DecodeRun) else ()
                if generation.matcher is not None and not generation.end:
                    allowed = generation.matcher.allowed_after(drafts)
                    first = index * shape.decode + rows.start
                    allowed_QW[first : first + len(allowed)] = allowed
        return allowed_QW

    def _set_slot(self, slot: tuple[int, int], how: SlotSampling) -> None:
        """Set how a slot of a shard draws, unless the slot draws so already."""
        if not how.sampling.temperature:
            how = how._replace(seed=0, stream=0)
        if self._how.get(slot) == how:
            return
        self._how[slot] = how
        one = jax.tree.map(lambda x: x[0], row_sampling([how.sampling], how.seed, [how.stream], [how.barred]))
        self._put_at(slot, "how", one)

    def _count(self, slot: tuple[int, int], tokens: Sequence[int], prompt: int) -> None:
        """Set the counts of a slot to those of a prompt and what was drawn after it."""
        counts_V = token_counts(tokens[:prompt], tokens[prompt:], self._state.counts_SV.shape[1])
        self._put_at(slot, "counts_SV", counts_V)

    def _remember(self, slot: tuple[int, int], tokens: Sequence[int]) -> None:
        """Set the tokens of a slot in which drafts are looked up."""
        if length := self.programs.history:
            history_L = np.zeros(length, np.int32)
            history_L[: len(tokens)] = tokens
            self._put_at(slot, "history_SL", history_L)

    def _put_at(self, slot: tuple[int, int], field: str, one: Any) -> None:
        """Set a field of the state of a slot."""
        slot_N = np.full(self.programs.shards, self._slots + 1, np.int32)  # no slot has this index
        slot_N[slot[0]] = slot[1]
        put = self._put(field)(getattr(self._state, field), slot_N, one)
        self._state = self._state._replace(**{field: put})

    def read(self, step: PendingStep) -> Reading:
        """Wait for a step and return its results."""
        scored = step.scored if any(chunk.scored for chunk in step.plan.chunks) else ()
        draws, hidden_QD, scored = jax.device_get((step.draws, step.hidden_QD, scored))
        steps = len(draws.accepted_Q) // (len(step.plan.shards) * step.shape.decode)  # that a row has draws of
        tokens, foreseen, hidden, scores = {}, set(), {}, {}
        for index, shard in enumerate(step.plan.shards):
            first = index * step.shape.decode
            for part, rows in shard.rows_of_draws():
                generation = part.generation
                of_rows = range(steps * (first + rows.start), steps * (first + rows.stop))
                accepted = [row for row in of_rows if draws.accepted_Q[row] != REFUSED]
                tokens[generation.id] = [_token(draws.drawn, row) for row in accepted]
                if accepted and draws.accepted_Q[accepted[-1]] == FORESEEN:
                    foreseen.add(generation.id)
                if hidden_QD is not None:
                    hidden[generation.id] = hidden_QD[accepted]
            first = index * step.shape.tiles * TILE
            for chunk in shard.chunks:
                if chunk.scored:
                    rows = chunk.scored
                    at = slice(first + rows.start - chunk.start, first + rows.stop - chunk.start)
                    logprob, rank, top, top_logprob = (x[at] for x in scored)
                    if not chunk.generation.request.ranks:  # what shares its step may have asked for more
                        rank, top, top_logprob = None, top[:, :1], top_logprob[:, :1]
                    scores[chunk.generation.id] = Scores(rows.start, logprob, rank, top, top_logprob)
                first += _padded(chunk.stop - chunk.start)
        return Reading(tokens, foreseen, hidden, scores)

    def _shape(self, plan: StepPlan) -> StepShape:
        """Return the smallest shape that each shard of a plan fits into."""
        scores = any(chunk.scored for chunk in plan.chunks)
        rows = max(sum(_padded(chunk.stop - chunk.start) for chunk in shard.chunks) for shard in plan.shards)
        return fitting(self._shapes[scores], max(shard.rows_drawn for shard in plan.shards), rows, scores)

    def _batch(self, plan: StepPlan, shape: StepShape) -> Batch:
        """Return the arrays of a step."""
        batch = self.programs.empty_batch(shape, self.cache)
        for index, shard in enumerate(plan.shards):
            self._write(batch.shard(index, len(plan.shards)), shard, shape)
        return batch

    def _write(self, batch: Batch, plan: ShardPlan, shape: StepShape) -> None:
        """Write the rows of a shard into its arrays."""
        draws = 0
        for i, run in enumerate(plan.decode):
            rows = slice(draws, draws + 1 + run.drafts)
            batch.slot_Q[rows], batch.draft_Q[rows] = plan.slots[i], range(1 + run.drafts)
            if run.tokens:
                batch.given_Q[rows.start + 1 : rows.stop] = run.tokens
            request = run.generation.request
            batch.limit_Q[rows], batch.length_R[rows] = run.limit, request.most_tokens
            if batch.adapter_R is not None:
                batch.adapter_R[rows] = self._adapter(request)
            for (decode, *_), table in zip(batch.tables, plan.tables[i], strict=True):
                decode[rows, : len(table)] = table
            draws = rows.stop
        run = shape.decode
        for i, chunk in enumerate(plan.chunks, len(plan.decode)):
            tokens, request = chunk.generation.tokens, chunk.generation.request
            if chunk.scored:
                rows, first = chunk.scored, (run - shape.decode) * TILE - chunk.start
                targets = tokens[: chunk.generation.prompt]
                if request.following is not None:
                    targets.append(request.following)
                batch.target_R[first + rows.start : first + rows.stop] = targets[rows.start + 1 : rows.stop + 1]
                batch.is_ranked_R[first + rows.start : first + rows.stop] = request.ranks
            for start in range(chunk.start, chunk.stop, TILE):
                stop = min(start + TILE, chunk.stop)
                placed = shape, run, tokens[start:stop], start, plan.tables[i], request.most_tokens
                last = _write_run(batch, *placed, self._adapter(request))
                run += 1
            if chunk.draws:
                batch.row_Q[draws], batch.slot_Q[draws] = last, plan.slots[i]
                batch.length_R[draws] = request.most_tokens
                for (decode, *_), table in zip(batch.tables, plan.tables[i], strict=True):
                    decode[draws, : len(table)] = table  # of a row of padding, for drafts
                draws += 1

    def _adapter(self, request: Request) -> int:
        """Return the index of a request's adapter, as `Batch.adapter_R` has it."""
        return 0 if request.adapter is None else self._adapters[request.adapter]

    def check(self) -> bool:
        """Return whether texts' results are the same to the bit in every program and on every shard of this process:
        read as parts of prompts or by themselves, at other rows, alone and among texts of other lengths. Pages of a
        runner that is idle are overwritten."""
        layout, cache = self.programs.layout, self.cache
        texts = check_texts(
            len(self._valid_token_mask),
            most=self._slots,
            context=cache.context,
            size=layout.size,
            pages=min(cache.counts),
            adapters=len(self._adapters),
        )
        lengths = [len(text.tokens) for text in texts]

        def read(step: CheckStep) -> set[tuple[int, int, bytes]]:
            """Return the logits at the ends of texts, as far as the step has draws, on devices of this process: the
            text, the first id of a part of the vocabulary, and the part's bytes."""
            shape, shards = step.shape, self.programs.shards
            ended = [run.text for run in step.runs if run.part.stop == lengths[run.text]][: shape.decode]
            draws = dict(zip(ended, range(shape.decode - len(ended), shape.decode), strict=True))
            batch = self.programs.empty_batch(shape, cache)
            for index in range(shards):
                shard = batch.shard(index, shards)
                for run, at, part in step.runs:
                    text, tables = texts[at], [texts[at].pages] * len(layout.groups)
                    chunk = text.tokens[part.start : part.stop]
                    last = _write_run(shard, shape, run, chunk, part.start, tables, lengths[at], text.adapter)
                    if part.stop == lengths[at] and at in draws:
                        shard.row_Q[draws[at]] = last
            logits_QV = self._read_rows(shape, batch).logits_QV
            parts = [(x.index[1].start or 0, np.asarray(x.data)) for x in logits_QV.addressable_shards]
            return {(at, start, part_QV[q].tobytes()) for start, part_QV in parts for at, q in draws.items()}

        steps = check_steps(self._shapes[False], lengths, carries_states=layout.carries_states)
        logits = set().union(*map(read, steps))
        return len(logits) == len({place[:2] for place in logits})


def _padded(rows: int) -> int:
    """Return rows of whole tiles."""
    return -(-rows // TILE) * TILE


def _token(drawn: Drawn, at: int) -> Token:
    """Return one of the tokens of a step, from arrays on the host."""
    if math.isnan(logprob := float(drawn.logprob[at])):
        return Token(int(drawn.token[at]))
    likeliest = zip(drawn.top_ids[at].tolist(), drawn.top_logprobs[at].tolist(), strict=True)
    return Token(int(drawn.token[at]), logprob, tuple((id, ln_p) for id, ln_p in likeliest if id != NO_TOKEN))


def _write_run(
    batch: Batch,
    shape: StepShape,
    run: int,
    tokens: Sequence[int] | np.ndarray,
    start: int,
    tables: Sequence[Sequence[int]],
    length: int,
    adapter: int,
) -> int:
    """Write tokens at positions from `start` on, of a sequence that may come to `length` and has this adapter, as a
    run: the row of a sequence that decodes, or rows of a tile. Return the last row."""
    tile = run - shape.decode
    section, place = (0, run) if tile < 0 else (1, tile)
    first = run if tile < 0 else shape.decode + tile * shape.tile
    rows = slice(first, first + len(tokens))
    batch.token_R[rows], batch.position_R[rows] = tokens, range(start, start + len(tokens))
    batch.length_R[rows] = length
    if batch.adapter_R is not None:
        batch.adapter_R[rows] = adapter
    for group, table in zip(batch.tables, tables, strict=True):
        group[section][place, : len(table)] = table
    return rows.stop - 1
