"""The mask of rows that are one document each, which is known while tracing."""

import dataclasses
from typing import Any

import jax

from jaxlm.parallel.columns import columns_around
from kernels_pallas.flash_attention import KeyRange


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OneDocumentMask:
    """The causal mask of rows of `length` tokens that are one document each: no array, so that it stays known through
    `jit`, loops and rematerialisation. Intervals are numpy arrays [1, T].

    Of a sequence that devices share they are of columns (`jaxlm.parallel.columns`).

    Tokens of padding behind the document see it; no token of a document sees padding.
    """

    length: int

    @property
    def start(self) -> Any:
        """The first key of each token."""
        return columns_around(self.length)[None] * 0

    @property
    def end(self) -> Any:
        """The key after the last of each token."""
        return columns_around(self.length)[None] + 1


Mask = KeyRange | OneDocumentMask
