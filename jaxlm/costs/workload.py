"""The step that is counted, and its mesh: all that counting needs to know."""

import functools
import json
import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import jax.numpy as jnp

from jaxlm.config import step_sizes
from jaxlm.config.experiment import Experiment
from jaxlm.costs.counted import parameters
from jaxlm.costs.draft_models import PlannedDraftModel, planned_draft_model
from jaxlm.costs.engine_steps import EngineSteps, decode_steps, largest_step, prefill_steps
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.memoized import memoized
from jaxlm.costs.stages import StageLayers, stage_layers
from jaxlm.inference.config import InferenceConfig
from jaxlm.inference.settings import LOOK_UP, CacheDtype, EngineSettings, Speculation
from jaxlm.inference.step_shapes import FEWEST, StepShape, StepShapes
from jaxlm.models import expert_parallel
from jaxlm.models.config import ModelConfig
from jaxlm.models.doors.cost import UnpaddedReads
from jaxlm.models.execution_config import ExecutionConfig, ExpertWay, Remat
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.tree import Dimensions
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import RULES, Kind, Rules
from jaxlm.parallel.ticks import Ticks
from jaxlm.training.config import (
    AdamWConfig,
    ConstantScheduleConfig,
    LocalSGDConfig,
    NextTokenConfig,
    ObjectiveConfig,
    OptimizerConfig,
)
from jaxlm.training.groups import frozen
from kernels_pallas.paged_attention.costs import FEW_QUERIES, SectionReads

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Workload:
    """One step of training, or the steps of an engine, over the whole job.

    `train` is an optimizer step over `batch` rows of `sequence` tokens. `prefill` stands for the engine's steps that
    read `batch` prompts of `sequence` tokens, chunk by chunk, and give the logits after each prompt. `decode` is the
    engine's step that reads the last token of each of `batch` sequences of `sequence` tokens. `execution.dtype` is the
    dtype of forward and backward pass; in training, parameters, accumulated gradients and optimizer state are float32,
    except parameters that `lora` adapts or leaves as they are, which stay in `execution.dtype` or are quantised.

    Attributes:
      batch: sequences, over the whole job.
      sequence: tokens of each sequence.
      platform: of the chip. It decides what kernels run; on a CPU training computes attention in chunks
        (`kernels_pallas.flash_attention.causal_chunks`).
      device_kind: JAX's name of the chip's devices, by which attention's kernel is chosen; None: any of the platform.
      optimizer, lora, objective, microbatches, counts_idle, steps, dropout, average, local_sgd: in training alone.
        `objective`: that of text. `microbatches`: the parts of a batch that follow one another. `counts_idle`: whether
        the passes of stages of a pipeline without a microbatch are counted. `steps`: the optimizer steps of the run,
        None where they follow from text that is not read. `dropout`: whether numbers are dropped. `average`: whether
        an average of the parameters is kept beside them. `local_sgd`: of replicas that train by themselves, None where
        they sum gradients.
      page, chunk_tokens, cache_dtype, steps_per_dispatch, engine_steps, is_padded: in inference alone, the fourth as
        `EngineSettings` has it but for an engine that is warm. `page`: tokens of a page.
        `chunk_tokens`: the most rows of prompts in a step, on each shard. `cache_dtype`: of pages of eight bits.
        `engine_steps`: the steps of one shape that this workload is restricted to; None: all steps that its tokens
        need. `is_padded`: whether padding rows and padding keys of the engine are counted.
      drafts, acceptance, draft_model: in decoding, the drafts of next tokens that a step reads for each sequence, the
        probability that one is right where those before it are, and the model that draws them; None where they are
        looked up. `run`: of `without_drafts`, the rows of a sequence whose pages a kernel reads once.
    """

    kind: Kind
    model: ModelConfig
    batch: int
    sequence: int
    execution: ExecutionConfig = ExecutionConfig()
    layout: Layout = Layout()
    platform: Literal["gpu", "tpu", "cpu"] = "gpu"
    device_kind: str | None = None
    own_rules: Rules | None = None  # in place of those of RULES for this kind of step
    optimizer: OptimizerConfig = AdamWConfig(schedule=ConstantScheduleConfig())
    lora: LoraConfig | None = None
    objective: ObjectiveConfig = NextTokenConfig()
    microbatches: int = 1
    counts_idle: bool = True
    steps: int | None = 1
    dropout: bool = False
    average: bool = False
    local_sgd: LocalSGDConfig | None = None
    page: int = EngineSettings.page
    chunk_tokens: int = EngineSettings.chunk_tokens
    cache_dtype: CacheDtype | None = None
    steps_per_dispatch: int | None = None
    drafts: int = 0
    acceptance: float = 0.0
    draft_model: PlannedDraftModel | None = None
    run: Fraction | int = 1
    engine_steps: EngineSteps | None = None
    is_padded: bool = True

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Hashes of texts differ between processes.
        return {name: value for name, value in self.__dict__.items() if name not in ("_hash", "answers")}

    @cached_property
    def _hash(self) -> int:
        """The hash of all fields, computed once: counting looks up many results by the workload."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @classmethod
    def of(cls, experiment: Experiment, layout: Layout = Layout(), kind: Kind = "train") -> "Workload":
        """Return the step of an experiment on a mesh of this layout. Raises InputError where a pattern of
        `optimizer.groups` or `lora.targets` decides nothing of a training step."""
        batch, sequence = step_sizes.sizes(experiment, kind)
        work = cls(kind, experiment.model, batch, sequence, experiment.execution, layout)
        if kind != "train":
            inference = experiment.inference
            sizes = {"page": inference.page, "chunk_tokens": inference.chunk_tokens}
            sizes["steps_per_dispatch"] = inference.steps_per_dispatch
            work = replace(work, **sizes, cache_dtype=inference.cache_dtype)
            return work if kind == "prefill" else work._speculating(inference)
        training = experiment.training
        work = replace(
            work,
            optimizer=experiment.optimizer,
            lora=experiment.lora,
            objective=experiment.objective,
            microbatches=training.microbatches,
            steps=training.steps,
            dropout=training.dropout > 0,
            average=training.ema_decay is not None,
            local_sgd=training.local_sgd,
        )
        work.frozen  # noqa: B018, refuses patterns before anything is counted
        return work

    def _speculating(self, inference: InferenceConfig) -> "Workload":
        """Return a decoding step with the drafts that [inference] says."""
        if inference.speculate is None:
            return self
        source, drafts = Speculation.parse(inference.speculate)
        draft_model = None if source == LOOK_UP else planned_draft_model(source)
        return replace(self, drafts=drafts, acceptance=inference.acceptance, draft_model=draft_model)

    @property
    def tokens_per_sequence(self) -> float:
        """The expected tokens that a decoding step draws for a sequence: one, and a draft where it and all before it
        are right."""
        return sum(self.acceptance**n for n in range(1 + self.drafts))

    @memoized
    def without_drafts(self) -> "Workload":
        """Return a decoding step with a sequence more for each draft: drafts are rows. XLA reads the pages of each row
        by itself, and a kernel those of a run of rows once."""
        if not self.drafts:
            return self
        rows = 1 + self.drafts
        run = Fraction(rows, math.ceil(rows / FEW_QUERIES))
        return replace(self, batch=self.batch * rows, drafts=0, acceptance=0.0, draft_model=None, run=run)

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """The model, and the one that draws its drafts, where there is one."""
        return (self.model, self.draft_model.model) if self.draft_model else (self.model,)

    def with_execution(self, **changes: Any) -> "Workload":
        """Return the workload with other values in its section [execution]."""
        return self._with(execution=_changed(self.execution, **changes))

    def _with(self, **changes: Any) -> "Workload":
        """Return the workload with other values: itself, with the results that it keeps, where it has them."""
        has_them = all(getattr(self, name) == value for name, value in changes.items())
        return self if has_them else replace(self, **changes)

    @memoized
    def without_sizes(self) -> "Workload":
        """Return the workload of one row of one token: what follows from the parameters alone is the same for all
        sizes."""
        return replace(self, batch=1, sequence=1, microbatches=1)

    @memoized
    def representative(self) -> "Workload":
        """Return the workload on a mesh where one axis alone shards the batch. What a device computes depends only on
        the product of the sizes of such axes, so that all meshes of a search with one product share the result."""
        first, *others = self.rules.batch_alone or ("",)
        if not others:
            return self
        shards = self.layout.over((first, *others))
        return replace(self, layout=self.layout.replace(**dict.fromkeys(others, 1), **{first: shards}))

    @property
    def replicas(self) -> int:
        """Copies of the model on a mesh, each with a share of the batch."""
        return self.layout.over(self.rules.replicas)

    @memoized
    def of_one_replica(self) -> "Workload":
        """Return the step that each replica of `local_sgd` runs by itself."""
        alone = self.layout.replace(**dict.fromkeys(self.rules.replicas, 1))
        return replace(self, batch=self.batch // self.replicas, layout=alone, local_sgd=None)

    def __str__(self) -> str:
        pages = f", keys and values in {self.cache_dtype}" if self.cache_dtype else ""
        return f"{self.kind}, {self.batch:,} × {self.sequence:,} tokens in {self.dtype}{pages}"

    @property
    def rules(self) -> Rules:
        """The sharding rules of the step."""
        return self.own_rules or RULES[self.kind]

    @property
    def batch_shards(self) -> int:
        """Shards of a batch that the layout divides."""
        return self.layout.over(self.rules.over("batch"))

    @property
    def tile_parts(self) -> int:
        """The devices of a shard of an engine that share out the rows of prompts."""
        return self.layout.over(self.rules.over("tiles"))

    @property
    def dtype(self) -> str:
        """The dtype of forward and backward pass."""
        return self.execution.dtype

    @property
    def remat(self) -> Remat:
        """The rematerialisation of a training step; inference has none."""
        return self.execution.remat if self.kind == "train" else "none"

    @cached_property
    def answers(self) -> dict[tuple, Any]:
        """The results of memoized methods, by method and arguments."""
        return {}

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The paths of the parameters that do not train; none in inference, where nothing does."""
        if self.kind != "train" or not (self.lora or self.optimizer.groups):
            return frozenset()
        return self.base | frozen(self.optimizer.groups, list(self.trainable))

    @property
    def parameters(self) -> dict[str, Dimensions]:
        """The dimensions of each parameter, by path."""
        return parameters.parameters(self.model, self.lora, self.quantized)

    @property
    def quantized(self) -> Quantization | None:
        """The form of the matrices of layers that do not train; None where they are in the dtype of the computation."""
        return self.execution.quantization if self.kind != "train" or self.lora else None

    @property
    def base(self) -> frozenset[str]:
        """The paths of the parameters that adapters leave untrained: such a parameter has one copy, in the dtype of the
        computation, and no optimizer state."""
        return frozenset() if self.lora is None else parameters.base(self.model, self.lora, self.quantized)

    @property
    def trainable(self) -> dict[str, Dimensions]:
        """The dimensions of the parameters of which a training run keeps a float32 copy, by path."""
        return {path: d for path, d in self.parameters.items() if path not in self.base}

    @property
    def trainable_numbers(self) -> int:
        """The number of elements of all `trainable` parameters together."""
        return sum(math.prod(d.shape) for d in self.trainable.values())

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the dtype of the computation."""
        return BYTES[self.dtype]

    def itemsize_of(self, parameter: Dimensions) -> int:
        """Return the bytes of a number of a parameter that does not train, as it is kept."""
        return self.itemsize if parameter.dtype is None else jnp.dtype(parameter.dtype).itemsize

    @property
    def target(self) -> tuple[str, str | None, bool, bool]:
        """The platform, JAX's name of its devices, and whether kernels run and are deterministic: as a door is told."""
        return self.platform, self.device_kind, self.runs_kernels, self.execution.deterministic

    @property
    def runs_kernels(self) -> bool:
        """True if kernels of kernels_pallas run; see `on`."""
        return self.execution.kernels != "xla"

    @property
    def remat_shown(self) -> str:
        """`remat` as a configuration has it: full, or ["query", "key"]."""
        return self.remat if isinstance(self.remat, str) else json.dumps(self.remat)

    def overrides(self) -> str:
        """`microbatches`, `remat`, and what else a search varies where it is not the default, as a shell takes them for
        a command."""
        rounds = f" execution.pipeline_rounds={self.rounds}" if self.rounds > 1 else ""
        once = " execution.pipeline_gather=step" if self.gathers_once else ""
        return (
            f"training.microbatches={self.microbatches} execution.remat={shlex.quote(self.remat_shown)}{rounds}{once}"
        )

    def on(self, chip: Chip) -> "Workload":
        """Return the workload on a chip, without kernels if none are compiled for that chip."""
        if chip.kind == "cpu":
            return self.on_cpu()
        kind = next(iter(chip.device_kinds), None)
        return self._with(platform=chip.kind, device_kind=kind) if chip.runs_kernels else self.without_kernels()

    def on_cpu(self) -> "Workload":
        """Return the workload on any CPU."""
        return self.without_kernels()._with(platform="cpu")

    def without_kernels(self) -> "Workload":
        """Return the workload in plain JAX, which computes all of attention's scores."""
        return self.with_execution(kernels="xla")._with(platform="gpu")

    def without_kernels_or_padding(self) -> "Workload":
        """Return the workload in plain JAX and without the engine's padding: each product with the model's sizes."""
        plain = self.without_kernels()
        return plain if self.kind == "train" else replace(plain, is_padded=False)

    @property
    def tokens(self) -> int:
        """Tokens that a step reads, over the whole job."""
        return self.batch * (1 if self.kind == "decode" else self.sequence)

    @property
    def queries(self) -> int:
        """Tokens of each sequence that a step reads."""
        return 1 if self.kind == "decode" else self.sequence

    @property
    def slots(self) -> int:
        """The sequences of each shard of an engine."""
        return -(-self.batch // self.batch_shards)

    @property
    def page_dtype(self) -> str:
        """The dtype of an engine's pages that are not of eight bits: float32 on a CPU, which would otherwise widen the
        pages in each step."""
        return "float32" if self.platform == "cpu" else self.dtype

    @property
    def shapes(self) -> StepShapes:
        """The shapes of the engine's steps."""
        return StepShapes(self.slots, self.chunk_tokens, FEWEST, parts=self.tile_parts)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows in which layers read earlier tokens, those of a draft model among them."""
        return tuple(dict.fromkeys(window for model in self.models for window in parameters.windows(model)))

    @memoized
    def by_step_shape(self) -> tuple["Workload", ...]:
        """Return a workload of inference restricted to each shape of the engine's steps in turn."""
        if self.engine_steps:
            return (self,)
        if not self.is_padded:
            reads = UnpaddedReads(self.slots, self.queries, self.sequence)
            return (replace(self, engine_steps=EngineSteps(StepShape(0, 0, 0), 1, 1, (reads,))),)
        of_kind = decode_steps if self.kind == "decode" else prefill_steps
        all_steps = of_kind(self.shapes, self.sequence, self.page, self.windows)
        return tuple(replace(self, engine_steps=steps) for steps in all_steps)

    def largest_step(self) -> "Workload":
        """Return a workload of inference restricted to one step of the engine: the last step with the most rows."""
        largest = largest_step(self.kind, self.shapes, self.sequence, self.page, self.windows)
        return replace(self, engine_steps=largest)

    @property
    def passes(self) -> int:
        """Forward passes that follow one another: microbatches, or the engine's steps of the one shape."""
        return self.microbatches if self.engine_steps is None else self.engine_steps.times

    @cached_property
    def stages(self) -> int:
        """The stages of a pipeline on which the layers lie; 1 without."""
        return self.layout.over(self.rules.over("layers"))

    @property
    def rounds(self) -> int:
        """The chunks of layers of each stage."""
        return self.execution.pipeline_rounds if self.stages > 1 else 1

    @cached_property
    def gathers_once(self) -> bool:
        """True if the matrices of layers are gathered once a step, before all ticks of a pipeline."""
        return self.stages > 1 and self.execution.pipeline_gather == "step"

    @property
    def expert_way(self) -> ExpertWay:
        """The way of tokens to the devices of their experts: all are gathered in inference, and where the mesh does not
        divide the rows of a microbatch, so that each device has all of them."""
        if self.kind != "train" or self.row_shards() == 1:
            return "gather"
        devices = self.layout.over(self.rules.over("experts"))
        return expert_parallel.way(self.execution.expert_parallel, self.model, devices)

    @cached_property
    def ticks(self) -> Ticks:
        """The schedule of the stages."""
        return Ticks(self.stages, self.microbatches, self.rounds)

    @property
    def stage_passes(self) -> int:
        """Forward passes of a stage, through one of its chunks each, that follow one another, idle ones among them
        where they are counted."""
        return self.ticks.passes if self.stages > 1 and self.counts_idle else self.rounds * self.passes

    @property
    def end_passes(self) -> int:
        """Forward passes through what is before the stages, idle ones among them where they are counted."""
        return self.ticks.at_ends if self.stages > 1 and self.counts_idle else self.passes

    @property
    def accumulates(self) -> bool:
        """True if gradients of several passes are added up in float32."""
        return self.microbatches > 1 or self.stages > 1

    @cached_property
    def stage_layers(self) -> StageLayers:
        """The layers of a chunk of a stage."""
        return stage_layers(self.model, self.stages, self.rounds)

    @memoized
    def rows(self) -> int:
        """Return the rows on one device at once: its sequences of a microbatch, or all sequences of the microbatch
        where the mesh does not divide their number; in inference the rows of an engine step, padding included if
        `is_padded`."""
        if self.kind == "train":
            return self.batch // self.microbatches // self.row_shards()
        if not self.is_padded:
            return self.slots * self.queries
        return self._steps_or_largest.shape.on_device(self.tile_parts).rows

    @memoized
    def draws(self) -> int:
        """Return the rows on one device after which a step of the engine draws tokens; none in training."""
        if self.kind == "train":
            return 0
        return self._steps_or_largest.shape.decode if self.is_padded else self.slots

    @property
    def sections(self) -> tuple[SectionReads | UnpaddedReads, ...]:
        """The sections of an engine step's rows, with what the rows of each section read."""
        sections = self._steps_or_largest.sections
        if self.run == 1:
            return sections
        decode, *tiles = sections
        return decode._replace(run=self.run) if isinstance(decode, SectionReads) else decode, *tiles

    @property
    def _steps_or_largest(self) -> EngineSteps:
        """The engine's steps of the one shape, or the largest step of a workload that is not restricted to a shape."""
        return self.engine_steps or self.largest_step().engine_steps

    @memoized
    def row_shards(self) -> int:
        """Return the shards of a microbatch; 1 where the mesh does not divide its rows. An engine pads its batch to
        equal shards."""
        shards = self.batch_shards
        if self.kind != "train":
            return shards
        return 1 if self.batch // self.microbatches % shards else shards

    def several(self, mesh_axes: Iterable[str]) -> tuple[str, ...]:
        """Return those mesh axes that have several devices, each once, outermost first."""
        among = set(mesh_axes)
        return tuple(axis for axis, size in self.layout.items() if size > 1 and axis in among)


@functools.lru_cache(maxsize=256)
def _changed(execution: ExecutionConfig, **changes: Any) -> ExecutionConfig:
    return execution.model_copy(update=changes)
