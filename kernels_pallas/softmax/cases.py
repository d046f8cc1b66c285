"""Test cases of softmax and log-softmax."""

import dataclasses
import functools

from kernels_pallas import log_softmax, softmax
from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.core.rows import IMPLEMENTATIONS, serves
from kernels_pallas.softmax import costs, log_costs, reference
from kernels_pallas.softmax.body import LogSoftmaxBody, SoftmaxBody

_ALL = ("bfloat16", "float16", "float32")


def _case(name: str, rows: tuple[int, ...], width: int, *, mask: bool = False, **more) -> KernelCase:
    x = {key: more.pop(key) for key in ("scale", "draw") if key in more}
    arrays = {"x": CaseArray((*rows, width), **x)}
    if mask:
        arrays["where"] = CaseArray((*rows, width), "bool", "mask")
    return KernelCase(name, arrays, **more)


CASES = (
    _case("plain", (4, 32), 256, dtypes=_ALL),
    _case("odd width, masked rows", (9, 5), 300, mask=True, options={"temperature": 0.7, "soft_cap": 2.0}),
    _case("wide, masked rows", (5,), 1024, mask=True, options={"soft_cap": 2.0}, dtypes=("bfloat16", "float32")),
    _case("one column", (6,), 1),
    _case("empty batch", (0, 5), 128),
    _case("large", (16,), 500, scale=1e4, dtypes=("bfloat16",)),
    _case("denormal", (16,), 512, scale=1e-39),
    _case("one hot", (16,), 512, draw="one_hot", scale=1e3),
    _case("small", (64,), 256, uses={"bench"}),
    _case("8192 × 4096", (8192,), 4096, uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("4096 × 32768", (4096,), 32768, uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("8192 × 4096, masked rows", (8192,), 4096, mask=True, uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("1000 × 5000, capped", (1000,), 5000, options={"soft_cap": 30.0}, uses={"compile"}),
    _case("1000 × 32768, masked", (1000,), 32768, mask=True, uses={"compile"}),
)

OPERATION = KernelOperation(
    softmax, reference.softmax, IMPLEMENTATIONS, CASES, costs, (), functools.partial(serves, SoftmaxBody)
)
# The kernels differ in one line: only one of them is compiled for every chip.
_LOG_CASES = tuple(
    case if case.name == "8192 × 4096" else dataclasses.replace(case, uses=case.uses - {"compile"}) for case in CASES
)
LOG_OPERATION = KernelOperation(
    log_softmax,
    reference.log_softmax,
    IMPLEMENTATIONS,
    _LOG_CASES,
    log_costs,
    (),
    functools.partial(serves, LogSoftmaxBody),
)
