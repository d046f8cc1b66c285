"""The adapters that one engine serves beside one base. Imports no JAX."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterSet:
    """The sizes of several adapters of one base.

    Attributes:
      ranks: of each adapter, the greatest of its matrices.
      targets: the paths of the matrices that any of them adapts, such as "layers/attention/query".
    """

    ranks: tuple[int, ...]
    targets: tuple[str, ...]

    @property
    def owners(self) -> tuple[int, ...]:
        """The adapter of each column of x·A, where the adapters lie side by side: the first adapter is 1."""
        return tuple(adapter for adapter, rank in enumerate(self.ranks, 1) for _ in range(rank))
