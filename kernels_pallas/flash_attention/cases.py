"""Test cases of attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels_pallas import flash_attention as function
from kernels_pallas.core.attention import reference
from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.core.measured import CallClass
from kernels_pallas.flash_attention import (
    IMPLEMENTATIONS,
    KERNELS,
    KeyRange,
    call_class,
    causal,
    costs,
    intersection,
    prefix_lm,
    shifted,
    sliding_window,
    union,
    xla,
)
from kernels_pallas.flash_attention.operands import Operands

# Inside, weights and their gradients are rounded before they are multiplied, and outputs before their gradients.
_ROUNDINGS = 4


def _case(
    name: str,
    *,
    batch: int = 1,
    queries: int,
    keys: int | None = None,
    heads: int | tuple[int, int] = 1,
    width: int | tuple[int, int] = 32,
    sinks: bool = False,
    bias: tuple[int, ...] | None = None,
    **more,
) -> KernelCase:
    """Return a case. heads: of queries and keys; width: of keys and values; `options`: as of `flash_attention`."""
    keys = queries if keys is None else keys
    (N, K), (H, V) = (x if isinstance(x, tuple) else (x, x) for x in (heads, width))
    arrays = {
        "query": CaseArray((batch, queries, N, H)),
        "key": CaseArray((batch, keys, K, H)),
        "value": CaseArray((batch, keys, K, V)),
    }
    if sinks:
        arrays["sinks"] = CaseArray((N,))
    if bias:
        arrays["bias"] = CaseArray(bias)
    return KernelCase(name, arrays, roundings=_ROUNDINGS, **more)


def segments(*lengths: int) -> KeyRange:
    """Return the mask of packed documents with these lengths."""
    end = np.repeat(np.cumsum(lengths), lengths).astype(np.int32)
    return KeyRange((end - np.repeat(lengths, lengths)).astype(np.int32)[None], end[None])


# Every third query attends to nothing, the others to nearby keys.
_scattered = KeyRange(
    *(
        np.where(np.arange(90) % 3 == 0, empty, np.arange(90) + at).astype(np.int32)[None]
        for empty, at in ((7, -20), (7, 9))
    )
)


def first(queries: int, keys: int) -> KeyRange:
    """Return the mask under which all queries attend to the first keys."""
    return KeyRange(np.zeros((1, queries), np.int32), np.full((1, queries), keys, np.int32))


# Cases that kernels for Hopper support: 16-bit dtypes, widths that are multiples of 64. Their interpreter takes seconds
# for each block of a grid.
_WIDE = (
    _case(
        "wide, rows that see nothing, shared bias",
        queries=90,
        width=64,
        bias=(1, 1, 1, 90),
        options={"key_range": _scattered, "return_log_sum_exp": True},
        dtypes=("float16",),
    ),
    _case(
        "wide, grouped, causal, bias",
        queries=70,
        heads=(2, 1),
        width=64,
        bias=(1, 2, 70, 70),
        options={"key_range": causal(70)},
        dtypes=("bfloat16",),
    ),
    _case(
        "wide, packed, window, cap and sinks",
        queries=150,
        width=(128, 64),
        sinks=True,
        options={
            "key_range": intersection(segments(83, 1, 66), sliding_window(150, 50, after=9)),
            "soft_cap": 5.0,
            "return_log_sum_exp": True,
        },
        dtypes=("bfloat16",),
    ),
    _case(
        "wide, more than a block, causal",
        queries=210,
        width=64,
        options={"key_range": causal(210)},
        dtypes=("bfloat16",),
    ),
    _case(
        "wide, width 256, causal",
        queries=140,
        heads=(2, 1),
        width=256,
        options={"key_range": causal(140)},
        dtypes=("bfloat16",),
    ),
)

# Keeps the reference within a chip's memory.
_CHUNK = 1024

# FlashAttention-3 (arXiv:2407.08608, section 4.1): 16k tokens, heads × width 2048.
_GRID = tuple(
    _case(
        f"{mask} {length} × {width}",
        batch=16_384 // length,
        queries=length,
        heads=2048 // width,
        width=width,
        options=({"key_range": causal(length)} if mask == "causal" else {})
        | ({"query_chunk": _CHUNK} if length > 2048 else {}),
        uses={"bench"},
        dtypes=("bfloat16",),
    )
    for width in (64, 128, 256)
    for mask in ("causal", "full")
    for length in (512, 1024, 2048, 4096, 8192, 16_384)
)

_SMALL = _case("small", queries=64, options={"key_range": causal(64)}, uses={"bench"})


def _at_8k(name: str, queries: int = 8192, uses=frozenset({"compile", "bench"}), **more) -> KernelCase:
    """Return a case with Llama 3's heads and a causal mask, unless `more` says otherwise."""
    settings = {"heads": (32, 8), "width": 128, "dtypes": ("bfloat16",), "options": {}} | more
    settings["options"] = {"key_range": causal(queries), "query_chunk": _CHUNK} | settings["options"]
    return _case(name, queries=queries, uses=uses, **settings)


