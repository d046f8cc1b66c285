"""Test cases of products with quantised matrices."""

from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.core.quantized.cases import parts, serves
from kernels_pallas.quantized_matmul import KERNELS, costs, reference
from kernels_pallas.quantized_matmul import quantized_matmul as function

_CHIPS = {"uses": {"compile", "bench"}, "dtypes": ("bfloat16",)}


def _case(name, rows, k, n, kind, groups=(1, None), *, by_outputs=False, **more) -> KernelCase:
    """Return a case of a matrix [k, n] whose products have about unit scale; None is a group for each output."""
    arrays = {"x": CaseArray((*rows, k)), **parts(kind, k, n, groups, by_outputs=by_outputs)}
    # Not the definition rounds, but the gradient the matrix, and kernels the numbers of short groups.
    return KernelCase(name, arrays, {"kind": kind, "by_outputs": by_outputs}, roundings=1, **more)


CASES = (
    _case("int8", (2, 20), 130, 70, "int8", dtypes=("bfloat16", "float16", "float32")),
    _case("int4, groups of 32", (40,), 256, 72, "int4", (8, None), dtypes=("bfloat16", "float32")),
    _case("int4, one group, one row", (1,), 100, 33, "int4"),
    _case("int8, short groups", (3,), 128, 60, "int8", (4, 6), dtypes=("bfloat16", "float32")),
    _case("fp8, blocks of 128 × 8", (5,), 384, 40, "fp8", (3, 5), dtypes=("bfloat16", "float32")),
    _case("mxfp4, several steps", (17,), 2112, 24, "mxfp4", (66, None), dtypes=("bfloat16", "float32")),
    _case("int4, many rows", (70,), 256, 72, "int4", (8, None), dtypes=("bfloat16", "float32")),
    _case("int4, many rows, long groups", (100,), 480, 40, "int4", (3, None), dtypes=("bfloat16", "float32")),
    _case("fp8, many rows", (64,), 256, 40, "fp8", (4, 5), dtypes=("bfloat16", "float16")),
    _case("mxfp4, many rows", (64,), 192, 24, "mxfp4", (6, None), dtypes=("bfloat16", "float16")),
    _case("int8, by outputs", (3, 5), 96, 130, "int8", by_outputs=True, dtypes=("bfloat16", "float32")),
    _case("int4, by outputs, groups of 32", (9,), 128, 70, "int4", (4, None), by_outputs=True),
    _case("w8a8, by outputs", (6,), 130, 70, "w8a8", by_outputs=True, dtypes=("bfloat16", "float32")),
    _case("w8a8, one row", (1,), 64, 33, "w8a8"),
    _case("no leading dimension", (), 64, 32, "int8"),
    _case("empty batch", (0, 4), 64, 32, "int8"),
    _case("small", (8,), 256, 128, "int8", uses={"bench"}),
    _case("8 × 4096 × 14336, int8", (8,), 4096, 14336, "int8", **_CHIPS),
    _case("8 × 4096 × 14336, int4 of 128", (8,), 4096, 14336, "int4", (32, None), **_CHIPS),
    _case("4096 × 4096 × 14336, int8", (4096,), 4096, 14336, "int8", **_CHIPS),
    _case("4096 × 4096 × 14336, int4 of 32", (4096,), 4096, 14336, "int4", (128, None), **_CHIPS),
    _case("8 × 7168 × 2048, fp8 of 128 × 128", (8,), 7168, 2048, "fp8", (56, 16), **_CHIPS),
    _case("64 × 2880 × 5760, mxfp4", (64,), 2880, 5760, "mxfp4", (90, None), **_CHIPS),
    _case("100 × 1000 × 360, int8", (100,), 1000, 360, "int8", uses={"compile"}),
)


def _serves(implementation: str, case: KernelCase, dtype: str) -> bool:
    """Return whether an implementation supports a case: kernels read matrices by their inputs."""
    return implementation not in KERNELS or serves(implementation, case)


OPERATION = KernelOperation(
    function, reference.quantized_matmul, tuple(KERNELS), CASES, costs, ("xla",), _serves, gradients_by_xla=True
)
