"""Parts that the formats of quantized tensors share."""

import numpy as np

from jaxlm.families.safetensors import StoredTensor

_EXPONENT_BIAS = 127  # of E8M0, an exponent of two in a byte


def scales_of(scales: StoredTensor) -> np.ndarray:
    """Return scales in float32; scales stored as bytes are exponents of two."""
    numbers = scales.read()
    if scales.dtype_name == "U8":
        return np.ldexp(np.float32(1), numbers.astype(np.int32) - _EXPONENT_BIAS)
    return numbers.astype(np.float32)
