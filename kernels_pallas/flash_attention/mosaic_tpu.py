"""Attention on TPUs, compiled by Mosaic: FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2).

Tiles of scores are transposed, [keys, queries]: the numbers per query (maximum, sum, interval) are then one row along
the lanes, reduced and broadcast along sublanes, and take no padding in memory. The last axes of the grid run in
sequence and accumulate in VMEM. One of them runs over a list of the tiles that are not masked, made before the kernel
runs (`tile_schedule.py`), so that masked tiles take no step of the grid.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, target, tuning
from kernels_pallas.core.attention.scores import LN_2, LOG2_E, LOWEST, FlashSettings, dot, recomputed, score_gradient
from kernels_pallas.core.tiles import LANES  # queries lie along these, and so do keys in a block of the bias
from kernels_pallas.flash_attention import halves, tile_schedule
from kernels_pallas.flash_attention.operands import Operands
from kernels_pallas.flash_attention.tile_schedule import ScheduledTile, TileSchedule


class FlashTpuBlocks(NamedTuple):
    """A tile of `queries` × `keys` scores, computed in chunks of `chunk` keys."""

    queries: int
    keys: int
    chunk: int


class FlashTpuTiling(NamedTuple):
    """Blocks of each kernel."""

    forward: FlashTpuBlocks
    gradients: FlashTpuBlocks


# Defaults until sizes are measured: the compiler's best schedules (docs/kernels.md) among those that fit the 16 MiB of
# VMEM that every generation grants a kernel.
_DEFAULT = FlashTpuTiling(*[FlashTpuBlocks(512, 1024, 256)] * 2)
_FLOAT32 = FlashTpuTiling(*[FlashTpuBlocks(256, 512, 256)] * 2)
_INTERPRETED = FlashTpuTiling(*[FlashTpuBlocks(128, 128, 64)] * 2)
# The most float32 scores of a chunk that compilers for v5e were found to hold.
_INTERMEDIATES = 7


class _TileLayout(NamedTuple):
    """The tiling of a call: its sizes, blocks and numbers of blocks, the schedule of its tiles, and bytes of VMEM."""

    sizes: tuple[int, int, int, int, int, int, int]
    blocks: FlashTpuBlocks
    rows: int
    columns: int
    schedule: TileSchedule
    vmem: int

    @property
    def too_many_rows(self) -> bool:
        """Return whether a tile cannot name its block of queries."""
        return self.rows > tile_schedule.MAX_OUTER

    @property
    def too_long(self) -> bool:
        """Return whether the schedule is too long for scalar memory."""
        return self.too_many_rows or self.schedule.tiles.size > tile_schedule.MAX_TILES

    @property
    def by_sequence(self) -> bool:
        """Return whether half of the sequences have half of the schedule."""
        return not self.too_many_rows and self.schedule.tiles.shape[0] > 1

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


def _layout(operands: Operands, kernel: str, written: Any) -> _TileLayout:
    """Return the layout of a kernel that writes its results in a dtype."""
    _, T, S, _, _, H, V = sizes = operands.sizes
    dtype = operands.query.dtype
    if target.current().platform != "tpu":
        kernels = _INTERPRETED
    else:
        kernels = _FLOAT32 if dtype == jnp.float32 else _DEFAULT
    chosen, lanes = getattr(kernels, kernel), (LANES, LANES * tile_schedule.PARTS)  # a part of a bias has whole lanes
    lengths = [pl.cdiv(length, each) * each for length, each in zip((T, S), lanes, strict=True)]
    default = chosen._replace(queries=min(chosen.queries, lengths[0]), keys=min(chosen.keys, lengths[1]))
    blocks = tuning.blocks(f"flash_attention_{kernel}", "mosaic_tpu", (T, S, H, V), dtype, default)
    # The measured size may come from a call without a bias, or from narrower heads.
    fits = _held(blocks, operands, kernel) <= launch.TPU_VMEM and blocks.keys % lanes[1] == 0
    blocks = blocks if fits else default
    rows, columns = pl.cdiv(T, blocks.queries), pl.cdiv(S, blocks.keys)
    schedule = tile_schedule.schedule_tiles(operands.start, operands.end, blocks.queries, blocks.keys, columns)
    vmem = _held(blocks, operands, kernel)
    if kernel == "gradients":  # of all keys of a head: float32 sums, and results
        itemsize = 4 + jnp.dtype(written).itemsize
        vmem += itemsize * columns * blocks.keys * sum(pl.cdiv(width, LANES) * LANES for width in (H, V))
    return _TileLayout(sizes, blocks, rows, columns, schedule, vmem)


def _held(blocks: FlashTpuBlocks, operands: Operands, kernel: str) -> int:
    """Return bytes of VMEM for a tile: two buffers of each array's block, of whole lanes, a row in 8 sublanes; the
    float32 sums of its queries; and the intermediates of a chunk of scores.
    """
    H, V = (pl.cdiv(width, LANES) * LANES for width in operands.sizes[5:])
    queries, keys, chunk = blocks
    itemsize = operands.query.dtype.itemsize
    # Backward with the output's gradient, which is read, and the queries', which may be float32, and added to another.
    more, sums = {
        "forward": (itemsize * V, V),
        "gradients": (itemsize * V + 2 * 4 * H, H),
    }[kernel]
    arrays = itemsize * (queries * H + keys * (H + V)) + queries * more
    rows, bias = 4 * 4 * 8 * queries, 0
    if operands.bias is not None:
        bias = operands.bias.dtype.itemsize * keys * (queries if operands.bias.shape[2] > 1 else 16)
    return 2 * (arrays + rows + bias) + 4 * queries * (sums + _INTERMEDIATES * min(chunk, keys))


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
    layout = _layout(operands, "forward", operands.query.dtype)
    blocks = layout.blocks
    if layout.too_long:
        if layout.by_sequence:
            axis, calls = 0, halves.of_sequences(settings, operands)
        else:
            middle = pl.cdiv(layout.rows, 2) * blocks.queries
            axis, calls = 1, halves.of_queries(settings, operands, middle)
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

        def step(masked: bool, part: Any, parts: int) -> None:
            top, sums, out = largest[...], total[...], acc[...]
            for chunk, products in _ahead(_chunks(blocks, tile, part, parts), _products(ref)):
                scores, _ = _scores(settings, ref, masked, products, chunk)
                raised = jnp.maximum(top, jnp.max(scores, axis=0, keepdims=True))
                kept, weights = jnp.exp2(top - raised), jnp.exp2(scores - raised)
                top, sums = raised, sums * kept + jnp.sum(weights, axis=0, keepdims=True)
                value = ref["value"][chunk.keys]
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


def backward(
    settings: FlashSettings, operands: Operands, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of query, key and value.

    log_sum_exp, in units of log₂ e, and delta are float32 [B, N, T].
    """
    return _gradients(settings, operands, operands.query.dtype, log_sum_exp, delta, d_out)