CASES = (
    _case(
        "causal",
        batch=2,
        queries=64,
        heads=2,
        options={"key_range": causal(64)},
        dtypes=("float32", "bfloat16", "float16"),
    ),
    _case("full, one query", queries=1, keys=200, heads=(4, 2), width=(48, 16)),
    _case(
        "grouped, packed, window",
        batch=2,
        queries=150,
        heads=(4, 2),
        options={"key_range": intersection(segments(70, 1, 79), sliding_window(150, 40)), "return_log_sum_exp": True},
    ),
    _case(
        "bias, cap and sinks on odd lengths",
        queries=37,
        keys=141,
        heads=(3, 1),
        width=(80, 32),
        sinks=True,
        bias=(1, 3, 37, 141),
        options={"key_range": causal(37, offset=104), "soft_cap": 2.0, "scale": 0.3, "return_log_sum_exp": True},
        dtypes=("float32", "bfloat16"),
    ),
    _case(
        "first tokens and a window, sinks",
        batch=2,
        queries=150,
        heads=(4, 2),
        sinks=True,
        options={
            "key_range": intersection(causal(150), union(first(150, 5), sliding_window(150, 40))),
            "return_log_sum_exp": True,
        },
        dtypes=("float32", "bfloat16"),
    ),
    _case(
        "union, bias and cap",
        queries=90,
        keys=70,
        bias=(1, 1, 90, 70),
        options={
            "key_range": union(_scattered, shifted(_scattered, -30), shifted(segments(50, 40), 9)),
            "soft_cap": 3.0,
            "return_log_sum_exp": True,
        },
    ),
    _case(
        "shared bias",
        batch=2,
        queries=20,
        keys=33,
        heads=2,
        bias=(2, 1, 1, 33),
        options={"key_range": prefix_lm(20, 9)},
    ),
    _case("rows that see nothing", queries=90, heads=2, options={"key_range": _scattered, "return_log_sum_exp": True}),
    _case("nothing at all", queries=20, options={"key_range": KeyRange(*np.full((2, 1, 20), 5, np.int32))}),
    _case("no batch", batch=0, queries=20, heads=(2, 1), options={"key_range": causal(20), "query_chunk": 8}),
    _case("no query", queries=0, keys=20, sinks=True, options={"key_range": causal(0), "return_log_sum_exp": True}),
    _case("no key", queries=20, keys=0, options={"return_log_sum_exp": True}),
    _case("no head", queries=20, heads=0),
    *_WIDE,
    _SMALL,
    *_GRID,
    _at_8k("32/8 causal 8192 × 128"),
    _at_8k("latent causal 8192 × 192/128", heads=16, width=(192, 128)),
    _at_8k(
        "window 4096, cap, 8192 × 256",
        heads=(16, 8),
        width=256,
        options={"key_range": sliding_window(8192, 4095), "soft_cap": 50.0},
    ),
    _at_8k(
        "packed, sinks, 8192 × 64",
        heads=(64, 8),
        width=64,
        sinks=True,
        options={"key_range": intersection(causal(8192), segments(1000, 3000, 96, 4096))},
    ),
    _at_8k("bias 2048 × 128", queries=2048, heads=16, bias=(1, 16, 2048, 2048)),
    _case(
        "all of it on odd lengths",
        queries=300,
        keys=1111,
        heads=(4, 2),
        width=(96, 64),
        sinks=True,
        bias=(1, 4, 300, 1111),
        options={"key_range": causal(300, offset=811), "soft_cap": 20.0, "return_log_sum_exp": True},
        uses={"compile"},
    ),
)


def _serves(implementation: str, case: KernelCase, dtype: str) -> bool:
    absent = dict.fromkeys(Operands._fields)
    operands = Operands(**absent | case.structs(dtype))
    if implementation == "xla":
        names = "key_range", "return_log_sum_exp", "query_chunk"
        return xla.unsupported_reason(operands, *map(case.options.get, names)) is None
    return KERNELS[implementation].unsupported_reason(operands) is None


def _classify(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> CallClass:
    return call_class(*(arrays[name] for name in ("query", "key", "value")), options.get("key_range"))


OPERATION = KernelOperation(
    function,
    reference.flash_attention,
    IMPLEMENTATIONS,
    CASES,
    costs,
    ("xla", "cudnn"),
    _serves,
    timed_with={"cudnn": {"deterministic": False}},
    classify=_classify,
)
