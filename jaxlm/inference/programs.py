"""The engine's programs: their numbers of rows and their operands, for a mesh of devices that need not be present.

Sequences, with their rows, pages and slots, are sharded over the mesh axes of a batch, and weights over the others:
each shard computes by itself. Sizes (slots, rows, pages) are those of one shard. Arrays have the shards one after the
other in their first dimension, and what points into them (page ids, slots, row indices) counts from the beginning of
its shard.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.core.errors import InputError
from jaxlm.inference.cache_memory import CacheSize
from jaxlm.inference.multi_step import multi_step
from jaxlm.inference.ngrams import NO_DRAFT
from jaxlm.inference.paged_cache import Arrays, PageLayout
from jaxlm.inference.proposal import DraftRows, propose
from jaxlm.inference.ragged_step import (
    Batch,
    DrawResults,
    DrawRows,
    NextTokens,
    SlotState,
    StepResults,
    draw,
    own_rows,
    ragged_step,
)
from jaxlm.inference.sampling import RowSampling
from jaxlm.inference.settings import CacheDtype, EngineSettings
from jaxlm.inference.step_shapes import FEWEST, TILE, StepShape, StepShapes, steps_per_dispatch
from jaxlm.inference.weights import WeightLayout
from jaxlm.models.adapter_set import AdapterSet
from jaxlm.models.config import ModelConfig
from jaxlm.models.execution_config import Kernels
from jaxlm.models.kernels import using_kernels
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.tree import Tree, placed
from jaxlm.parallel.collectives import on_each_shard
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import named_sharding, replicated, using_rules
from jaxlm.parallel.program import MeshProgram, bytes_on_device
from jaxlm.parallel.rules import ENGINE
from kernels_pallas.core import target

_KEPT = 64  # compiled programs, of engines that are alike
# Products alone go to the library that computes a row in one way, whatever the number of rows: its sums along rows do
# not.
_EXACT_ON_CPU = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


@dataclass(frozen=True)
class EnginePrograms:
    """The programs of an engine on a mesh. Two values that are equal share their compiled programs.

    Attributes:
      dtype: to compute in.
      page: tokens of a page.
      slots: the most sequences that decode on a shard.
      chunk_tokens: the most rows of prompts in a step on a device, rounded up to whole tiles.
      exact: compute each row in one way on a CPU.
      drafts: the most drafts of a sequence in a step.
      history: the most tokens of a sequence, in which drafts are looked up; 0 where they are not.
      kernels: `execution.kernels`.
      quantized: the form of the matrices of layers; None where they are in `dtype`.
      adapters: those beside the matrices; None where there are none.
      steps: the decoding steps of a dispatch where nothing waits; None for those of `steps_per_dispatch`.

    Raises InputError for a model or a page that the engine cannot serve.
    """

    model: ModelConfig
    mesh: Mesh
    dtype: jnp.dtype
    page: int
    slots: int
    chunk_tokens: int
    exact: bool
    drafts: int
    history: int
    kernels: Kernels
    quantized: Quantization | None = None
    cache_dtype: CacheDtype | None = None
    adapters: AdapterSet | None = None
    steps: int | None = None

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        mesh: Mesh,
        dtype: jnp.dtype,
        settings: EngineSettings,
        kernels: Kernels = "auto",
        quantized: Quantization | None = None,
        adapters: AdapterSet | None = None,
    ) -> "EnginePrograms":
        """Return the programs of an engine of these sizes, whose slots are divided over the shards."""
        slots = -(-settings.slots // _shards(mesh))
        history = min(model.context_length, settings.context or model.context_length) if settings.looks_up else 0
        sizes = settings.page, slots, settings.chunk_tokens, settings.exact, settings.drafts, history
        steps = settings.steps_per_dispatch
        return cls(model, mesh, dtype, *sizes, kernels, quantized, settings.cache_dtype, adapters, steps)

    def __post_init__(self):
        if self.page < TILE or self.page % TILE:
            raise InputError(f"a page of {self.page} tokens must be a multiple of {TILE}, which prompts are read by")
        self.layout.check_shared(Layout(self.mesh.shape), ENGINE)
        if self.drafts and self.layout.carries_states:
            raise InputError(
                "speculation takes back the tokens that it has guessed wrongly, which the state of a recurrent layer "
                "cannot; a model with such layers takes no --speculate, and draws no drafts"
            )
        if self.drafts and (self.steps or 1) > 1:
            raise InputError(
                f"inference.steps_per_dispatch = {self.steps} is of steps without drafts; leave it out, or --speculate"
            )

    @property
    def is_on_cpu(self) -> bool:
        return self.platform == "cpu"

    @property
    def platform(self) -> str:
        """The platform of the devices: "cpu", "gpu" or "tpu"."""
        return target.of_device(self.mesh.devices.flat[0]).platform

    @cached_property
    def shards(self) -> int:
        """The shards of sequences, each on devices of its own."""
        return _shards(self.mesh)

    @cached_property
    def parts(self) -> int:
        """The devices of a shard that share out the rows of prompts."""
        return Layout(self.mesh.shape).over(ENGINE.over("tiles"))

    @property
    def by_shards(self) -> NamedSharding:
        """The sharding of arrays that have the shards in their first dimension."""
        return NamedSharding(self.mesh, PartitionSpec(ENGINE.over("batch")))

    @property
    def shapes(self) -> StepShapes:
        """The shapes, on each shard, that there are programs for."""
        # Before the kernel of one row a matrix of bfloat16 is widened.
        takes_one = self.is_on_cpu and not self.exact and self.dtype == jnp.float32
        return StepShapes(self.slots, self.chunk_tokens, 1 if takes_one else FEWEST, self.drafts, self.parts)

    def steps_of(self, decode: int) -> int:
        """Return the steps of a dispatch in which so many rows decode and nothing waits."""
        if self.drafts:
            return 1
        return self.steps or steps_per_dispatch(self._weight_bytes, decode, self.platform)

    @cached_property
    def weights(self) -> WeightLayout:
        """The form in which parameters are kept."""
        turned = self.quantized is not None and self.quantized.by_outputs(self.platform)
        return WeightLayout(self.model, self.is_on_cpu and self.exact, self.quantized, turned, self.adapters)

    @cached_property
    def layout(self) -> PageLayout:
        """The pages of the model's layers."""
        with jax.set_mesh(self.mesh), using_rules(ENGINE):  # shards of query heads say which others are copied
            slots = self.weights.shapes().slots()
        return PageLayout.of(slots, self.page, self.cache_dtype, row_by_row=self.is_on_cpu and self.exact)

    @property
    def page_dtype(self) -> jnp.dtype:
        """The dtype of pages that are not of eight bits: float32 on a CPU, which would widen bfloat16 in each step."""
        return jnp.dtype("float32") if self.is_on_cpu else self.dtype

    @property
    def page_bytes(self) -> list[int]:
        """Bytes on each device of one page of each group, of all its layers."""
        groups = range(len(self.layout.groups))
        return [self.layout.page_bytes(group, self.page_dtype, self.mesh, ENGINE) for group in groups]

    def page_shardings(self, cache: CacheSize) -> dict[str, dict[str, NamedSharding]]:
        """Return the shardings of the pages of a cache."""
        return self.layout.shardings(self._page_counts(cache), self.mesh, ENGINE)

    def pages(self, cache: CacheSize) -> MeshProgram:
        """Return the program that makes the pages of a cache, of zeros."""
        allocate = partial(self.layout.allocate, self._page_counts(cache), self.page_dtype)
        return MeshProgram(jax.jit(allocate, out_shardings=self.page_shardings(cache)), (), self.mesh)

    def abstract_pages(self, cache: CacheSize) -> Arrays:
        """Return the shapes and shardings of the pages of a cache."""
        return placed(jax.eval_shape(self.pages(cache).function), self.page_shardings(cache))

    def empty_state(self) -> SlotState:
        """Return the state of each shard's `slots` slots, and of one for draws of padding, on the host."""
        return SlotState.empty(self.shards * (self.slots + 1), self.model.vocab_size, self.drafts, self.history)

    def empty_batch(self, shape: StepShape, cache: CacheSize) -> Batch:
        """Return the arrays of a step whose rows are all padding, of all shards."""
        rows, decode, tiles = (self.shards * each for each in (shape.rows, shape.decode, shape.tiles))
        sections = (decode, tiles) if tiles else (decode,)
        pages = -(-cache.context // self.layout.size)
        return Batch(
            token_R=np.zeros(rows, np.int32),
            position_R=np.full(rows, -1, np.int32),
            length_R=np.zeros(rows, np.int32),
            row_Q=np.arange(decode, dtype=np.int32) % shape.decode,
            slot_Q=np.full(decode, self.slots, np.int32),
            draft_Q=np.zeros(decode, np.int32),
            limit_Q=np.zeros(decode, np.int32),
            tables=tuple(tuple(np.zeros((n, pages), np.int32) for n in sections) for _ in self.layout.groups),
            target_R=np.full(tiles * TILE, -1, np.int32),
            is_ranked_R=np.zeros(tiles * TILE, bool),
            adapter_R=None if self.adapters is None else np.zeros(rows, np.int32),
            given_Q=np.full(decode, NO_DRAFT, np.int32) if self.drafts else None,
        )

    def step(self, shape: StepShape, cache: CacheSize) -> MeshProgram:
        """Return the step of a shape on each shard, which gives up the pages.

        Shards exchange nothing, but the scores, which all devices get. The devices of a shard that share out the rows
        of prompts exchange the entries of the pages, and the rows after which tokens are drawn.
        """

        # XLA's program calls its arguments by these names.
        def step(
            parameters: Tree, pages: Arrays, upcoming: NextTokens, batch: Batch, valid_V: jax.Array
        ) -> tuple[Arrays, StepResults]:
            adapter_R = None if batch.adapter_R is None else own_rows(batch.adapter_R, shape)
            module = self.weights.module(parameters, adapter_R)
            return ragged_step(module, self.layout, shape, pages, upcoming, batch, valid_V)

        on_shards = _on_shards(step, (False, True, True, True, False))
        results = StepResults(self._logits(shape.decode).sharding, self.by_shards, *[self._whole] * 4)
        pages = self.abstract_pages(cache)
        batch = self._on_all(self.empty_batch(shape, cache))
        operands = self.abstract_parameters(), pages, self._state.upcoming, batch, self._valid_token_mask
        return self._program(on_shards, operands, out_shardings=(self.page_shardings(cache), results), donate_argnums=1)

    def draw(self, draws: int, *, is_masked: bool = False) -> MeshProgram:
        """Return the draw of so many tokens on each shard, which gives up the state. All devices get the tokens.

        `is_masked`: the draw takes the ids that each token may be.
        """
        drawing = on_each_shard(draw, "batch", (True, True, True, False, *[True] * is_masked))
        ids = self._on_all(jax.ShapeDtypeStruct((self.shards * draws,), jnp.int32))
        rows = DrawRows(ids, ids, ids, ids, ids if self.drafts else None)
        operands = self._state, self._logits(draws), rows, self._valid_token_mask
        if is_masked:
            size = self.shards * draws, -(-self.model.vocab_size // 32)
            operands = *operands, self._on_all(jax.ShapeDtypeStruct(size, jnp.uint32))
        return self._program(drawing, operands, out_shardings=(self.by_shards, self._whole), donate_argnums=0)

    def multi_step(self, decode: int, cache: CacheSize) -> MeshProgram:
        """Return the program of `steps_of` steps with their draws, of rows that decode on each shard, which gives up
        the pages and the state. All devices get the tokens."""

        def multi(
            parameters: Tree, pages: Arrays, state: SlotState, batch: Batch, valid_V: jax.Array
        ) -> tuple[Arrays, SlotState, DrawResults]:
            module = partial(self.weights.module, parameters, batch.adapter_R)
            return multi_step(module, self.layout, self.steps_of(decode), pages, state, batch, valid_V)

        on_shards = _on_shards(multi, (False, True, True, True, False))
        batch = self._on_all(self.empty_batch(StepShape(decode, 0, TILE), cache))
        operands = self.abstract_parameters(), self.abstract_pages(cache), self._state, batch, self._valid_token_mask
        outputs = self.page_shardings(cache), self.by_shards, self._whole
        return self._program(on_shards, operands, out_shardings=outputs, donate_argnums=(1, 2))

    def empty_draft_rows(self, sequences: int, cache: CacheSize) -> DraftRows:
        """Return the operands of `proposal` for no sequence, of all shards."""
        count, pages = self.shards * sequences, -(-cache.context // self.layout.size)
        tables = tuple(np.zeros((count, pages), np.int32) for _ in self.layout.groups)
        return DraftRows(np.full(count, self.slots, np.int32), np.zeros(count, np.int32), tables)

    def proposal(self, sequences: int, cache: CacheSize) -> MeshProgram:
        """Return the program by which this model foresees the next tokens of so many sequences on each shard. It gives
        up the pages."""

        def proposal(
            parameters: Tree,
            pages: Arrays,
            upcoming: NextTokens,
            how: RowSampling,
            rows: DraftRows,
            valid_V: jax.Array,
        ) -> tuple[Arrays, jax.Array]:
            return propose(self.weights.module(parameters), self.layout, pages, upcoming, how, rows, valid_V)

        on_shards = _on_shards(proposal, (False, True, True, True, True, False))
        pages = self.abstract_pages(cache)
        rows = self._on_all(self.empty_draft_rows(sequences, cache))
        state = self._state.upcoming, self._state.how
        operands = self.abstract_parameters(), pages, *state, rows, self._valid_token_mask
        outputs = self.page_shardings(cache), self.by_shards
        return self._program(on_shards, operands, out_shardings=outputs, donate_argnums=1)

    def gather(self, draws: int) -> MeshProgram:
        """Return the program by which all devices get `StepResults.hidden_QD` of so many draws on each shard."""
        shape = self.shards * draws, self.model.d_model
        hidden = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.by_shards)
        return self._program(lambda hidden_QD: hidden_QD, (hidden,), out_shardings=self._whole)

    def put(self, field: str) -> MeshProgram:
        """Return the program that changes a field of `SlotState` for one slot of one shard: in place of the index of
        the slot, the other shards get one that no slot has. It gives up the field."""

        def put(all: Any, slot_1: jax.Array, one: Any) -> Any:
            return jax.tree.map(lambda all, one: all.at[slot_1[0]].set(one, mode="drop"), all, one)

        all = getattr(self._state, field)
        slot = self._on_all(jax.ShapeDtypeStruct((self.shards,), jnp.int32))
        one = self._on_all(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), all))
        mapped = on_each_shard(put, "batch", (True, True, False))
        return self._program(mapped, (all, slot, one), out_shardings=self.by_shards, donate_argnums=0)

    def abstract_parameters(self) -> Tree:
        """Return the shapes and shardings of the parameters as they are kept."""
        return self.weights.abstract_stored(self.dtype, self.mesh, ENGINE)

    @cached_property
    def _weight_bytes(self) -> int:
        return bytes_on_device(self.abstract_parameters())

    @cached_property
    def _whole(self) -> NamedSharding:
        return replicated(self.mesh)

    @cached_property
    def _state(self) -> SlotState:
        return _with(self.by_shards, jax.eval_shape(self.empty_state))

    @cached_property
    def _valid_token_mask(self) -> jax.ShapeDtypeStruct:
        return self._on_all(jax.ShapeDtypeStruct((self.model.vocab_size,), jnp.bool))

    def _on_all(self, shapes: Any) -> Any:
        return _with(self._whole, shapes)

    def _logits(self, draws: int) -> jax.ShapeDtypeStruct:
        shape = self.shards * draws, self.model.vocab_size
        sharding = named_sharding(("batch", "act_vocab"), shape, self.mesh, ENGINE)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def _page_counts(self, cache: CacheSize) -> list[int]:
        """Return the pages of each group on all shards."""
        return [self.shards * count for count in cache.counts]

    def _program(self, function: Callable, operands: tuple, **options: Any) -> MeshProgram:
        ruled = using_rules(ENGINE)(using_kernels(self.kernels)(function))
        exact = _EXACT_ON_CPU if self.is_on_cpu and self.exact else None
        return MeshProgram(jax.jit(ruled, compiler_options=exact, **options), operands, self.mesh, exact)


