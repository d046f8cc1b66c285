"""The width in which matrices of layers are kept. Imports no JAX."""

from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

QuantizeKind = Literal["int8", "w8a8", "int4", "fp8", "mxfp4"]
GROUPS = (32, 64, 128)  # the inputs that may share a scale
_ONLY = {"mxfp4": 32}  # kinds with one size of group


class Quantization(NamedTuple):
    """The form of matrices that are rounded to few bits, each number times a scale.

    Attributes:
      kind: of the numbers: "int8", "int4", "fp8" (float8_e4m3fn) or "mxfp4" (E2M1, with powers of two as scales).
        "w8a8" are those of "int8", also of the unembedding; products with them round each row of activations to int8
        too.
      group: the most inputs that share a scale of an output; 0 is all. Of "mxfp4" it is 32, whatever this says.
      targets: patterns of the paths of matrices that are quantised.
    """

    kind: QuantizeKind
    group: int = 0
    targets: tuple[str, ...] = ("*",)

    def group_of(self, inputs: int) -> int | None:
        """Return how many of a matrix's inputs share a scale, or None for a matrix that has no such groups."""
        if (only := _ONLY.get(self.kind)) is not None:
            return only if inputs % only == 0 else None
        if self.group == 0:
            return inputs if self.kind != "int4" or inputs % 2 == 0 else None
        return next((size for size in sorted(GROUPS, reverse=True) if size <= self.group and inputs % size == 0), None)

    @property
    def of_unembedding(self) -> bool:
        """True if the unembedding is kept so too; an embedding that is tied to it stays as it is, to look rows up."""
        return self.kind == "w8a8" and any(fnmatchcase("unembedding", pattern) for pattern in self.targets)

    def by_outputs(self, platform: str | None) -> bool:
        """Return whether a product reads the matrix as [out, in]: on a CPU, where a row's bits then do not depend on
        the number of rows, and of "w8a8" on a GPU, whose products of integers read both operands along the inputs."""
        return platform == "cpu" or (platform == "gpu" and self.kind == "w8a8")

    def __str__(self) -> str:
        groups = f" in groups of {self.group}" if self.group else ""
        return f"{self.kind}{groups}" + ("" if self.targets == ("*",) else f" of {', '.join(self.targets)}")
