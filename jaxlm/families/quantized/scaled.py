"""Tensors of numbers of few bits, each times a scale."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxlm.families.safetensors import LazyTensor, StoredTensor
from jaxlm.models.quantize_config import GROUPS, Quantization, QuantizeKind

_EXPONENT_BIAS = 127  # of E8M0, an exponent of two in a byte


@dataclass(frozen=True)
class ScaledTensor(LazyTensor):
    """A matrix, or one of each expert, that quantised ones can be made of without rounding a number.

    Attributes:
      kind: of the numbers.
      group: inputs beside one another that share a scale; 0 is all.
      parts: makes numbers, in int8 or float8_e4m3fn, and scales, both in the tensor's shape; of "mxfp4" the codes of
        E2M1 and of E8M0, in uint8.
    """

    kind: QuantizeKind
    group: int
    parts: Callable[[], tuple[np.ndarray, np.ndarray]]

    def fits(self, form: Quantization, inputs: int) -> bool:
        """Return whether a matrix of so many inputs in this form has these numbers and scales."""
        group = form.group_of(inputs)
        kind = "int8" if form.kind == "w8a8" else form.kind
        return kind == self.kind and group is not None and (self.group or inputs) % group == 0


def kept_group(group: int) -> int | None:
    """Return the size of groups in which scales of groups of another size can be kept; 0 is all inputs, and None that
    there is none."""
    return 0 if group == 0 else next((size for size in sorted(GROUPS, reverse=True) if group % size == 0), None)


def scales_of(scales: StoredTensor) -> np.ndarray:
    """Return scales in float32; scales stored as bytes are exponents of two."""
    numbers = scales.read()
    if scales.dtype_name == "U8":
        return np.ldexp(np.float32(1), numbers.astype(np.int32) - _EXPONENT_BIAS)
    return numbers.astype(np.float32)
