"""Quantised matrices of test cases."""

from kernels_pallas.core.cases import CaseArray, KernelCase
from kernels_pallas.core.quantized import serving
from kernels_pallas.core.quantized.formats import KINDS

# Standard deviations of numbers whose bytes are all equally likely.
_SPREAD = {"int8": 74.0, "w8a8": 74.0, "int4": 4.6, "fp8": 130.0, "mxfp4": 2.7}


def parts(
    kind: str,
    k: int,
    n: int,
    groups: tuple[int, int | None],
    *,
    by_outputs: bool = False,
    stack: tuple[int, ...] = (),
) -> dict[str, CaseArray]:
    """Return the arguments `values` and `scales` of matrices [*stack, k, n] whose products have about unit scale.

    groups: of inputs, and of outputs; None is one for each output.
    """
    known, unit = KINDS[kind], k**-0.5 / _SPREAD[kind]
    values, scales = (k // 2 if known.packed else k, n), (groups[0], n if groups[1] is None else groups[1])
    if by_outputs:
        values, scales = values[::-1], scales[::-1]
    drawn = {"dtype": "uint8", "draw": "below", "scale": 3, "mean": 120}
    if known.scale_dtype != "uint8":
        drawn = {"dtype": "float32", "scale": 0.2 * unit, "mean": unit}
    return {
        "values": CaseArray((*stack, *values), known.dtype, "bytes"),
        "scales": CaseArray((*stack, *scales), **drawn),
    }


def serves(implementation: str, case: KernelCase) -> bool:
    """Return whether a kernel supports a case."""
    stored, groups = (case.arrays[name].shape[-2] for name in ("values", "scales"))
    return serving.unsupported_reason(implementation, **case.options, stored=stored, groups=groups) is None
