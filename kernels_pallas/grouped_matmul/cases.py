"""Test cases of the grouped product."""

from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.grouped_matmul import KERNELS, costs, mosaic_gpu, reference
from kernels_pallas.grouped_matmul import grouped_matmul as function

_ALL = ("bfloat16", "float16", "float32")


def _case(name, rows, k, n, groups, *, transposed=False, **more) -> KernelCase:
    """Return a case whose products have unit scale, with empty groups and with rows past the last group."""
    arrays = {
        "x": CaseArray((rows, k)),
        "matrices": CaseArray((groups, n, k) if transposed else (groups, k, n), scale=k**-0.5),
        "sizes": CaseArray((groups,), "int32", "groups", scale=rows),
    }
    return KernelCase(name, arrays, {"transposed": transposed}, **more)


_CHIPS = {"uses": {"compile", "bench"}, "dtypes": ("bfloat16",)}
CASES = (
    _case("plain", 60, 48, 40, 5, dtypes=_ALL),
    _case("odd widths, transposed", 200, 130, 70, 3, transposed=True, dtypes=_ALL),
    _case("several tiles", 300, 600, 520, 2),
    _case("more groups than rows", 3, 33, 17, 8),
    _case("one group, transposed", 40, 16, 24, 1, transposed=True),
    _case("few rows of each, transposed", 40, 64, 128, 5, transposed=True, dtypes=_ALL[:2]),
    _case("whole tiles", 400, 384, 128, 4, dtypes=("bfloat16",)),
    _case("empty batch", 0, 16, 24, 4),
    _case("small", 512, 64, 64, 8, uses={"bench"}),
    _case("8192 × 2048 × 1536, 128 groups", 8192, 2048, 1536, 128, **_CHIPS),
    _case("8192 × 4096 × 14336, 8 groups", 8192, 4096, 14336, 8, **_CHIPS),
    _case("1000 × 1000 × 360, 7 groups, transposed", 1000, 1000, 360, 7, transposed=True, uses={"compile"}),
)


def _serves(implementation: str, case: KernelCase, dtype: str) -> bool:
    """Return whether an implementation supports a case in a dtype: Mosaic GPU copies whole tiles alone."""
    arrays = case.structs(dtype)
    columns = arrays["matrices"].shape[1 if case.options["transposed"] else 2]
    return implementation != "mosaic_gpu" or mosaic_gpu.unsupported_reason(arrays["x"], columns) is None


OPERATION = KernelOperation(function, reference.grouped_matmul, tuple(KERNELS), CASES, costs, ("xla",), _serves)
