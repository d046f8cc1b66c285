"""FLOPs of a matrix product, read from a compiled program's text.

XLA's own `cost_analysis` counts a loop once on some platforms and returns nothing on others.
"""

import math
import re

import numpy as np

from jaxlm.lowering.hlo import HloComputation, HloInstruction

_CUBLAS = re.compile(r"__cublas|__cudnn\$gemm")


def instruction_flops(computation: HloComputation, instruction: HloInstruction) -> int:
    """Return 2 · batch · rows · columns · contracted for a matrix product, 0 for any other instruction."""
    if instruction.opcode == "dot":
        left = computation.operands(instruction)[0].arrays[0].shape
        contracted = instruction.dimensions("lhs_contracting_dims")
        return 2 * instruction.arrays[0].elements * math.prod(left[axis] for axis in contracted)
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if instruction.opcode == "custom-call" and _CUBLAS.search(instruction.attribute("custom_call_target") or ""):
        return _library_product(computation, instruction)
    if instruction.op_name.endswith("/dot_general"):
        return _with_vector(computation, instruction)
    return 0


def _with_vector(computation: HloComputation, instruction: HloInstruction) -> int:
    """Return the FLOPs of a product with a vector, such as attention of one query per key head, which XLA writes as
    multiply and reduce. For a TPU the product's name is the second's alone."""
    if instruction.opcode == "reduce":
        instruction = computation.operands(instruction)[0]
        if instruction.op_name.endswith("/dot_general"):
            return 0
    if instruction.opcode != "multiply":
        return 0
    made = instruction.arrays[0]  # integers are indices of a TPU's windows
    return 2 * made.elements if made.dtype.startswith(("f", "bf")) else 0


def _library_product(computation: HloComputation, instruction: HloInstruction) -> int:
    settings = instruction.backend_config.get("gemm_backend_config", instruction.backend_config)
    contracted = settings.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", ())
    left = computation.operands(instruction)[0].arrays[0].shape
    return 2 * instruction.arrays[0].elements * math.prod(left[int(axis)] for axis in contracted)


def _convolution(computation: HloComputation, instruction: HloInstruction) -> int:
    """Return 2 · batch · output features · input features · window positions that meet an element, not padding.

    TPU programs write matrix products as convolutions. A batch dimension becomes a window that meets each element once,
    among zeros from dilation and padding.
    """
    left, right = (operand.arrays[0].shape for operand in computation.operands(instruction)[:2])
    labels = instruction.attribute("dim_labels")
    of_left, rest = labels.split("_")
    of_right, of_output = rest.split("->")
    output = instruction.arrays[0].shape
    window = _window(instruction)
    met = 1
    for axis in (label for label in of_output if label.isdigit()):
        sizes = left[of_left.index(axis)], right[of_right.index(axis)], output[of_output.index(axis)]
        met *= _meetings(*sizes, *(window[key][int(axis)] for key in ("stride", "pad", "lhs_dilate", "rhs_dilate")))
    around = output[of_output.index("b")] * output[of_output.index("f")] * right[of_right.index("i")]
    return 2 * around * met


def _window(instruction: HloInstruction) -> dict[str, list[int]]:
    """Parse `window={size=8x4 stride=7x3 pad=3_3x0_0 lhs_dilate=8x4}` per axis; `pad` is the low padding."""
    text = instruction.attribute("window") or ""
    given = dict(re.findall(r"(\w+)=([\dx_-]+)", text))
    axes = len(given.get("size", "").split("x")) if given else 0

    def numbers(key: str, default: int) -> list[int]:
        return [int(part.split("_")[0]) for part in given[key].split("x")] if key in given else [default] * axes

    return {
        "stride": numbers("stride", 1),
        "pad": numbers("pad", 0),
        "lhs_dilate": numbers("lhs_dilate", 1),
        "rhs_dilate": numbers("rhs_dilate", 1),
    }


def _meetings(left: int, window: int, output: int, stride: int, pad: int, dilate_left: int, dilate_right: int) -> int:
    """Count the pairs (output position, window entry) that meet an element of the left side, along one axis."""
    positions = np.arange(output)[:, None] * stride + np.arange(window)[None] * dilate_right - pad
    return int(np.sum((positions >= 0) & (positions % dilate_left == 0) & (positions < left * dilate_left)))
