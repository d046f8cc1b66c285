"""What is to run, and how it lies on the mesh: all that counting needs to know. Imports no JAX."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from jaxlm.models.config import ModelConfig, Remat

if TYPE_CHECKING:
    from jaxlm.costs.chips import Chip

Kind = Literal["train", "prefill", "decode"]

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class MeshShape:
    """Devices along each mesh axis."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.tensor

    def axes(self) -> dict[str, int]:
        """In the order of `jaxlm.sharding.MESH_AXES`, outermost first."""
        return {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.axes().items() if size > 1) or "one device"


@dataclass(frozen=True)
class Workload:
    """One step of a kind, over the whole job.

    `train` is an optimizer step over `batch` rows of `sequence` tokens; `prefill` reads `batch` prompts of `sequence`
    tokens and gives the logits behind each; `decode` reads one token more of each of `batch` sequences that hold
    `sequence` tokens. `dtype` is that of forward and backward pass, and of the cache; in training, parameters,
    accumulated gradients and optimizer state are float32. `average` is an average of the parameters kept beside them. A
    training run has `steps` such steps.
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
    steps: int = 1
    mesh: MeshShape = MeshShape()

    @property
    def width_bytes(self) -> int:
        """Of a number in the dtype that it computes in."""
        return BYTES[self.dtype]

    @property
    def kernels(self) -> bool:
        """Whether kernels of kernels_pallas run: see `on`."""
        return self.model.kernels != "reference"

    def on(self, chip: "Chip") -> "Workload":
        """The same on a chip: without kernels where they are not compiled for it."""
        return self if chip.runs_kernels else self.without_kernels()

    def without_kernels(self) -> "Workload":
        """The same of plain JAX, as XLA compiles it."""
        model = self.model.model_copy(update={"kernels": "reference"})
        return replace(self, model=model) if self.kernels else self

    @property
    def tokens(self) -> int:
        """That a step reads, over the whole job."""
        return self.batch * (1 if self.kind == "decode" else self.sequence)

    @property
    def queries(self) -> int:
        """Tokens of each sequence that a step reads."""
        return 1 if self.kind == "decode" else self.sequence

    def rows(self) -> int:
        """Sequences on one device at once: its part of a microbatch, or all where the mesh does not divide them."""
        rows, parts = self.batch // self.microbatches, self.mesh.data * self.mesh.fsdp
        return rows // parts if rows % parts == 0 else rows

    def local(self, axis: str, size: int) -> int:
        """How much of a dimension with this logical axis one device computes with: what `tensor` leaves of it (parts
        along `fsdp` are gathered first)."""
        from jaxlm.sharding import TABLE, WHOLE_IF_UNEVEN

        parts = self.mesh.tensor if TABLE[axis] == "tensor" else 1
        if size % parts and axis in WHOLE_IF_UNEVEN:
            return size
        return math.ceil(size / parts)

    def stored(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> int:
        """Numbers of a parameter that lie on one device."""
        from jaxlm.sharding import TABLE

        sizes = (
            math.ceil(size / self.mesh.fsdp) if TABLE[axis] == "fsdp" else self.local(axis, size)
            for axis, size in zip(axes, shape, strict=True)
        )
        return math.prod(sizes)
