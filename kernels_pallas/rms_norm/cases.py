"""Test cases of RMSNorm."""

import functools

from kernels_pallas import rms_norm as function
from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.core.rows import IMPLEMENTATIONS, serves
from kernels_pallas.rms_norm import costs, reference
from kernels_pallas.rms_norm.body import RMSNormBody

_ALL = ("bfloat16", "float16", "float32")


def _case(name: str, rows: tuple[int, ...], width: int, *, residual: bool = False, **more) -> KernelCase:
    x = CaseArray((*rows, width), scale=more.pop("scale", 1.0), draw=more.pop("draw", "normal"))
    arrays = {"x": x, "scale": CaseArray((width,), scale=0.1, mean=1.0)}
    if residual:
        arrays["residual"] = CaseArray((*rows, width))
    return KernelCase(name, arrays, roundings=2 * residual, **more)


CASES = (
    _case("plain", (4, 32), 256, dtypes=_ALL),
    _case("odd width", (3, 7), 300, options={"plus_one": True}),
    _case("rows beyond a share", (2400,), 24),
    _case("one row", (1,), 128),
    _case("wide", (5,), 1024, options={"plus_one": True}, dtypes=("bfloat16", "float32")),
    _case("wide, residual", (5,), 1024, residual=True, dtypes=("bfloat16", "float32")),
    _case("empty batch", (0, 5), 128),
    _case("no leading dimension", (), 96),
    _case("residual", (5, 13), 200, residual=True, dtypes=_ALL),
    _case("large", (16,), 512, scale=1e4, dtypes=("bfloat16",)),
    _case("denormal", (16,), 512, scale=1e-39),
    _case("zeros", (16,), 512, draw="zeros"),
    _case("one hot", (16,), 512, draw="one_hot", scale=100.0),
    _case("head", (8192, 32), 128, uses={"compile"}, dtypes=("bfloat16",)),
    _case("small", (64,), 256, uses={"bench"}, dtypes=("float32",)),
    _case("8192 × 4096", (8192,), 4096, uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("16384 × 8192", (16384,), 8192, uses={"bench"}, dtypes=("bfloat16",)),
    _case("8192 × 4096 with residual", (8192,), 4096, residual=True, uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("1000 × 5000", (1000,), 5000, uses={"compile"}, dtypes=("float32",)),
)

OPERATION = KernelOperation(
    function, reference.rms_norm, IMPLEMENTATIONS, CASES, costs, (), functools.partial(serves, RMSNormBody)
)
