"""Test cases of LayerNorm."""

import functools

from kernels_pallas import layer_norm as function
from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.core.rows import IMPLEMENTATIONS, serves
from kernels_pallas.layer_norm import costs, reference
from kernels_pallas.layer_norm.body import LayerNormBody

_ALL = ("bfloat16", "float16", "float32")


def _case(
    name: str, rows: tuple[int, ...], width: int, *, bias: bool = True, residual: bool = False, **more
) -> KernelCase:
    x = {key: more.pop(key) for key in ("scale", "mean", "draw") if key in more}
    arrays = {"x": CaseArray((*rows, width), **x), "scale": CaseArray((width,), scale=0.1, mean=1.0)}
    if bias:
        arrays["bias"] = CaseArray((width,), scale=0.1)
    if residual:
        arrays["residual"] = CaseArray((*rows, width))
    return KernelCase(name, arrays, roundings=2 * residual, **more)


CASES = (
    _case("plain", (4, 32), 256, dtypes=_ALL),
    _case("odd width, no bias", (3, 7), 300, bias=False, options={"plus_one": True}),
    _case("one row", (1,), 100),
    _case("wide", (5,), 1024, dtypes=("bfloat16", "float32")),
    _case("empty batch", (0, 5), 128),
    _case("residual", (5, 13), 200, residual=True, dtypes=_ALL),
    _case("far from zero", (16,), 500, mean=30.0),
    _case("zeros", (16,), 512, draw="zeros"),
    _case("one hot", (16,), 512, draw="one_hot", scale=100.0),
    _case("small", (64,), 256, uses={"bench"}),
    _case("8192 × 4096", (8192,), 4096, uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("16384 × 8192", (16384,), 8192, uses={"bench"}, dtypes=("bfloat16",)),
    _case("8192 × 1600 with residual", (8192,), 1600, residual=True, uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("8192 × 4096 with residual", (8192,), 4096, residual=True, uses={"bench"}, dtypes=("bfloat16",)),
)

OPERATION = KernelOperation(
    function, reference.layer_norm, IMPLEMENTATIONS, CASES, costs, (), functools.partial(serves, LayerNormBody)
)
