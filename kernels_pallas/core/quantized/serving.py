"""The calls that kernels serve."""

from kernels_pallas.core.quantized import mosaic_tpu
from kernels_pallas.core.quantized.formats import KINDS


def unsupported_reason(name: str, kind: str, by_outputs: bool, stored: int, groups: int) -> str | None:
    """Return why the kernel of a name cannot serve a matrix with so many rows of values and groups of inputs, or
    None."""
    if KINDS[kind].rounds_rows:
        return "it does not round x"
    if by_outputs:
        return "it reads matrices by their inputs"
    return mosaic_tpu.unsupported_reason(kind, stored, groups) if name == "mosaic_tpu" else None