def _shards(mesh: Mesh) -> int:
    return Layout(mesh.shape).over(ENGINE.over("batch"))


def _on_shards(function: Callable, is_sharded: tuple[bool, ...]) -> Callable:
    """Return a function of the model on each shard. All such programs are compiled in one way, also those without rows
    of prompts to share out: in bfloat16 XLA otherwise rounds at other places."""
    return on_each_shard(function, "batch", is_sharded, "tiles")


def _with(sharding: NamedSharding, shapes: Any) -> Any:
    return placed(shapes, jax.tree.map(lambda _: sharding, shapes))


@lru_cache(maxsize=_KEPT)
def compiled_step(programs: EnginePrograms, cache: CacheSize, shape: StepShape) -> jax.stages.Compiled:
    """Return the compiled step of a shape."""
    return programs.step(shape, cache).kept("step", programs, shape, cache)


@lru_cache(maxsize=_KEPT)
def compiled_proposal(programs: EnginePrograms, cache: CacheSize, sequences: int) -> jax.stages.Compiled:
    """Return the compiled proposal of drafts for so many sequences."""
    return programs.proposal(sequences, cache).kept("proposal", programs, sequences, cache)


@lru_cache(maxsize=_KEPT)
def compiled_draw(programs: EnginePrograms, draws: int, *, is_masked: bool = False) -> jax.stages.Compiled:
    """Return the compiled draw of so many tokens."""
    return programs.draw(draws, is_masked=is_masked).kept("draw", programs, draws, is_masked)


@lru_cache(maxsize=_KEPT)
def compiled_multi_step(programs: EnginePrograms, cache: CacheSize, decode: int) -> jax.stages.Compiled:
    """Return the compiled steps of one dispatch, of so many rows that decode."""
    return programs.multi_step(decode, cache).kept("multi_step", programs, decode, cache)


@lru_cache(maxsize=_KEPT)
def compiled_gather(programs: EnginePrograms, draws: int) -> jax.stages.Compiled:
    """Return the compiled gathering of the residual before so many draws."""
    return programs.gather(draws).kept("gather", programs, draws)


@lru_cache(maxsize=_KEPT)
def compiled_put(programs: EnginePrograms, field: str) -> jax.stages.Compiled:
    """Return the compiled change of a field of `SlotState` for one slot."""
    return programs.put(field).kept("put", programs, field)


def empty_pages(programs: EnginePrograms, cache: CacheSize) -> Arrays:
    """Return the pages of a cache, of zeros."""
    return programs.pages(cache).kept("pages", programs, cache)()