def _gradients(
    settings: FlashSettings,
    operands: Operands,
    dtype: Any,
    log_sum_exp: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
    earlier: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients in a dtype; that of the query includes `earlier`, float32, of other keys.

    The sums of all keys of a head are in VMEM, so that every product of scores serves all three gradients.
    """
    _, T, S, N, K, H, V = operands.sizes
    layout = _layout(operands, "gradients", dtype)
    blocks, length = layout.blocks, layout.columns * layout.blocks.keys
    rows = (log_sum_exp, delta, d_out) if earlier is None else (log_sum_exp, delta, d_out, earlier)
    if layout.too_long or (layout.vmem > _granted() and layout.columns > 1):
        return _gradients_of_halves(settings, operands, dtype, layout, *rows)

    def kernel(tile: ScheduledTile, ref: Mapping[str, Any]) -> None:
        total = ref["total"]
        head, at_step = pl.program_id(2), pl.program_id(3)

        def each_block(of: Callable[[Any], None]) -> None:
            """Call of(slice) on each block of keys, in a loop: all of them would be long code."""
            jax.lax.fori_loop(0, layout.columns, lambda j, _: of(pl.ds(j * blocks.keys, blocks.keys)), None)

        @pl.when((head == 0) & (at_step == 0))
        def _() -> None:
            def clear(keys: Any) -> None:
                ref["key_total"][keys] = jnp.zeros((blocks.keys, H), jnp.float32)
                ref["value_total"][keys] = jnp.zeros((blocks.keys, V), jnp.float32)

            each_block(clear)

        @pl.when(tile.is_first)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        def step(masked: bool, part: Any, parts: int) -> None:
            d_out, query = ref["d_out"][...], ref["query"][...]
            d_query = total[...]
            for chunk, (products, d_weights) in _ahead(_chunks(blocks, tile, part, parts), _both_products(ref)):
                scores, slope = _scores(settings, ref, masked, products, chunk)
                weights = recomputed(jnp.exp2(scores - ref["log_sum_exp"][...]))
                at = pl.ds(chunk.first, chunk.keys.size)
                ref["value_total"][at] += dot(weights.astype(d_out.dtype), d_out, (1, 0))
                d_scores = score_gradient(weights, d_weights, ref["delta"][...], slope).astype(query.dtype)
                ref["key_total"][at] += dot(d_scores, query, (1, 0))
                d_query += dot(ref["key"][chunk.keys], d_scores, (0, 0))
            total[...] = d_query

        tile.compute(step)

        @pl.when(tile.is_last)
        def _() -> None:
            d_query = (total[...] * settings.scale).T
            ref["d_query"][...] = (d_query + ref["earlier"][...] if "earlier" in ref else d_query).astype(dtype)

        @pl.when((head == N // K - 1) & (at_step == pl.num_programs(3) - 1))
        def _() -> None:
            def write(keys: Any) -> None:
                ref["d_key"][keys] = (ref["key_total"][keys] * settings.scale).astype(dtype)
                ref["d_value"][keys] = ref["value_total"][keys].astype(dtype)

            each_block(write)

    def heads_first(x: jax.Array) -> jax.Array:
        return layout.heads_first(x, layout.rows * blocks.queries)

    gradients = {
        "log_sum_exp": ("row", layout.per_query(log_sum_exp)),
        "delta": ("row", layout.per_query(delta)),
        "d_out": ("query", heads_first(d_out)),
    }
    if earlier is not None:
        gradients["earlier"] = "query", heads_first(earlier)
    d_query, d_key, d_value = _call(
        "gradients",
        kernel,
        settings,
        layout,
        operands,
        gradients=gradients,
        outputs={"d_query": ("query", H, dtype), "d_key": ("keys", H, dtype), "d_value": ("keys", V, dtype)},
        scratch={"total": (H, blocks.queries), "key_total": (length, H), "value_total": (length, V)},
        cost=operands.backward_cost(settings.unmasked_scores, dtype),
    )
    d_query, d_key, d_value = (jnp.swapaxes(x, 1, 2) for x in (d_query, d_key, d_value))
    return d_query[:, :T], d_key[:, :S], d_value[:, :S]


def _gradients_of_halves(
    settings: FlashSettings, operands: Operands, dtype: Any, layout: _TileLayout, *rows: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of a call that is too long for one kernel, by two calls one after the other."""
    if layout.by_sequence and layout.too_long:
        calls = halves.of_sequences(settings, operands, *rows)
        parts = [_gradients(*call[:2], dtype, *call[2:]) for call in calls]
        d_query, d_key, d_value = (jnp.concatenate(x) for x in zip(*parts, strict=True))
    elif layout.too_many_rows:
        calls = halves.of_queries(settings, operands, pl.cdiv(layout.rows, 2) * layout.blocks.queries, *rows)
        before, after = (_gradients(*call[:2], jnp.float32, *call[2:]) for call in calls)
        d_query, d_key, d_value = jnp.concatenate([before[0], after[0]], 1), before[1] + after[1], before[2] + after[2]
    else:
        first, second = halves.of_keys(settings, operands, pl.cdiv(layout.columns, 2) * layout.blocks.keys, *rows)
        earlier, *of_first = _gradients(*first[:2], jnp.float32, *first[2:])
        d_query, *of_second = _gradients(*second[:2], jnp.float32, *second[2:5], earlier)
        d_key, d_value = (jnp.concatenate(x, 1) for x in zip(of_first, of_second, strict=True))
    return d_query.astype(dtype), d_key.astype(dtype), d_value.astype(dtype)


def _granted() -> float:
    """Return the bytes of VMEM that a kernel may ask for: three quarters of a core's, or what any kernel gets; without
    end in interpretation.
    """
    chip = target.current()
    return max(launch.TPU_VMEM, chip.scratchpad * 3 // 4) if chip.platform == "tpu" else math.inf


class _Chunk(NamedTuple):
    """A chunk of keys: where they are in the tile, and the first of them among all."""

    keys: Any
    first: Any


def _chunks(blocks: FlashTpuBlocks, tile: ScheduledTile, part: Any, parts: int) -> list[_Chunk]:
    """Return the chunks of a tile's `parts` from a part on."""
    length = blocks.keys // tile_schedule.PARTS
    before = part * length if isinstance(part, int) else pl.multiple_of(part * length, length)
    first, end, size = pl.multiple_of(tile.inner * blocks.keys, blocks.keys) + before, parts * length, blocks.chunk
    return [_Chunk(pl.ds(before + at, min(size, end - at)), first + at) for at in range(0, end, size)]


def _ahead(chunks: Sequence[_Chunk], products: Callable[[_Chunk], Any]) -> Iterator[tuple[_Chunk, Any]]:
    """Yield each chunk with its `products`; the next chunk's are issued before the caller uses these.

    The compiler overlaps the matrix unit with other units only where their instructions are near each other.
    """
    coming = products(chunks[0])
    for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
        made, coming = coming, products(following) if following else None
        yield chunk, made


def _products(ref: Mapping[str, Any]) -> Callable[[_Chunk], jax.Array]:
    """Return a function of a chunk: the products of its scores."""
    return lambda chunk: dot(ref["key"][chunk.keys], ref["query"][...], (1, 1))


def _both_products(ref: Mapping[str, Any]) -> Callable[[_Chunk], tuple[jax.Array, jax.Array]]:
    """Return a function of a chunk: the products of its scores and of the gradients of its weights."""
    scores = _products(ref)
    return lambda chunk: (scores(chunk), dot(ref["value"][chunk.keys], ref["d_out"][...], (1, 1)))


def _scores(
    settings: FlashSettings, ref: Mapping[str, Any], masked: bool, products: jax.Array, chunk: _Chunk
) -> tuple[jax.Array, jax.Array | None]:
    """Return scores [keys, queries] of a chunk, −∞ where masked, and their slope."""
    bias = ref["bias"][:, chunk.keys].astype(jnp.float32).T if "bias" in ref else None
    values, factor, slope = settings.factored(products, bias)
    scores = values * factor
    if masked:
        start, end = ref["start"][...], ref["end"][...]
        index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        # One comparison as unsigned numbers, of which keys before the start are the largest: of signed ones less 2³¹.
        lowest = jnp.iinfo(jnp.int32).min
        from_start, length = index - (start - chunk.first + lowest), jnp.maximum(end - start, 0) + lowest
        scores = jnp.where(from_start < length, scores, -jnp.inf)
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

    Other arrays and outputs come with their kind: "query", "row" (one number per query), "key" or "keys" (all keys of
    a head, once in VMEM).
    """
    (B, T, S, N, K, H, V), blocks, rows, columns, (tiles, steps), vmem = layout
    group = N // K
    listed = tiles.shape[1] if tiles.shape[0] > 1 else 0
    operands = layout.cut(operands)

    def of_tile(index: Callable[..., tuple]) -> Callable[..., tuple]:
        """Return an index map from a function of (b, n, i, j), where (i, j) is the tile of scores."""

        def at(b: Any, k: Any, g: Any, step: Any, tiles: Any) -> tuple:
            tile = ScheduledTile(tiles[b * listed + step])
            return index(b, k * group + g, tile.outer, tile.inner)

        return at

    def spec(kind: str, width: int) -> pl.BlockSpec:
        match kind:
            case "query":
                return pl.BlockSpec((None, None, blocks.queries, width), of_tile(lambda b, n, i, j: (b, n, i, 0)))
            case "key":
                return pl.BlockSpec((None, None, blocks.keys, width), of_tile(lambda b, n, i, j: (b, n // group, j, 0)))
            case "keys":
                at = of_tile(lambda b, n, i, j: (b, n // group, 0, 0))
                return pl.BlockSpec((None, None, columns * blocks.keys, width), at, pipeline_mode=pl.Buffered(1))
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
        "keys": lambda width: (B, K, columns * blocks.keys, width),
        "row": lambda width: (B, N, 1, rows * blocks.queries),
    }
    names = [*inputs, *outputs, *scratch]

    def run(tiles: Any, *refs: Any) -> None:
        tile = ScheduledTile(tiles[pl.program_id(0) * listed + pl.program_id(3)])
        kernel(tile, dict(zip(names, refs, strict=True)))

    return launch.call(
        run,
        [tiles.reshape(-1), *(x for x, _ in inputs.values())],
        [jax.ShapeDtypeStruct(whole[kind](width), dtype) for kind, width, dtype in outputs.values()],
        # The heads of a group add to the gradients of the same keys.
        params=launch.mosaic_tpu(("parallel", "parallel", "arbitrary" if gradients else "parallel", "arbitrary"), vmem),
        grid=(B, K, group, steps),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec(kind, width) for kind, width, _ in outputs.values()],
        scratch=[launch.vmem(shape, jnp.float32) for shape in scratch.values()],
        prefetched=1,
        cost=cost,
        name=f"flash_attention_{name}",
    )
