"""Paged attention on TPUs, compiled by Mosaic: each sequence reads the pages that its rows see, and no others.

Pages stay in HBM. A program copies those of one sequence to VMEM, a block of whole pages while it computes the block
before, and at the end of a sequence the first block of the next. Blocks begin at multiples of their size, whoever reads
them: each row is computed and added up in one order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import interpretation, launch, target, tuning
from kernels_pallas.core.attention.key_range import KeyRange
from kernels_pallas.core.attention.scores import LOG2_E, LOWEST, FlashSettings, dot
from kernels_pallas.core.tiles import LANES
from kernels_pallas.paged_attention.costs import FEW_QUERIES, one_kernel_cost
from kernels_pallas.paged_attention.key_heads import by_key_head, by_token, sinks_by_row
from kernels_pallas.paged_attention.scales import multiplied

MOST_WIDTH, MOST_LATENT = 256, 768  # of keys and values, and of keys of which values are a part
MOST_TOKENS = 1024  # of a page, of which VMEM holds two
TILE = 16  # rows of a vector of bfloat16: queries are padded to multiples
AT_ONCE = 128  # rows of heads that are computed together, so that some hide the latency of others
MOST_ENTRIES = 2**16  # of the table in scalar memory, a quarter of it
_SCALE_BYTES = 2 * 4 * 8  # of a token in VMEM, where a row has the space of eight
# The float32 arrays of a block of scores that the compiler keeps.
_INTERMEDIATES = 4


class PagedTpuBlocks(NamedTuple):
    """Tiles of up to `rows` queries of the heads that share a key, and of `keys` tokens, or one page of more."""

    rows: int
    keys: int


# Defaults until sizes are measured. Fewer keys at a time would wait longer for each other's products.
_DEFAULT, _INTERPRETED = PagedTpuBlocks(256, 512), PagedTpuBlocks(16, 256)


def unsupported_reason(query: Any, key: Any, value: Any) -> str | None:
    """Return why this kernel cannot serve a call, or None."""
    (*_, size), H = key.shape, query.shape[-1]
    V, most = (value, MOST_LATENT) if isinstance(value, int) else (value.shape[3], MOST_WIDTH)
    if jnp.float16 in (query.dtype, key.dtype):
        return "TPUs have no float16"
    if not 0 < min(H, V) <= max(H, V) <= most:
        return f"head widths {H} and {V} are not both from 1 to {most}"
    if size % LANES or size > MOST_TOKENS:
        return f"pages of {size} tokens are no multiple of {LANES} up to {MOST_TOKENS}"
    return None


def paged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | int,
    table: jax.Array,
    *,
    key_range: KeyRange,
    scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
) -> jax.Array:
    """See `kernels_pallas.paged_attention`."""
    settings = FlashSettings(scale, soft_cap, 0, None, "mosaic_tpu")
    at_once = max(1, MOST_ENTRIES // table.shape[1])
    parts = [slice(first, first + at_once) for first in range(0, len(query), at_once)]
    attended = [
        _attended(
            settings,
            query[part],
            key,
            value,
            table[part],
            KeyRange(*(x[part] for x in key_range)),
            sinks,
            [each for each in (key_scales, value_scales) if each is not None],
        )
        for part in parts
    ]
    return attended[0] if len(attended) == 1 else jnp.concatenate(attended)


class _Layout(NamedTuple):
    """The tiling of a call: `rows` of a tile, `heads` of a program, of which some are computed `together`, `pages` of a
    block, and bytes of VMEM."""

    rows: int
    heads: int
    together: int
    pages: int
    vmem: int


def _layout(R: int, K: int, S: int, H: int, V: int, wide: Any, pages: Any, is_part: bool) -> _Layout:
    """Return the layout for R rows of each of K heads, multiplied in the dtype `wide`, and pages of another dtype.
    `is_part`: values are a part of the keys.

    A program has as many heads as fit the VMEM that every generation grants, and each core some of them."""
    sizes = tuning.blocks(
        "paged_attention", "mosaic_tpu", (R, H, V), wide, _INTERPRETED if interpretation.current() else _DEFAULT
    )
    rows = min(pl.cdiv(R, TILE), max(1, sizes.rows // TILE)) * TILE
    in_block = max(1, sizes.keys // S)
    H, V = (pl.cdiv(width, LANES) * LANES for width in (H, V))
    of_token = (H if is_part else H + V) * pages.itemsize + _SCALE_BYTES * (pages.itemsize == 1)
    of_head = 2 * in_block * S * of_token + rows * (2 * (H + V) * wide.itemsize + 4 * V + 2 * 4 * LANES)
    together = max(1, AT_ONCE // rows)
    beside = 4 * rows * (4 * LANES + _INTERMEDIATES * together * in_block * S)
    most = max(1, min((launch.TPU_VMEM - beside) // of_head, pl.cdiv(K, target.current().cores)))
    heads = next(n for n in range(min(most, K), 0, -1) if K % n == 0)
    return _Layout(rows, heads, together, in_block, heads * of_head + beside)


def _attended(
    settings: FlashSettings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | int,
    table: jax.Array,
    key_range: KeyRange,
    sinks: jax.Array | None,
    of_scales: list[jax.Array],
) -> jax.Array:
    """Return the attended values [Q, T, N, V] of sequences whose table fits scalar memory."""
    (Q, T, N, H), (_, K, _, S), M = query.shape, key.shape, table.shape[1]
    is_part = isinstance(value, int)
    V = value if is_part else value.shape[3]
    G, R = N // K, T * N // K
    wide = multiplied(query, key)
    rows, heads, together, in_block, vmem = _layout(R, K, S, H, V, wide, key.dtype, is_part)
    cost = one_kernel_cost(query, key, value, M * S, settings.soft_cap)
    tokens, blocks = in_block * S, pl.cdiv(R, rows)
    more = blocks * rows - R
    is_run = 1 < T <= FEW_QUERIES  # a token and its drafts, whose keys and values those before them do not see
    holds_nan = jnp.issubdtype(key.dtype, jnp.floating)
    # XLA lays pages of values out with tokens along the lanes, as those of keys, unless their width fills them.
    tokens_last = is_part or bool(V % LANES)
    values = [] if is_part else [jnp.swapaxes(value, 2, 3) if tokens_last else value]
    query_QKRH = jnp.pad(by_key_head(query, K).astype(wide), [(0, 0), (0, 0), (0, more), (0, 0)])
    start_QT, end_QT = key_range.start, jnp.minimum(key_range.end, M * S)
    bounds_QR1 = [jnp.pad(jnp.repeat(x, G, axis=1), [(0, 0), (0, more)])[:, :, None] for x in (start_QT, end_QT)]
    sinks_KR1 = [] if sinks is None else [sinks_by_row(sinks, query, K, blocks * rows)[:, :, None] * LOG2_E]
    is_seeing_QT = end_QT > start_QT
    last_Q = jnp.max(jnp.where(is_seeing_QT, end_QT, 0), axis=1)
    first_Q = jnp.maximum(jnp.min(jnp.where(is_seeing_QT, start_QT, last_Q[:, None]), axis=1), 0)
    blocks_Q = jnp.where(last_Q > first_Q, pl.cdiv(last_Q, tokens) - first_Q // tokens, 0)
    before_Q = jnp.cumsum(blocks_Q) - blocks_Q
    scalars = [x.astype(jnp.int32) for x in (table.reshape(-1), first_Q, last_Q, blocks_Q, before_Q)]

    pages = [key, *values, *of_scales]
    paged, inputs = len(pages), len(pages) + len(sinks_KR1)

    def kernel(table, first, last, count, before, query, start, end, *refs) -> None:
        # Pages in HBM and their buffers: of keys, of values that are apart, and of scales.
        in_pages, sink, (out, arrived, top, total, acc, *buffers) = refs[:paged], refs[paged:inputs], refs[inputs:]
        keys, value_buffer, scale_buffers = buffers[0], buffers[len(values)], buffers[1 + len(values) :]
        own_heads, q = pl.ds(pl.program_id(0) * heads, heads), pl.program_id(2)

        def each_copy(q: jax.Array, block: jax.Array, buffer: jax.Array, do: Callable[[Any], None]) -> None:
            """Call do(copy) on the copies of a block of a sequence, which are of the pages that its rows see."""
            for i in range(in_block):
                page, part = block * in_block + i, pl.ds(i * S, S)

                @pl.when((first[q] < (page + 1) * S) & (page * S < last[q]))
                def _(page: jax.Array = page, part: Any = part) -> None:
                    index = table[q * M + page]
                    for kind, (stored, kept) in enumerate(zip(in_pages, buffers, strict=True)):
                        tokens_in_rows = kind == 1 and bool(values) and not tokens_last
                        into = kept.at[buffer, :, part] if tokens_in_rows else kept.at[buffer, :, :, part]
                        do(launch.copy(stored.at[index, own_heads], into, arrived.at[buffer, kind]))

        @pl.when((count[q] > 0) & ((q == 0) | (count[jnp.maximum(q - 1, 0)] == 0)))
        def _() -> None:
            each_copy(q, first[q] // tokens, before[q] % 2, lambda copy: copy.start())

        if sink:  # as after one key with this score and no value
            top[...] = sink[0][...]
            total[...] = jnp.ones_like(total)
        else:
            top[...] = jnp.full_like(top, LOWEST)
            total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)
        begin, stop = start[...], end[...]

        def step(i: jax.Array, _: None) -> None:
            block, buffer = first[q] // tokens + i, (before[q] + i) % 2
            is_last = i + 1 == count[q]
            after = jnp.where(is_last, jnp.minimum(q + 1, Q - 1), q)

            @pl.when(~is_last | ((q + 1 < Q) & (count[after] > 0)))
            def _() -> None:
                following = jnp.where(is_last, first[after] // tokens, block + 1)
                each_copy(after, following, 1 - buffer, lambda copy: copy.start())

            each_copy(q, block, buffer, lambda copy: copy.wait())
            index = block * tokens + jax.lax.broadcasted_iota(jnp.int32, (rows, tokens), 1)
            is_seen = (begin <= index) & (index < stop)

            @pl.when((block * tokens < first[q]) | (last[q] < (block + 1) * tokens))
            def _() -> None:
                # Tokens that are not copied, and the rest of a page, may be anything, also NaN: 0 · NaN is no 0.
                for kept, axis in ((value_buffer, int(tokens_last)), *((each, 1) for each in scale_buffers[-1:])):
                    position = block * tokens + jax.lax.broadcasted_iota(jnp.int32, kept.shape[2:], axis)
                    is_own = (first[q] <= position) & (position < last[q])
                    for k in range(heads):
                        kept[buffer, k] = jnp.where(is_own, kept[buffer, k], jnp.zeros((), kept.dtype))

            if is_run and holds_nan:

                @pl.when(last[q] - T < (block + 1) * tokens)
                def _() -> None:
                    # A draft may be NaN too. Rows that see it get NaN by their sum of weights; for others it is 0.
                    nothing = jnp.zeros((rows, V), wide)
                    for k in range(heads):
                        at = (buffer, k, slice(V)) if is_part else (buffer, k)
                        numbers = value_buffer[at]
                        spoiled = dot(nothing, widened(numbers), (1, 1 - int(tokens_last)))
                        total[k] = total[k] + jnp.sum(jnp.where(is_seen, spoiled, 0.0), axis=1, keepdims=True)
                        is_number = numbers.astype(jnp.float32) * 0.0 == 0.0
                        value_buffer[at] = jnp.where(is_number, numbers, jnp.zeros((), numbers.dtype))

            for at in range(0, heads, together):
                some = range(at, min(at + together, heads))
                group = slice(some.start, some.stop)
                scores = jnp.stack([dot(query[k], widened(keys[buffer, k]), (1, 0)) for k in some])
                if of_scales:
                    scores = scores * scale_buffers[0][buffer, group]
                scores, factor, _ = settings.factored(scores)
                scores = jnp.where(is_seen, scores, -jnp.inf)
                highest = top[group]
                higher = jnp.maximum(highest, jnp.max(scores, axis=2, keepdims=True) * factor)
                kept, weights = jnp.exp2(highest - higher), jnp.exp2(scores * factor - higher)
                scaled = weights * scale_buffers[-1][buffer, group] if of_scales else weights
                scaled = jnp.where(is_seen, scaled, 0.0) if of_scales and is_run else scaled
                narrow = scaled.astype(wide if of_scales else key.dtype)
                numbers = [value_buffer[buffer, k, :V] if is_part else value_buffer[buffer, k] for k in some]
                numbers = [widened(each) if of_scales else each for each in numbers]
                attended = [dot(narrow[k - at], numbers[k - at], (1, int(tokens_last))) for k in some]
                total[group] = total[group] * kept + jnp.sum(weights, axis=2, keepdims=True)
                acc[group] = acc[group] * kept + jnp.stack(attended)
                top[group] = higher

        jax.lax.fori_loop(0, count[q], step, None)
        sums = total[...]
        out[...] = (acc[...] / jnp.where(sums == 0.0, 1.0, sums)).astype(out.dtype)

    def widened(numbers: jax.Array) -> jax.Array:
        """Return numbers in the dtype `wide`: those of eight bits by way of float32, as TPUs convert them."""
        return (numbers.astype(jnp.float32) if of_scales else numbers).astype(wide)

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, rows, width), lambda k, b, q, *_: (q, k, b, 0))

    bound = pl.BlockSpec((None, rows, 1), lambda k, b, q, *_: (q, b, 0))
    of_sinks = pl.BlockSpec((heads, rows, 1), lambda k, b, q, *_: (k, b, 0))
    (out_QKRV,) = launch.call(
        kernel,
        [*scalars, query_QKRH, *bounds_QR1, *pages, *sinks_KR1],
        [jax.ShapeDtypeStruct((Q, K, blocks * rows, V), query.dtype)],
        params=launch.mosaic_tpu(("parallel", "parallel", "arbitrary"), vmem),
        grid=(K // heads, blocks, Q),
        in_specs=[of_rows(H), bound, bound, *[launch.hbm()] * paged, *[of_sinks] * len(sinks_KR1)],
        out_specs=[of_rows(V)],
        scratch=[
            launch.copy_semaphores((2, paged)),
            *[launch.vmem((heads, rows, width), jnp.float32) for width in (1, 1, V)],
            launch.vmem((2, heads, H, tokens), key.dtype),
            *[launch.vmem((2, heads, *((V, tokens) if tokens_last else (tokens, V))), key.dtype) for _ in values],
            *[launch.vmem((2, heads, 1, tokens), jnp.float32) for _ in of_scales],
        ],
        prefetched=len(scalars),
        cost=cost,
        name="paged_attention",
    )
    return by_token(out_QKRV, T, N)
