"""Test cases of gated activations."""

import functools

from kernels_pallas import gated_activation as function
from kernels_pallas.core.activations import REFERENCE
from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.core.rows import IMPLEMENTATIONS, serves
from kernels_pallas.gated_activation import costs, reference
from kernels_pallas.gated_activation.body import GatedActivationBody

_ALL = ("bfloat16", "float16", "float32")


def _case(
    name: str, rows: tuple[int, ...], width: int, activation: str = "silu", scale: float = 1.0, **more
) -> KernelCase:
    arrays = {"gate": CaseArray((*rows, width), scale=scale), "up": CaseArray((*rows, width))}
    return KernelCase(name, arrays, {"activation": activation}, **more)


CASES = (
    _case("plain", (4, 32), 256, dtypes=_ALL),
    *(_case(f"odd width, {name}", (7, 5), 300, name, scale=3.0) for name in REFERENCE if name != "silu"),
    _case("several blocks", (33,), 2100, "relu_squared"),
    _case("wider than a row may be", (2,), 33_000),
    _case("one number", (1,), 1),
    _case("wide", (5,), 1536, "gelu_tanh", scale=3.0, dtypes=("bfloat16", "float32")),
    _case("empty batch", (0, 5), 128),
    _case("large", (16,), 500, "gelu", scale=1e3, dtypes=("bfloat16",)),
    _case("small", (64,), 512, uses={"bench"}),
    _case("8192 × 14336, SwiGLU", (8192,), 14336, uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("8192 × 14336, GeGLU", (8192,), 14336, "gelu", uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("8192 × 14336, GeGLU by tanh", (8192,), 14336, "gelu_tanh", uses={"bench"}, dtypes=("bfloat16",)),
    _case("1000 × 5000, ReLU²", (1000,), 5000, "relu_squared", uses={"compile"}),
)

OPERATION = KernelOperation(
    function,
    reference.gated_activation,
    IMPLEMENTATIONS,
    CASES,
    costs,
    ("xla",),
    functools.partial(serves, GatedActivationBody),
)
