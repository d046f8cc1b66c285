"""Test cases of the loss."""

from kernels_pallas import linear_cross_entropy as function
from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.linear_cross_entropy import costs, reference

_ALL = ("bfloat16", "float16", "float32")


def _case(name: str, tokens: tuple[int, ...], width: int, labels: int, *, weights: bool = False, **more) -> KernelCase:
    options = more.setdefault("options", {})
    table = (labels, width) if options.get("transposed") else (width, labels)
    arrays = {
        "hidden": CaseArray((*tokens, width), scale=more.pop("scale", 1.0)),
        "unembedding": CaseArray(table, scale=width**-0.5),
        "targets": CaseArray(tokens, "int32", more.pop("draw", "labels"), labels),
    }
    if weights:
        arrays["weights"] = CaseArray(tokens, scale=0.3, mean=1.0)
    # The logits' gradient and each of the two gradients are rounded; with a sum, once more when they are scaled.
    return KernelCase(name, arrays, roundings=3, **more)


def _on(*uses: str) -> dict:
    return dict(uses=set(uses), dtypes=("bfloat16",))


_EVERYTHING = dict(soft_cap=5.0, z_loss=1e-2, return_log_z=True)
_CAPPED_AND_TIED = dict(soft_cap=30.0, transposed=True)

CASES = (
    _case("plain", (4, 6), 32, 50, dtypes=_ALL),
    _case("sum", (4, 6), 32, 50, options=dict(reduction="sum"), dtypes=_ALL),
    _case("everything", (3, 7), 24, 131, weights=True, options=dict(transposed=True, **_EVERYTHING)),
    _case("sum of everything", (3, 7), 24, 131, weights=True, options=dict(reduction="sum", **_EVERYTHING)),
    _case("odd vocabulary", (5,), 8, 50257, draw="below"),
    _case("one row, one label", (1,), 16, 1, draw="below"),
    _case("empty batch", (0, 5), 16, 24),
    _case("no leading dimension", (), 16, 24, draw="below"),
    _case("large", (9,), 32, 300, scale=1e4, dtypes=("bfloat16",)),
    _case("capped, 8192 × 768 × 50257", (8192,), 768, 50257, **_on("compile"), options=_CAPPED_AND_TIED),
    _case("sum, 4096 × 1024 × 128256", (4096,), 1024, 128256, **_on("compile"), options=dict(reduction="sum")),
    _case("small", (64,), 64, 512, **_on("bench")),
    _case("8192 × 768 × 50257", (8192,), 768, 50257, **_on("bench"), options=dict(transposed=True)),
    _case("sum, 32768 × 4096 × 128256", (32768,), 4096, 128256, **_on("bench"), options=dict(reduction="sum")),
    _case("32768 × 4096 × 128256", (32768,), 4096, 128256, **_on("bench")),
)

OPERATION = KernelOperation(
    function, reference.linear_cross_entropy, ("triton", "mosaic_tpu"), CASES, costs, ("xla", "chunked")
)
