"""Attention on TPUs, compiled by Mosaic: FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2).

Tiles of scores are transposed, [keys, queries]: the numbers per query (maximum, sum, interval) are then one row along
the lanes, reduced and broadcast along sublanes, and take no padding in memory. The last axes of the grid run in
sequence and accumulate in VMEM. One of them runs over a list of the tiles that are not masked, made before the kernel
runs (`tile_schedule.py`), so that masked tiles take no step of the grid.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, target, tuning
from kernels_pallas.flash_attention import halves, tile_schedule
from kernels_pallas.flash_attention.operands import Operands
from kernels_pallas.flash_attention.tile_schedule import ScheduledTile, TileSchedule
from kernels_pallas.flash_attention.tiles import LN_2, LOG2_E, LOWEST, FlashSettings, dot, recomputed, score_gradient

# Queries lie along the lanes, and so do keys in a block of the bias.
LANES = 128


class FlashTpuBlocks(NamedTuple):
    """A tile of `queries` × `keys` scores, computed in chunks of `chunk` keys."""

    queries: int
    keys: int
    chunk: int


class FlashTpuTiling(NamedTuple):
    """Blocks of each kernel."""

    forward: FlashTpuBlocks
    query_gradient: FlashTpuBlocks
    key_gradient: FlashTpuBlocks


# Defaults until sizes are measured: the compiler's best schedules (docs/kernels.md) among those that fit the 16 MiB of
# VMEM that every generation grants a kernel.
_DEFAULT = FlashTpuTiling(*(FlashTpuBlocks(queries, 1024, 256) for queries in (512, 512, 1024)))
_FLOAT32 = FlashTpuTiling(*[FlashTpuBlocks(256, 512, 256)] * 3)
_INTERPRETED = FlashTpuTiling(*[FlashTpuBlocks(128, 128, 64)] * 3)
# The most float32 scores of a chunk that compilers for v5e were found to hold.
_INTERMEDIATES = 7


class _TileLayout(NamedTuple):
    """The tiling of a call: its sizes, blocks and numbers of blocks, and the schedule of its tiles."""

    sizes: tuple[int, int, int, int, int, int, int]
    blocks: FlashTpuBlocks
    rows: int
    columns: int
    by_keys: bool
    schedule: TileSchedule

    @property
    def too_long(self) -> bool:
        """Return whether the schedule is too long for scalar memory."""
        return self._outer > tile_schedule.MAX_OUTER or self.schedule.tiles.size > tile_schedule.MAX_TILES

    @property
    def by_sequence(self) -> bool:
        """Return whether half of the sequences have half of the schedule."""
        return self._outer <= tile_schedule.MAX_OUTER and self.schedule.tiles.shape[0] > 1

    @property
    def _outer(self) -> int:
        return self.columns if self.by_keys else self.rows

    def cut(self, operands: Operands) -> Operands:
        """Move heads before the sequence and pad the sequence to whole blocks; padding is masked."""
        rows, columns = self.rows * self.blocks.queries, self.columns * self.blocks.keys
        start, end = operands.intervals
        bias = operands.bias
        if bias is not None:
            bias = _pad(bias, 3, columns) if bias.shape[2] == 1 else _pad(_pad(bias, 2, rows), 3, columns)
        return Operands(
            self.heads_first(operands.query, rows),
            self.heads_first(operands.key, columns),
            self.heads_first(operands.value, columns),
            self.per_query(start[:, None]),
            self.per_query(end[:, None]),
            None if operands.sinks is None else operands.sinks.astype(jnp.float32)[:, None, None],
            bias,
        )

    @staticmethod
    def heads_first(x: jax.Array, length: int) -> jax.Array:
        return _pad(jnp.swapaxes(x, 1, 2), 2, length)

    def per_query(self, x: jax.Array) -> jax.Array:
        """Return numbers per query, [B, N or 1, T], as [B, N or 1, 1, T], padded."""
        return _pad(x, 2, self.rows * self.blocks.queries)[:, :, None]


def _pad(x: jax.Array, axis: int, length: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


def _layout(operands: Operands, kernel: str) -> _TileLayout:
    _, T, S, _, _, H, V = sizes = operands.sizes
    dtype = operands.query.dtype
    if target.current().platform != "tpu":
        kernels = _INTERPRETED
    else:
        kernels = _FLOAT32 if dtype == jnp.float32 else _DEFAULT
    lengths = [pl.cdiv(length, LANES) * LANES for length in (T, S)]
    chosen = getattr(kernels, kernel)
    if kernel == "key_gradient" and operands.bias is not None and operands.bias.shape[2] > 1:
        chosen = chosen._replace(keys=min(chosen.keys, 512))  # a tile of it may be float32, and twice in VMEM
    default = FlashTpuBlocks(min(chosen.queries, lengths[0]), min(chosen.keys, lengths[1]), chosen.chunk)
    blocks = tuning.blocks(f"flash_attention_{kernel}", "mosaic_tpu", (T, S, H, V), dtype, default)
    # The measured size may come from a call without a bias, or from narrower heads.
    blocks = blocks if _held(blocks, operands, kernel) <= launch.TPU_VMEM else default
    rows, columns, by_keys = pl.cdiv(T, blocks.queries), pl.cdiv(S, blocks.keys), kernel == "key_gradient"
    schedule = tile_schedule.schedule_tiles(
        operands.start, operands.end, blocks.queries, blocks.keys, columns, by_keys=by_keys
    )
    return _TileLayout(sizes, blocks, rows, columns, by_keys, schedule)


def _held(blocks: FlashTpuBlocks, operands: Operands, kernel: str) -> int:
    """Return bytes of VMEM: two buffers of each array's block, of whole lanes, a row in 8 sublanes; the float32 sums;
    and the intermediates of a chunk of scores.
    """
    H, V = (pl.cdiv(width, LANES) * LANES for width in operands.sizes[5:])
    queries, keys, chunk = blocks
    written, sums = {
        "forward": (queries * V, queries * V),
        "query_gradient": (queries * (V + H), queries * H),  # with the output's gradient, which is read
        "key_gradient": (queries * V + keys * (H + V), keys * (H + V)),
    }[kernel]
    arrays = operands.query.dtype.itemsize * (queries * H + keys * (H + V) + written)
    rows, bias = 4 * 4 * 8 * queries, 0
    if operands.bias is not None:
        bias = operands.bias.dtype.itemsize * keys * (queries if operands.bias.shape[2] > 1 else 16)
    return 2 * (arrays + rows + bias) + 4 * (sums + _INTERMEDIATES * min(chunk, keys) * queries)


def unsupported_reason(operands: Operands) -> str | None:
    """Return why these kernels cannot serve a call, or None."""
    if operands.query.dtype == jnp.float16:
        return "TPUs have no float16"
    if max(operands.sizes[5:]) > 256:
        return f"head widths {operands.sizes[5]} and {operands.sizes[6]} are not both up to 256"
    return None


def forward(settings: FlashSettings, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, T, N, V] and log-sum-exp [B, N, T] in float32."""
    B, T, _, N, _, _, V = operands.sizes
    layout = _layout(operands, "forward")
    blocks = layout.blocks
    if layout.too_long:
        axis, calls = _split(settings, operands, layout)
        outs, sums = zip(*itertools.starmap(forward, calls), strict=True)
        return jnp.concatenate(outs, axis), jnp.concatenate(sums, 2 * axis)

    def kernel(tile: ScheduledTile, ref: Mapping[str, Any]) -> None:
        largest, total, acc = ref["largest"], ref["total"], ref["acc"]

        @pl.when(tile.is_first)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)
            if "sinks" in ref:
                sink = jnp.broadcast_to(ref["sinks"][...] * LOG2_E, largest.shape)
                largest[...] = jnp.maximum(sink, LOWEST)
                total[...] = jnp.exp2(sink - largest[...])
            else:
                largest[...] = jnp.full_like(largest, LOWEST)
                total[...] = jnp.zeros_like(total)

        def step(masked: bool) -> None:
            top, sums, out = largest[...], total[...], acc[...]
            for keys, products in _ahead(blocks, lambda keys: dot(ref["key"][keys], ref["query"][...], (1, 1))):
                scores, _ = _scores(settings, ref, masked, products, tile.inner * blocks.keys, keys)
                raised = jnp.maximum(top, jnp.max(scores, axis=0, keepdims=True))
                kept, weights = jnp.exp2(top - raised), jnp.exp2(scores - raised)
                top, sums = raised, sums * kept + jnp.sum(weights, axis=0, keepdims=True)
                value = ref["value"][keys]
                out = out * kept + dot(value, weights.astype(value.dtype), (0, 0))
            largest[...], total[...], acc[...] = top, sums, out

        tile.compute(step)

        @pl.when(tile.is_last)
        def _() -> None:
            some = total[...] != 0  # also true of NaN
            sums = jnp.where(some, total[...], 1.0)
            ref["out"][...] = (acc[...] / sums).T.astype(ref["out"].dtype)
            ref["log_sum_exp"][...] = jnp.where(some, (largest[...] + jnp.log2(sums)) * LN_2, -jnp.inf)

    out, log_sum_exp = _call(
        "forward",
        kernel,
        settings,
        layout,
        operands,
        gradients={},
        outputs={"out": ("query", V, operands.query.dtype), "log_sum_exp": ("row", 1, jnp.float32)},
        scratch={"largest": (1, blocks.queries), "total": (1, blocks.queries), "acc": (V, blocks.queries)},
        cost=operands.forward_cost(settings.unmasked_scores),
    )
    return jnp.swapaxes(out[:, :, :T], 1, 2), log_sum_exp[:, :, 0, :T]


