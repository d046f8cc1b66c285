"""Test cases of the matrix product."""

from kernels_pallas import matmul as function
from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.matmul import IMPLEMENTATIONS, costs, reference

_ALL = ("bfloat16", "float16", "float32")


def _case(name, rows, k, n, activation=None, *, bias=False, residual=False, **more) -> KernelCase:
    """Return a case whose products have unit scale, as in a model. With an activation the saved sum and its gradient
    are rounded.
    """
    arrays = {"a": CaseArray((*rows, k)), "b": CaseArray((k, n), scale=k**-0.5)}
    if bias:
        arrays["bias"] = CaseArray((n,))
    if residual:
        arrays["residual"] = CaseArray((*rows, n))
    return KernelCase(name, arrays, {"activation": activation}, roundings=2 if activation else 0, **more)


CASES = (
    _case("plain", (2, 64), 128, 96, dtypes=_ALL),
    _case("whole epilogue", (3, 50), 130, 70, "gelu", bias=True, residual=True, dtypes=_ALL),
    _case("several tiles", (200,), 300, 600, "silu", bias=True),
    _case("one row", (1,), 33, 17, residual=True),
    _case("no leading dimension", (), 64, 32),
    _case("empty batch", (0, 4), 64, 32),
    _case("small", (128,), 128, 128, uses={"bench"}),
    _case("4096³, GELU", (4096,), 4096, 4096, "gelu", bias=True, uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("8192 × 4096 × 14336", (8192,), 4096, 14336, uses={"bench"}, dtypes=("bfloat16",)),
    _case("8192 × 14336 × 4096, residual", (8192,), 14336, 4096, residual=True, uses={"bench"}, dtypes=("bfloat16",)),
    _case("1000³, SiLU and residual", (1000,), 1000, 1000, "silu", residual=True, uses={"compile"}),
)

OPERATION = KernelOperation(function, reference.matmul, IMPLEMENTATIONS, CASES, costs)
