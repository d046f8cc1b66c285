"""FLOPs of matrix products, from a program's text: XLA's own `cost_analysis` counts a loop once on some platforms and
says nothing on others."""

import math
import re

import numpy as np

from jaxlm.lowering.hlo import Computation, Instruction, Program

_CUBLAS = re.compile(r"__cublas|__cudnn\$gemm")


def program_flops(program: Program) -> int:
    """Of all products of one device's program, each as often as it runs."""
    return sum(
        program.times[computation.name] * product_flops(computation, instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
    )


def product_flops(computation: Computation, instruction: Instruction) -> int:
    """2 · batch · rows · columns · contracted of a product; 0 of anything else."""
    if instruction.opcode == "dot":
        left = computation.operands(instruction)[0].arrays[0].shape
        contracted = instruction.dimensions("lhs_contracting_dims")
        return 2 * instruction.arrays[0].numbers * math.prod(left[axis] for axis in contracted)
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if instruction.opcode == "custom-call" and _CUBLAS.search(instruction.attribute("custom_call_target") or ""):
        return _library_product(computation, instruction)
    return 0


def _library_product(computation: Computation, instruction: Instruction) -> int:
    settings = instruction.backend_config.get("gemm_backend_config", instruction.backend_config)
    contracted = settings.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", ())
    left = computation.operands(instruction)[0].arrays[0].shape
    return 2 * instruction.arrays[0].numbers * math.prod(left[int(axis)] for axis in contracted)


def _convolution(computation: Computation, instruction: Instruction) -> int:
    """2 · batch · features out · features in · the places where a window's entry meets a number that is there.

    TPU programs write products as convolutions; batch dimensions become a window that meets each entry once, among
    zeros that are dilated or padded in.
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


def _window(instruction: Instruction) -> dict[str, list[int]]:
    """What `window={size=8x4 stride=7x3 pad=3_3x0_0 lhs_dilate=8x4}` says, per axis; of a padding its low end."""
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
    """How many pairs (place in the output, entry of the window) meet a number of the left side, along one axis."""
    places = np.arange(output)[:, None] * stride + np.arange(window)[None] * dilate_right - pad
    return int(np.sum((places >= 0) & (places % dilate_left == 0) & (places < left * dilate_left)))