def backward(settings: FlashSettings, operands: Operands, *rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of query, key and value.

    Rows are log_sum_exp in units of log₂ e and delta, float32 [B, N, T], and d_out.
    """
    return _query_gradient(settings, operands, *rows), *_key_gradient(settings, operands, *rows)


def _query_gradient(
    settings: FlashSettings, operands: Operands, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array
) -> jax.Array:
    """Return the gradient of the query; log_sum_exp, in units of log₂ e, and delta are float32 [B, N, T]."""
    _, T, _, _, _, H, _ = operands.sizes
    layout = _layout(operands, "query_gradient")
    blocks = layout.blocks
    if layout.too_long:
        axis, calls = _split(settings, operands, layout, log_sum_exp, delta, d_out)
        return jnp.concatenate(list(itertools.starmap(_query_gradient, calls)), axis)

    def kernel(tile: ScheduledTile, ref: Mapping[str, Any]) -> None:
        total = ref["total"]

        @pl.when(tile.is_first)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        def step(masked: bool) -> None:
            d_query = total[...]
            for keys, (products, d_weights) in _ahead(blocks, _both_products(ref)):
                scores, slope = _scores(settings, ref, masked, products, tile.inner * blocks.keys, keys)
                weights = recomputed(jnp.exp2(scores - ref["log_sum_exp"][...]))
                d_scores = score_gradient(weights, d_weights, ref["delta"][...], slope)
                key = ref["key"][keys]
                d_query += dot(key, d_scores.astype(key.dtype), (0, 0))
            total[...] = d_query

        tile.compute(step)

        @pl.when(tile.is_last)
        def _() -> None:
            ref["d_query"][...] = (total[...] * settings.scale).T.astype(ref["d_query"].dtype)

    (d_query,) = _call(
        "query_gradient",
        kernel,
        settings,
        layout,
        operands,
        gradients=_by_row(layout, log_sum_exp, delta, d_out),
        outputs={"d_query": ("query", H, operands.query.dtype)},
        scratch={"total": (H, blocks.queries)},
        cost=operands.query_cost(settings.unmasked_scores),
    )
    return jnp.swapaxes(d_query[:, :, :T], 1, 2)


def _key_gradient(
    settings: FlashSettings, operands: Operands, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of key and value: see `_query_gradient`."""
    _, _, S, N, K, H, V = operands.sizes
    layout = _layout(operands, "key_gradient")
    blocks = layout.blocks
    if layout.too_long:
        axis, calls = _split(settings, operands, layout, log_sum_exp, delta, d_out)
        d_keys, d_values = zip(*itertools.starmap(_key_gradient, calls), strict=True)
        return jnp.concatenate(d_keys, axis), jnp.concatenate(d_values, axis)

    def kernel(tile: ScheduledTile, ref: Mapping[str, Any]) -> None:
        key_total, value_total = ref["key_total"], ref["value_total"]
        head = pl.program_id(3)

        @pl.when(tile.is_first & (head == 0))
        def _() -> None:
            key_total[...] = jnp.zeros_like(key_total)
            value_total[...] = jnp.zeros_like(value_total)

        def step(masked: bool) -> None:
            d_out, query = ref["d_out"][...], ref["query"][...]
            for keys, (products, d_weights) in _ahead(blocks, _both_products(ref)):
                scores, slope = _scores(settings, ref, masked, products, tile.outer * blocks.keys, keys)
                weights = recomputed(jnp.exp2(scores - ref["log_sum_exp"][...]))
                value_total[keys] += dot(weights.astype(d_out.dtype), d_out, (1, 0))
                d_scores = score_gradient(weights, d_weights, ref["delta"][...], slope)
                key_total[keys] += dot(d_scores.astype(query.dtype), query, (1, 0))

        tile.compute(step)

        @pl.when(tile.is_last & (head == N // K - 1))
        def _() -> None:
            ref["d_key"][...] = (key_total[...] * settings.scale).astype(ref["d_key"].dtype)
            ref["d_value"][...] = value_total[...].astype(ref["d_value"].dtype)

    d_key, d_value = _call(
        "key_gradient",
        kernel,
        settings,
        layout,
        operands,
        gradients=_by_row(layout, log_sum_exp, delta, d_out),
        outputs={"d_key": ("key", H, operands.key.dtype), "d_value": ("key", V, operands.value.dtype)},
        scratch={"key_total": (blocks.keys, H), "value_total": (blocks.keys, V)},
        cost=operands.key_cost(settings.unmasked_scores),
    )
    return jnp.swapaxes(d_key[:, :, :S], 1, 2), jnp.swapaxes(d_value[:, :, :S], 1, 2)


def _by_row(layout: _TileLayout, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array) -> dict[str, tuple]:
    return {
        "log_sum_exp": ("row", layout.per_query(log_sum_exp)),
        "delta": ("row", layout.per_query(delta)),
        "d_out": ("query", layout.heads_first(d_out, layout.rows * layout.blocks.queries)),
    }


def _ahead(blocks: FlashTpuBlocks, products: Callable[[slice], Any]) -> Iterator[tuple[slice, Any]]:
    """Yield each chunk of a tile's keys with its `products`; the next chunk's are issued before the caller uses these.

    The compiler overlaps the matrix unit with other units only where their instructions are near each other.
    """
    chunks = [slice(first, min(first + blocks.chunk, blocks.keys)) for first in range(0, blocks.keys, blocks.chunk)]
    coming = products(chunks[0])
    for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
        made, coming = coming, products(following) if following else None
        yield chunk, made


def _both_products(ref: Mapping[str, Any]) -> Callable[[slice], tuple[jax.Array, jax.Array]]:
    """Return a function of some keys: the products of their scores and of their weights' gradients with all queries."""
    return lambda keys: (
        dot(ref["key"][keys], ref["query"][...], (1, 1)),
        dot(ref["value"][keys], ref["d_out"][...], (1, 1)),
    )


def _scores(
    settings: FlashSettings, ref: Mapping[str, Any], masked: bool, products: jax.Array, first_key: Any, keys: slice
) -> tuple:
    """Return scores [keys, queries] of some keys of a tile, −∞ where masked, and their slope."""
    bias = ref["bias"][:, keys].astype(jnp.float32).T if "bias" in ref else None
    values, factor, slope = settings.factored(products, bias)
    scores = values * factor
    if masked:
        index, first = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0), first_key + keys.start
        start, end = ref["start"][...] - first, ref["end"][...] - first  # a row, where the index is a tile
        scores = jnp.where((start <= index) & (index < end), scores, -jnp.inf)
    return scores, slope


def _call(
    name: str,
    kernel: Callable[..., None],
    settings: FlashSettings,
    layout: _TileLayout,
    operands: Operands,
    *,
    gradients: Mapping[str, tuple[str, jax.Array]],
    outputs: Mapping[str, tuple[str, int, Any]],
    scratch: Mapping[str, tuple[int, int]],
    cost: launch.KernelCost,
) -> list[jax.Array]:
    """Run a kernel that takes its references by name on the unmasked tiles of scores, one after the other.

    Tiles go by block of queries, or with `by_keys` by block of keys. Other arrays and outputs come with their kind:
    "query", "row" (one number per query) or "key".
    """
    (B, T, S, N, K, H, V), blocks, rows, columns, by_keys, (tiles, steps) = layout
    group = N // K
    inner = group if by_keys else 1  # the heads of a group add to the same keys' gradients
    listed = tiles.shape[1] if tiles.shape[0] > 1 else 0
    operands = layout.cut(operands)

    def of_tile(index: Callable[..., tuple]) -> Callable[..., tuple]:
        """Return an index map from a function of (b, n, i, j), where (i, j) is the tile of scores."""

        def at(b: Any, heads: Any, step: Any, g: Any, tiles: Any) -> tuple:
            tile = ScheduledTile(tiles[b * listed + step])
            row, column = (tile.inner, tile.outer) if by_keys else (tile.outer, tile.inner)
            return index(b, heads * inner + g, row, column)

        return at

    def spec(kind: str, width: int) -> pl.BlockSpec:
        match kind:
            case "query":
                return pl.BlockSpec((None, None, blocks.queries, width), of_tile(lambda b, n, i, j: (b, n, i, 0)))
            case "key":
                return pl.BlockSpec((None, None, blocks.keys, width), of_tile(lambda b, n, i, j: (b, n // group, j, 0)))
            case "row":
                return pl.BlockSpec((None, None, 1, blocks.queries), of_tile(lambda b, n, i, j: (b, n, 0, i)))
        raise ValueError(kind)

    interval = pl.BlockSpec((None, None, 1, blocks.queries), of_tile(lambda b, n, i, j: (b, 0, 0, i)))
    inputs = {
        "query": (operands.query, spec("query", H)),
        "key": (operands.key, spec("key", H)),
        "value": (operands.value, spec("key", V)),
        "start": (operands.start, interval),
        "end": (operands.end, interval),
    }
    if operands.sinks is not None and not gradients:
        inputs["sinks"] = operands.sinks, pl.BlockSpec((None, 1, 1), of_tile(lambda b, n, i, j: (n, 0, 0)))
    if operands.bias is not None:
        many_b, many_n, many_t = (size > 1 for size in operands.bias.shape[:3])
        inputs["bias"] = (
            operands.bias,
            pl.BlockSpec(
                (None, None, blocks.queries if many_t else 1, blocks.keys),
                of_tile(lambda b, n, i, j: (b * many_b, n * many_n, i * many_t, j)),
            ),
        )
    inputs |= {key: (x, spec(kind, x.shape[-1])) for key, (kind, x) in gradients.items()}
    whole = {
        "query": lambda width: (B, N, rows * blocks.queries, width),
        "key": lambda width: (B, K, columns * blocks.keys, width),
        "row": lambda width: (B, N, 1, rows * blocks.queries),
    }
    names = [*inputs, *outputs, *scratch]

    def run(tiles: Any, *refs: Any) -> None:
        tile = ScheduledTile(tiles[pl.program_id(0) * listed + pl.program_id(2)])
        kernel(tile, dict(zip(names, refs, strict=True)))

    return launch.call(
        run,
        [tiles.reshape(-1), *(x for x, _ in inputs.values())],
        [jax.ShapeDtypeStruct(whole[kind](width), dtype) for kind, width, dtype in outputs.values()],
        params=launch.mosaic_tpu(("parallel", "parallel", "arbitrary", "arbitrary")),
        grid=(B, N // inner, steps, inner),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec(kind, width) for kind, width, _ in outputs.values()],
        scratch=[launch.vmem(shape, jnp.float32) for shape in scratch.values()],
        prefetched=1,
        cost=cost,
        name=f"flash_attention_{name}",
    )


def _split(
    settings: FlashSettings, operands: Operands, layout: _TileLayout, *rows: jax.Array
) -> tuple[int, Iterator[tuple]]:
    """Split a call whose schedule is too long in two; return the axis of the results to join, and both calls."""
    if layout.by_sequence:
        return 0, halves.of_sequences(settings, operands, *rows)
    if layout.by_keys:
        return 1, halves.of_keys(settings, operands, pl.cdiv(layout.columns, 2) * layout.blocks.keys, *rows)
    return 1, halves.of_queries(settings, operands, pl.cdiv(layout.rows, 2) * layout.blocks.queries, *rows)
