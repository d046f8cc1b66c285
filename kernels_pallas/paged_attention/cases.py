"""Test cases of paged attention."""

import dataclasses

import numpy as np

from kernels_pallas.core.attention.key_range import KeyRange
from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.paged_attention import KERNELS, paged_attention, reference
from kernels_pallas.paged_attention.costs import kernel_costs

# Inside, weights are rounded before they are multiplied.
_ROUNDINGS = 2


def _case(
    name: str,
    *,
    sequences: int = 3,
    queries: int = 1,
    heads: tuple[int, int] = (4, 2),
    width: tuple[int, int] = (32, 32),
    is_part: bool = False,
    page: int = 32,
    pages: int = 4,
    window: int | None = None,
    empty: bool = False,
    sinks: bool = False,
    scaled: str | None = None,
    options: dict | None = None,
    **more,
) -> KernelCase:
    """Return a case whose sequences end before the last page does; queries are their last tokens.

    Args:
      heads: of queries and keys. width: of keys and values. is_part: values are the first channels of keys. page:
        tokens. pages: of each sequence, drawn among as many.
      window: the most tokens that a query sees. empty: the first sequence sees nothing.
      sinks: each query head has one.
      scaled: the dtype of keys and values of eight bits, with scales of one size.
    """
    (N, K), (H, V), drawn = heads, width, pages * sequences
    arrays = {
        "query": CaseArray((sequences, queries, N, H), differentiable=False),
        "key": CaseArray((drawn, K, H, page), differentiable=False),
        "value": CaseArray((drawn, K, page, V), differentiable=False),
        "table": CaseArray((sequences, pages), "int32", "below", drawn),
    }
    if sinks:
        arrays["sinks"] = CaseArray((N,), differentiable=False)
    length = pages * page - np.arange(sequences, dtype=np.int32)[:, None] % page
    end = length - np.arange(queries, dtype=np.int32)[None, ::-1]
    start = np.zeros_like(end) if window is None else np.maximum(end - window, 0)
    if empty:
        end[0] = start[0]
    options = {"key_range": KeyRange(start, end)} | (options or {})
    if scaled:
        # Such that numbers have about unit scale: their bytes are all equally likely.
        unit = {"int8": 1 / 74, "float8_e4m3fn": 1 / 130}[scaled]
        for pages in ("key", "value"):
            numbers = dataclasses.replace(arrays[pages], dtype=scaled, draw="bytes")
            scales = CaseArray((drawn, K, 1, page), "float32", scale=0.2 * unit, mean=unit, differentiable=False)
            arrays |= {pages: numbers, f"{pages}_scales": scales}
    if is_part:
        arrays.pop("value_scales", None)
        arrays.pop("value")
        options |= {"value": V}
    return KernelCase(name, arrays, options, roundings=_ROUNDINGS, **more)


_CHIPS = {"page": 128, "pages": 16, "dtypes": ("bfloat16",), "uses": frozenset({"compile", "bench"})}

_LATENTS = {"is_part": True, **_CHIPS}
_SCALED = {"page": 128, "dtypes": ("float32", "bfloat16")}

