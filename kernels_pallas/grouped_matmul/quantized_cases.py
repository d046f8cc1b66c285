"""Test cases of the grouped product with quantised matrices."""

from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.core.quantized.cases import parts, serves
from kernels_pallas.grouped_matmul import quantized_grouped_matmul as function
from kernels_pallas.grouped_matmul import reference
from kernels_pallas.grouped_matmul.quantized import KERNELS, costs

_CHIPS = {"uses": {"compile", "bench"}, "dtypes": ("bfloat16",)}


def _case(name, rows, k, n, count, kind, groups=(1, None), *, by_outputs=False, **more) -> KernelCase:
    """Return a case of `count` matrices [k, n] whose products have unit scale, with empty groups and with rows past the
    last group; `groups` of inputs and outputs, None is one for each output."""
    arrays = {
        "x": CaseArray((rows, k)),
        **parts(kind, k, n, groups, by_outputs=by_outputs, stack=(count,)),
        "sizes": CaseArray((count,), "int32", "groups", scale=rows),
    }
    return KernelCase(name, arrays, {"kind": kind, "by_outputs": by_outputs}, roundings=1, **more)


CASES = (
    _case("int8", 60, 48, 40, 5, "int8", dtypes=("bfloat16", "float16", "float32")),
    _case("int4, groups of 32", 40, 256, 72, 3, "int4", (8, None), dtypes=("bfloat16", "float32")),
    _case("int4, many rows", 200, 256, 72, 2, "int4", (8, None), dtypes=("bfloat16", "float32")),
    _case("fp8, blocks of 128 × 8, more groups than rows", 3, 384, 40, 8, "fp8", (3, 5), dtypes=("bfloat16",)),
    _case("fp8, odd widths", 70, 130, 70, 3, "fp8", dtypes=("float32", "bfloat16")),
    _case("mxfp4, several steps", 17, 2112, 24, 4, "mxfp4", (66, None), dtypes=("bfloat16", "float32")),
    _case("mxfp4, many rows", 150, 192, 24, 2, "mxfp4", (6, None), dtypes=("bfloat16",)),
    _case("int8, by outputs", 20, 96, 130, 4, "int8", by_outputs=True, dtypes=("bfloat16", "float32")),
    _case("int4, by outputs, groups of 32", 9, 128, 70, 3, "int4", (4, None), by_outputs=True),
    _case("w8a8, by outputs", 12, 130, 70, 3, "w8a8", by_outputs=True, dtypes=("bfloat16", "float32")),
    _case("empty batch", 0, 64, 32, 4, "int8"),
    _case("small", 512, 64, 64, 8, "int8", uses={"bench"}),
    _case("64 × 2880 × 5760, 32 groups, mxfp4", 64, 2880, 5760, 32, "mxfp4", (90, None), **_CHIPS),
    _case("4096 × 2880 × 5760, 32 groups, mxfp4", 4096, 2880, 5760, 32, "mxfp4", (90, None), **_CHIPS),
    _case("64 × 7168 × 2048, 64 groups, fp8 of 128 × 128", 64, 7168, 2048, 64, "fp8", (56, 16), **_CHIPS),
    _case("1000 × 1024 × 360, 7 groups, int8", 1000, 1024, 360, 7, "int8", uses={"compile"}),
    _case("100 × 2048 × 768, 16 groups, int4 of 32", 100, 2048, 768, 16, "int4", (64, None), **_CHIPS),
)


def _serves(implementation: str, case: KernelCase, dtype: str) -> bool:
    """Return whether an implementation supports a case: kernels read matrices by their inputs."""
    return implementation not in KERNELS or serves(implementation, case)


OPERATION = KernelOperation(
    function,
    reference.quantized_grouped_matmul,
    tuple(KERNELS),
    CASES,
    costs,
    ("xla",),
    _serves,
    gradients_by_xla=True,
)
