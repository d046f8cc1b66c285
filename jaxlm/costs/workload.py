"""What is to run, and how it lies on the mesh: all that counting needs to know. Imports no JAX."""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from jaxlm.models import causal
from jaxlm.models.config import Kernels, ModelConfig, Remat
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import RULES, Kind, Rules

if TYPE_CHECKING:
    from jaxlm.costs.hardware.chips import Chip


BYTES = {"float32": 4, "bfloat16": 2}


def divided_by_mesh(model: ModelConfig) -> list[tuple[str, str, int]]:
    """What the axes of a mesh must divide of a model: axis, key in a configuration, size."""
    return [
        ("tensor", "model.attention.num_heads", model.attention.num_heads),
        ("tensor", "model.feed_forward.d_ff", model.feed_forward.d_ff),
        ("tensor", "model.vocab_size", model.vocab_size),
        ("fsdp", "model.d_model", model.d_model),
    ]


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


@dataclass(frozen=True)
class Workload:
    """One step of a kind, over the whole job.

    `train` is an optimizer step over `batch` rows of `sequence` tokens; `prefill` reads `batch` prompts of `sequence`
    tokens and gives the logits behind each; `decode` reads one token more of each of `batch` sequences that hold
    `sequence` tokens. `dtype` is that of forward and backward pass, and of the cache; in training, parameters,
    accumulated gradients and optimizer state are float32. `average` is an average of the parameters kept beside them,
    and `frozen` are the paths of those that do not train; `dropout` says whether there is any. A training run has
    `steps` such steps. `causal_parts`: training computes attention in parts (`jaxlm.models.causal`), as a CPU does.
    """

    kind: Kind
    model: ModelConfig
    batch: int
    sequence: int
    dtype: str = "bfloat16"
    remat: Remat = "none"
    microbatches: int = 1
    optimizer: str = "adamw"
    muon_iterations: int = 5
    average: bool = False
    frozen: frozenset[str] = frozenset()
    dropout: bool = False
    steps: int = 1
    layout: Layout = Layout()
    causal_parts: bool = False
    kernels: Kernels = "auto"

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
    def itemsize(self) -> int:
        """Of a number in the dtype that it computes in."""
        return BYTES[self.dtype]

    @property
    def runs_kernels(self) -> bool:
        """Whether kernels of kernels_pallas run: see `on`."""
        return self.kernels != "xla"

    @property
    def remat_shown(self) -> str:
        """`remat` as a configuration has it: full, or ["query", "key"]."""
        return self.remat if isinstance(self.remat, str) else json.dumps(self.remat)

    def overrides(self) -> str:
        """`microbatches` and `remat` as a shell takes them, to be given to a command."""
        return f"training.microbatches={self.microbatches} training.remat={shlex.quote(self.remat_shown)}"

    def on(self, chip: "Chip") -> "Workload":
        """The same on a chip: without kernels where they are not compiled for it."""
        if chip.kind == "cpu":
            return self.on_cpu()
        return self if chip.runs_kernels else self.plain()

    def on_cpu(self) -> "Workload":
        """The same on any CPU."""
        return replace(self.plain(), causal_parts=True)

    def plain(self) -> "Workload":
        """The same of plain JAX, with all of attention's scores: each product as the model has it."""
        return replace(self, kernels="xla", causal_parts=False)

    @property
    def tokens(self) -> int:
        """That a step reads, over the whole job."""
        return self.batch * (1 if self.kind == "decode" else self.sequence)

    @property
    def queries(self) -> int:
        """Tokens of each sequence that a step reads."""
        return 1 if self.kind == "decode" else self.sequence

    def attended(self) -> list[tuple[int, int]]:
        """Queries and keys of each sequence between which attention computes scores, part by part."""
        if self.causal_parts and self.kind == "train":
            return [(end - first, end) for first, end in causal.parts(self.sequence)]
        return [(self.queries, self.sequence)]

    def scores(self) -> int:
        """How many scores of each sequence and head those are."""
        return sum(queries * keys for queries, keys in self.attended())

    def seen(self, causally: bool) -> Fraction:
        """The share of attention's scores, of all queries and keys in all layers, that windows leave, and where
        `causally` what is not behind the query: half of them without a window. A decoded token sees its whole window.
        """
        S, layers, through = self.sequence, self.model.num_layers, self.model.windowed_layers
        window = self.model.attention.window
        size = min(window.size, S) if window else S
        if causally and self.kind != "decode":
            whole, narrow = Fraction(1, 2), Fraction(size * (2 * S - size), 2 * S * S)
        else:
            whole, narrow = Fraction(1), Fraction(size, S)
        return ((layers - through) * whole + through * narrow) / layers

    @property
    def replicated_kv_heads(self) -> bool:
        """Whether the tensor axis does not divide the key/value heads, so that several devices compute the same."""
        return self.model.attention.num_kv_heads % self.head_shards != 0

    @property
    def head_shards(self) -> int:
        """Devices among which the query heads are sharded."""
        return self.parts("tensor", "act_heads", self.model.attention.num_heads)

    def rows(self) -> int:
        """Sequences on one device at once: its part of a microbatch, or all where the mesh does not divide them."""
        rows, parts = self.batch // self.microbatches, self.batch_shards
        return rows // parts if rows % parts == 0 else rows

    def head_groups(self) -> tuple[int, int]:
        """Key/value heads that attention reads on one device, and the query heads there that share each."""
        attention, parts = self.model.attention, self.head_shards
        read = attention.kv_heads_over(parts)
        return read // parts, attention.num_heads // read

    def local(self, axis: str, size: int) -> int:
        """How much of a dimension with this logical axis one device computes with: what `tensor` leaves of it (parts
        along `fsdp` are gathered first), of key/value heads with their copies."""
        if axis in ("kv_heads", "act_kv_heads"):
            size = self.model.attention.kv_heads_over(self.head_shards)
        return math.ceil(size / self.parts("tensor", axis, size))

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
