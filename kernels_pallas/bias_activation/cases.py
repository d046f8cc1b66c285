"""Test cases of bias and activation."""

import functools

from kernels_pallas import bias_activation as function
from kernels_pallas.bias_activation import costs, reference
from kernels_pallas.bias_activation.body import BiasActivationBody
from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.core.rows import IMPLEMENTATIONS, serves

_ALL = ("bfloat16", "float16", "float32")


def _case(name: str, rows: tuple[int, ...], width: int, activation: str = "gelu", **more) -> KernelCase:
    arrays = {"x": CaseArray((*rows, width)), "bias": CaseArray((width,))}
    return KernelCase(name, arrays, {"activation": activation}, **more)


CASES = (
    _case("plain", (4, 32), 256, dtypes=_ALL),
    _case("odd width", (7, 5), 1300, "gelu_tanh"),
    _case("one row", (1,), 100, "silu"),
    _case("wide", (5,), 3072, dtypes=("bfloat16", "float32")),
    _case("empty batch", (0, 5), 128),
    _case("small", (64,), 512, uses={"bench"}),
    _case("16384 × 3072", (16384,), 3072, uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("16384 × 6400, by tanh", (16384,), 6400, "gelu_tanh", uses={"compile", "bench"}, dtypes=("bfloat16",)),
)

OPERATION = KernelOperation(
    function,
    reference.bias_activation,
    IMPLEMENTATIONS,
    CASES,
    costs,
    (),
    functools.partial(serves, BiasActivationBody),
)