CASES = (
    _case("one token", dtypes=("float32", "bfloat16", "float16")),
    _case("few tokens, cap, no keys", queries=3, empty=True, options={"soft_cap": 2.0, "scale": 0.3}),
    _case("tile of a prompt, window", queries=20, width=(24, 40), window=50, dtypes=("float32", "bfloat16")),
    _case("several lanes, pages of 48", heads=(3, 1), page=48, pages=12),
    _case(
        "several lanes, few tokens, sinks, cap, no keys",
        queries=3,
        heads=(6, 2),
        page=128,
        pages=5,
        empty=True,
        sinks=True,
        options={"soft_cap": 2.0},
        dtypes=("float32", "bfloat16"),
    ),
    _case("tile of a prompt, sinks", queries=20, width=(24, 40), window=50, page=128, sinks=True),
    _case("pages of 128", page=128, dtypes=("float32", "bfloat16")),
    _case(
        "tile of a prompt, window, cap, pages of 128",
        queries=9,
        width=(24, 40),
        page=128,
        window=200,
        empty=True,
        options={"soft_cap": 2.0},
        dtypes=("float32", "bfloat16"),
    ),
    _case(
        "wide, window, cap, no keys",
        queries=2,
        heads=(6, 2),
        width=(64, 128),
        page=64,
        pages=6,
        window=150,
        empty=True,
        options={"soft_cap": 2.0, "scale": 0.3},
        dtypes=("bfloat16",),
    ),
    _case(
        "wide, several lanes, sinks, no keys",
        queries=2,
        heads=(6, 2),
        width=(64, 64),
        page=64,
        pages=6,
        empty=True,
        sinks=True,
        dtypes=("bfloat16",),
    ),
    _case(
        "wide tile, more than a block",
        sequences=1,
        queries=24,
        heads=(6, 2),
        width=(128, 64),
        page=128,
        pages=2,
        dtypes=("float16",),
    ),
    _case("values in keys", heads=(6, 1), width=(40, 24), is_part=True, dtypes=("float32", "bfloat16")),
    _case(
        "values in keys, tile, cap, no keys",
        queries=9,
        heads=(4, 2),
        width=(48, 48),
        is_part=True,
        empty=True,
        options={"soft_cap": 2.0},
    ),
    _case("values in keys, int8", heads=(6, 1), width=(40, 24), page=128, is_part=True, scaled="int8"),
    _case("values in keys, pages of 128", heads=(6, 1), width=(40, 24), sinks=True, is_part=True, **_SCALED),
    _case("few tokens, cap, int8", queries=3, empty=True, scaled="int8", options={"soft_cap": 2.0}, **_SCALED),
    _case("tile of a prompt, window, fp8", queries=20, width=(24, 40), window=50, scaled="float8_e4m3fn", **_SCALED),
    _case("wide, sinks, fp8", width=(64, 128), sinks=True, scaled="float8_e4m3fn", **_SCALED),
    _case("small", page=32, uses={"bench"}),
    _case("8 × 2048, 32/8 × 128", sequences=8, heads=(32, 8), width=(128, 128), **_CHIPS),
    _case("8 × 2048, 32/8 × 128, int8", sequences=8, heads=(32, 8), width=(128, 128), scaled="int8", **_CHIPS),
    _case("8 × 2048, 32/8 × 128, fp8", sequences=8, heads=(32, 8), width=(128, 128), scaled="float8_e4m3fn", **_CHIPS),
    _case("1 × 2048, 32/8 × 128", sequences=1, heads=(32, 8), width=(128, 128), **_CHIPS),
    _case(
        "window 1024, cap, 8 × 2048, 16/8 × 256",
        sequences=8,
        heads=(16, 8),
        width=(256, 256),
        window=1024,
        options={"soft_cap": 50.0},
        **_CHIPS,
    ),
    _case(
        "window 128, sinks, 8 × 2048, 64/8 × 64",
        sequences=8,
        heads=(64, 8),
        width=(64, 64),
        window=128,
        sinks=True,
        **_CHIPS,
    ),
    _case("latents, 8 × 2048, 16/1 × 576", sequences=8, heads=(16, 1), width=(576, 512), is_part=True, **_CHIPS),
    _case("latents, 8 × 2048, 128/1 × 576", sequences=8, heads=(128, 1), width=(576, 512), is_part=True, **_CHIPS),
    # A token and four drafts of each sequence.
    _case("8 × 5, 2048, 32/8 × 128", sequences=8, queries=5, heads=(32, 8), width=(128, 128), **_CHIPS),
    _case(
        "8 × 5, 2048, 32/8 × 128, int8",
        sequences=8,
        queries=5,
        heads=(32, 8),
        width=(128, 128),
        scaled="int8",
        **_CHIPS,
    ),
    _case("latents, 8 × 5, 2048, 16/1 × 576", sequences=8, queries=5, heads=(16, 1), width=(576, 512), **_LATENTS),
    _case("latents, 16 tiles of 32, 2048", sequences=16, queries=32, heads=(16, 1), width=(576, 512), **_LATENTS),
    _case("16 tiles of 32, 2048, 32/8 × 128", sequences=16, queries=32, heads=(32, 8), width=(128, 128), **_CHIPS),
)


def _serves(implementation: str, case: KernelCase, dtype: str) -> bool:
    structs = case.structs(dtype)
    kernel = KERNELS.get(implementation)
    if kernel is None:
        return True
    value = case.options.get("value", structs.get("value"))
    return kernel.unsupported_reason(structs["query"], structs["key"], value) is None


OPERATION = KernelOperation(
    paged_attention, reference.paged_attention, tuple(KERNELS), CASES, kernel_costs, ("xla",), _serves
)
