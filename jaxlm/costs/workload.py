"""The step that is counted, and its mesh: all that counting needs to know."""

import functools
import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from jaxlm.config import Experiment
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.step.parameters import parameters
from jaxlm.models.config import ModelConfig, Remat
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import RULES, Kind, Rules
from jaxlm.training.config import AdamWConfig, ConstantScheduleConfig, OptimizerConfig, TrainingConfig
from jaxlm.training.groups import frozen
from kernels_pallas.flash_attention import causal_chunks

BYTES = {"float32": 4, "bfloat16": 2}


def _remembered(method: Callable) -> Callable:
    """Make a method of a workload answer each question once: a search asks the same ones again and again."""
    name = method.__name__

    @functools.wraps(method)
    def answer(self: "Workload", *question: Any) -> Any:
        key = name, *question
        if key not in self._answers:
            self._answers[key] = method(self, *question)
        return self._answers[key]

    return answer


@dataclass(frozen=True)
class Workload:
    """One step of a kind, over the whole job, as the sections of an experiment describe it.

    `train` is an optimizer step over `training.batch` rows of `training.sequence` tokens; `prefill` reads `batch`
    prompts of `sequence` tokens and gives the logits behind each; `decode` reads one token more of each of `batch`
    sequences that hold `sequence` tokens. `training.dtype` is that of forward and backward pass, and of the cache; in
    training, parameters, accumulated gradients and optimizer state are float32. `platform` is that of the chip, which
    decides what kernels run; on a CPU training computes attention in chunks
    (`kernels_pallas.flash_attention.causal_chunks`).
    """

    kind: Kind
    model: ModelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig = AdamWConfig(schedule=ConstantScheduleConfig())
    layout: Layout = Layout()
    platform: Literal["gpu", "tpu", "cpu"] = "gpu"

    @classmethod
    def of(cls, experiment: Experiment, layout: Layout = Layout(), kind: Kind = "train") -> "Workload":
        """Return the step of an experiment on a mesh of this layout. Raises InputError where a pattern of
        `optimizer.groups` decides nothing of a training step."""
        model, optimizer = experiment.model, experiment.optimizer
        if kind == "train":
            frozen(optimizer.groups, list(parameters(model)))  # refuses patterns before anything is counted
        return cls(kind, model, experiment.training, optimizer, layout)

    def with_training(self, **changes: Any) -> "Workload":
        """The same with other values in its section [training]."""
        return replace(self, training=self.training.model_copy(update=changes))

    def __str__(self) -> str:
        return f"{self.kind}, {self.batch:,} × {self.sequence:,} tokens in {self.dtype}"

    @property
    def rules(self) -> Rules:
        """The sharding rules of this kind of step."""
        return RULES[self.kind]

    @property
    def batch_shards(self) -> int:
        """Shards of a batch that the layout divides."""
        return self.layout.over(self.rules.over("batch"))

    @property
    def batch(self) -> int:
        """Sequences of a step, over the whole job."""
        return self.training.batch

    @property
    def sequence(self) -> int:
        """Tokens of each sequence; in decoding, that its cache holds."""
        return self.training.sequence

    @property
    def dtype(self) -> str:
        """The dtype that it computes in."""
        return self.training.dtype

    @property
    def remat(self) -> Remat:
        """The rematerialisation of a training step; inference has none."""
        return self.training.remat if self.kind == "train" else "none"

    @property
    def microbatches(self) -> int:
        """The parts of a batch that follow one another; inference has one."""
        return self.training.microbatches if self.kind == "train" else 1

    @property
    def steps(self) -> int:
        """Steps of a training run; one of inference."""
        return self.training.steps if self.kind == "train" else 1

    @property
    def dropout(self) -> bool:
        """Return whether numbers are dropped."""
        return self.kind == "train" and self.training.dropout > 0

    @property
    def average(self) -> bool:
        """Return whether an average of the parameters is kept with them."""
        return self.kind == "train" and self.training.ema_decay is not None

    @cached_property
    def _answers(self) -> dict[tuple, Any]:
        return {}

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The paths of the parameters that do not train; none in inference, where nothing does."""
        if self.kind != "train" or not self.optimizer.groups:
            return frozenset()
        return frozen(self.optimizer.groups, list(parameters(self.model)))

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the dtype of the computation."""
        return BYTES[self.dtype]

    @property
    def runs_kernels(self) -> bool:
        """True if kernels of kernels_pallas run; see `on`."""
        return self.training.kernels != "xla"

    @property
    def remat_shown(self) -> str:
        """`remat` as a configuration has it: full, or ["query", "key"]."""
        return self.remat if isinstance(self.remat, str) else json.dumps(self.remat)

    def overrides(self) -> str:
        """`microbatches` and `remat` as a shell takes them, to be given to a command."""
        return f"training.microbatches={self.microbatches} training.remat={shlex.quote(self.remat_shown)}"

    def on(self, chip: Chip) -> "Workload":
        """The same on a chip: without kernels where they are not compiled for it."""
        if chip.kind == "cpu":
            return self.on_cpu()
        return replace(self, platform=chip.kind) if chip.runs_kernels else self.plain()

    def on_cpu(self) -> "Workload":
        """The same on any CPU."""
        return replace(self.plain(), platform="cpu")

    def plain(self) -> "Workload":
        """The same of plain JAX, with all of attention's scores: each product as the model has it."""
        return replace(self.with_training(kernels="xla"), platform="gpu")

    @property
    def tokens(self) -> int:
        """Tokens that a step reads, over the whole job."""
        return self.batch * (1 if self.kind == "decode" else self.sequence)

    @property
    def queries(self) -> int:
        """Tokens of each sequence that a step reads."""
        return 1 if self.kind == "decode" else self.sequence

    @property
    def cached(self) -> list[int]:
        """Tokens of each sequence that the cache of each layer holds: all, or the last of its window."""
        return [min(block.window or self.sequence, self.sequence) for block in self.model.layers]

    @property
    def keys(self) -> int:
        """Tokens of each sequence with which a step computes scores; in decoding, the most that a cache holds."""
        return max(self.cached) if self.kind == "decode" else self.sequence

    def attended(self, keys: int | None = None) -> list[tuple[int, int]]:
        """Queries and keys of each sequence between which a layer with these keys computes scores, part by part."""
        if self.platform == "cpu" and self.kind == "train":
            return [(end - first, end) for first, end in causal_chunks.bounds(self.sequence)]
        return [(self.queries, self.keys if keys is None else keys)]

    def scores(self, keys: int | None = None) -> int:
        """Return the number of scores of each sequence and head in `attended`."""
        return sum(queries * keys for queries, keys in self.attended(keys))

    def seen(self, causally: bool) -> Fraction:
        """The share of attention's scores, of all queries and keys in all layers, that windows leave, and where
        `causally` what is not behind the query: half of them without a window. A decoded token sees its whole window.
        """
        S, sizes = self.sequence, self.cached
        if self.kind == "decode":
            return Fraction(1)
        if causally:
            shares = [Fraction(1, 2) if size == S else Fraction(size * (2 * S - size), 2 * S * S) for size in sizes]
        else:
            shares = [Fraction(size, S) for size in sizes]
        return sum(shares, Fraction(0)) / len(sizes)

    @property
    def replicated_kv_heads(self) -> bool:
        """True if the tensor axis does not divide the key/value heads: several devices compute the same ones."""
        return self.model.attention.num_kv_heads % self.head_shards != 0

    @property
    def head_shards(self) -> int:
        """Devices among which the query heads are sharded."""
        return self.parts("tensor", "act_heads", self.model.attention.num_heads)

    @_remembered
    def rows(self) -> int:
        """Return the sequences on one device at once: its part of a microbatch, or all where the mesh does not divide
        them."""
        rows, parts = self.batch // self.microbatches, self.batch_shards
        return rows // parts if rows % parts == 0 else rows

    def head_groups(self) -> tuple[int, int]:
        """Key/value heads that attention reads on one device, and the query heads there that share each."""
        attention, parts = self.model.attention, self.head_shards
        read = attention.kv_heads_over(parts)
        return read // parts, attention.num_heads // read

    @_remembered
    def local(self, axis: str, size: int) -> int:
        """Return the size of a dimension with this logical axis on one device as it computes: sharded over `tensor`
        alone (shards over `fsdp` are gathered first), key/value heads with their copies."""
        if axis in ("kv_heads", "act_kv_heads"):
            size = self.model.attention.kv_heads_over(self.head_shards)
        return math.ceil(size / self.parts("tensor", axis, size))

    def shape(self, axes: Sequence[str | None], shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of an array with these logical axes on one device, where this one is of a single row."""
        local = (size if axis is None else self.local(axis, size) for axis, size in zip(axes, shape, strict=True))
        return tuple(self.rows() if axis == "batch" else size for axis, size in zip(axes, local, strict=True))

    @_remembered
    def stored(self, axes: Sequence[str], shape: Sequence[int]) -> int:
        """Numbers of a parameter that lie on one device."""
        return math.prod(
            math.ceil(size / (self.parts("fsdp", axis, size) * self.parts("tensor", axis, size)))
            for axis, size in zip(axes, shape, strict=True)
        )

    def parts(self, over: str, axis: str, size: int) -> int:
        """Return the number of shards that a mesh axis makes of a dimension with this logical axis, uneven ones too."""
        if self.rules.over(axis) != (over,):
            return 1
        shards = self.layout[over]
        return 1 if size % shards and axis in self.rules.may_stay_whole else shards
