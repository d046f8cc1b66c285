"""Attention on TPUs, compiled by Mosaic: FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2).

Tiles of scores are transposed, [keys, queries]: what belongs to a query (maximum, sum, interval) is then one row along
the lanes, reduced and spread along sublanes, and takes no padding in memory. The last axes of the grid run in sequence
and add up in VMEM. Blocks that nobody sees are neither computed nor fetched: their index is that of a neighbour.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import launch, target, tuning
from kernels_pallas.flash_attention.blocks import Ranges, key_ranges, query_ranges
from kernels_pallas.flash_attention.operands import Operands
from kernels_pallas.flash_attention.tiles import LN_2, LOG2_E, LOWEST, Settings, dot, score_gradient

# Queries lie along the lanes, and so do keys in a block of the bias.
LANES = 128


class Blocks(NamedTuple):
    """Scores are computed in tiles of `queries` × `keys`."""

    queries: int
    keys: int


class Kernels(NamedTuple):
    """Blocks of the three."""

    forward: Blocks
    query_gradient: Blocks
    key_gradient: Blocks


# Until they are measured: such that a tile's float32 intermediates fit the 16 MiB of VMEM that every generation grants
# a kernel.
_DEFAULT = Kernels(Blocks(512, 1024), Blocks(512, 512), Blocks(512, 512))
_FLOAT32 = Kernels(*[Blocks(256, 512)] * 3)
_INTERPRETED = Kernels(*[Blocks(128, 128)] * 3)


class _Layout(NamedTuple):
    """How a call is cut: its sizes, blocks and numbers of blocks."""

    sizes: tuple[int, int, int, int, int, int, int]
    blocks: Blocks
    rows: int
    columns: int

    def cut(self, operands: Operands) -> Operands:
        """Heads before the sequence, which is filled up to whole blocks: what is added sees nothing and is not seen."""
        rows, columns = self.rows * self.blocks.queries, self.columns * self.blocks.keys
        bias = operands.bias
        if bias is not None:
            bias = _pad(bias, 3, columns) if bias.shape[2] == 1 else _pad(_pad(bias, 2, rows), 3, columns)
        return Operands(
            self.heads_first(operands.query, rows),
            self.heads_first(operands.key, columns),
            self.heads_first(operands.value, columns),
            self.per_query(operands.start[:, None]),
            self.per_query(operands.end[:, None]),
            None if operands.sinks is None else operands.sinks.astype(jnp.float32)[:, None, None],
            bias,
        )

    @staticmethod
    def heads_first(x: jax.Array, length: int) -> jax.Array:
        return _pad(jnp.swapaxes(x, 1, 2), 2, length)

    def per_query(self, x: jax.Array) -> jax.Array:
        """[B, N or 1, T] → [B, N or 1, 1, T], filled up."""
        return _pad(x, 2, self.rows * self.blocks.queries)[:, :, None]


def _pad(x: jax.Array, axis: int, length: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


def _layout(operands: Operands, kernel: str) -> _Layout:
    _, T, S, _, _, H, V = sizes = operands.sizes
    dtype = operands.query.dtype
    if target.current().platform != "tpu":
        kernels = _INTERPRETED
    else:
        kernels = _FLOAT32 if dtype == jnp.float32 else _DEFAULT
    lengths = (pl.cdiv(length, LANES) * LANES for length in (T, S))
    default = Blocks(*(min(block, most) for block, most in zip(getattr(kernels, kernel), lengths, strict=True)))
    blocks = tuning.blocks(f"flash_attention_{kernel}", "mosaic_tpu", (T, S, H, V), dtype, default)
    return _Layout(sizes, blocks, pl.cdiv(T, blocks.queries), pl.cdiv(S, blocks.keys))


def refusal(operands: Operands) -> str | None:
    """Why these kernels cannot serve a call."""
    if operands.query.dtype == jnp.float16:
        return "TPUs have no float16"
    if max(operands.sizes[5:]) > 256:
        return f"head widths {operands.sizes[5]} and {operands.sizes[6]} are not both up to 256"
    return None


def forward(settings: Settings, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, V] and log-sum-exp [B, N, T] in float32."""
    B, T, _, N, _, _, V = operands.sizes
    layout = _layout(operands, "forward")
    blocks, columns = layout.blocks, layout.columns

    def kernel(at: _Block, ref: Mapping[str, Any]) -> None:
        largest, total, mixed = ref["largest"], ref["total"], ref["mixed"]
        j = pl.program_id(3)

        @pl.when(j == 0)
        def _() -> None:
            mixed[...] = jnp.zeros_like(mixed)
            if "sinks" in ref:
                sink = jnp.broadcast_to(ref["sinks"][...] * LOG2_E, largest.shape)
                largest[...] = jnp.maximum(sink, LOWEST)
                total[...] = jnp.exp2(sink - largest[...])
            else:
                largest[...] = jnp.full_like(largest, LOWEST)
                total[...] = jnp.zeros_like(total)

        def step(masked: bool) -> None:
            scores, _ = _scores(settings, ref, masked, j * blocks.keys)
            raised = jnp.maximum(largest[...], jnp.max(scores, axis=0, keepdims=True))
            kept, weights = jnp.exp2(largest[...] - raised), jnp.exp2(scores - raised)
            largest[...] = raised
            total[...] = total[...] * kept + jnp.sum(weights, axis=0, keepdims=True)
            value = ref["value"][...]
            mixed[...] = mixed[...] * kept + dot(value, weights.astype(value.dtype), (0, 0))

        at.visit(step)

        @pl.when(j == columns - 1)
        def _() -> None:
            some = total[...] > 0
            sums = jnp.where(some, total[...], 1.0)
            ref["out"][...] = (mixed[...] / sums).T.astype(ref["out"].dtype)
            ref["log_sum_exp"][...] = jnp.where(some, (largest[...] + jnp.log2(sums)) * LN_2, -jnp.inf)

    ranges = key_ranges(operands.start, operands.end, *blocks)
    out, log_sum_exp = _call(
        "forward",
        kernel,
        settings,
        layout,
        ranges,
        operands=layout.cut(operands),
        gradients={},
        outputs={"out": ("query", V, operands.query.dtype), "log_sum_exp": ("row", 1, jnp.float32)},
        scratch={"largest": (1, blocks.queries), "total": (1, blocks.queries), "mixed": (V, blocks.queries)},
        by_keys=False,
        cost=operands.forward_cost(settings.seen),
    )
    return jnp.swapaxes(out[:, :, :T], 1, 2), log_sum_exp[:, :, 0, :T]


def query_gradient(
    settings: Settings, operands: Operands, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array
) -> jax.Array:
    """Gradient of the query; log_sum_exp in units of log₂ e, and delta: float32 [B, N, T]."""
    B, T, _, N, _, H, _ = operands.sizes
    layout = _layout(operands, "query_gradient")
    blocks, columns = layout.blocks, layout.columns

    def kernel(at: _Block, ref: Mapping[str, Any]) -> None:
        total, j = ref["total"], pl.program_id(3)

        @pl.when(j == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        def step(masked: bool) -> None:
            scores, slope = _scores(settings, ref, masked, j * blocks.keys)
            weights = jnp.exp2(scores - ref["log_sum_exp"][...])
            d_weights = dot(ref["value"][...], ref["d_out"][...], (1, 1))
            d_scores = score_gradient(weights, d_weights, ref["delta"][...], slope)
            key = ref["key"][...]
            total[...] += dot(key, d_scores.astype(key.dtype), (0, 0))

        at.visit(step)

        @pl.when(j == columns - 1)
        def _() -> None:
            ref["d_query"][...] = (total[...] * settings.scale).T.astype(ref["d_query"].dtype)

    (d_query,) = _call(
        "query_gradient",
        kernel,
        settings,
        layout,
        key_ranges(operands.start, operands.end, *blocks),
        operands=layout.cut(operands),
        gradients=_by_row(layout, log_sum_exp, delta, d_out),
        outputs={"d_query": ("query", H, operands.query.dtype)},
        scratch={"total": (H, blocks.queries)},
        by_keys=False,
        cost=operands.query_cost(settings.seen),
    )
    return jnp.swapaxes(d_query[:, :, :T], 1, 2)


def key_gradient(
    settings: Settings, operands: Operands, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of key and value: see `query_gradient`."""
    B, _, S, N, K, H, V = operands.sizes
    layout = _layout(operands, "key_gradient")
    blocks, rows = layout.blocks, layout.rows

    def kernel(at: _Block, ref: Mapping[str, Any]) -> None:
        key_total, value_total = ref["key_total"], ref["value_total"]
        first_key, head, i = pl.program_id(2) * blocks.keys, pl.program_id(3), pl.program_id(4)

        @pl.when((head == 0) & (i == 0))
        def _() -> None:
            key_total[...] = jnp.zeros_like(key_total)
            value_total[...] = jnp.zeros_like(value_total)

        def step(masked: bool) -> None:
            scores, slope = _scores(settings, ref, masked, first_key)
            weights = jnp.exp2(scores - ref["log_sum_exp"][...])
            d_out, query = ref["d_out"][...], ref["query"][...]
            value_total[...] += dot(weights.astype(d_out.dtype), d_out, (1, 0))
            d_weights = dot(ref["value"][...], d_out, (1, 1))
            d_scores = score_gradient(weights, d_weights, ref["delta"][...], slope)
            key_total[...] += dot(d_scores.astype(query.dtype), query, (1, 0))

        at.visit(step)

        @pl.when((head == N // K - 1) & (i == rows - 1))
        def _() -> None:
            ref["d_key"][...] = (key_total[...] * settings.scale).astype(ref["d_key"].dtype)
            ref["d_value"][...] = value_total[...].astype(ref["d_value"].dtype)

    d_key, d_value = _call(
        "key_gradient",
        kernel,
        settings,
        layout,
        query_ranges(key_ranges(operands.start, operands.end, *blocks), layout.columns),
        operands=layout.cut(operands),
        gradients=_by_row(layout, log_sum_exp, delta, d_out),
        outputs={"d_key": ("key", H, operands.key.dtype), "d_value": ("key", V, operands.value.dtype)},
        scratch={"key_total": (blocks.keys, H), "value_total": (blocks.keys, V)},
        by_keys=True,
        cost=operands.key_cost(settings.seen),
    )
    return jnp.swapaxes(d_key[:, :, :S], 1, 2), jnp.swapaxes(d_value[:, :, :S], 1, 2)


def _by_row(layout: _Layout, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array) -> dict[str, tuple]:
    return {
        "log_sum_exp": ("row", layout.per_query(log_sum_exp)),
        "delta": ("row", layout.per_query(delta)),
        "d_out": ("query", layout.heads_first(d_out, layout.rows * layout.blocks.queries)),
    }


def _scores(settings: Settings, ref: Mapping[str, Any], masked: bool, first_key: Any) -> tuple:
    """Scores [keys, queries] of the tile, −∞ where a key is not seen, and their slope."""
    products = dot(ref["key"][...], ref["query"][...], (1, 1))
    bias = ref["bias"][...].astype(jnp.float32).T if "bias" in ref else None
    values, factor, slope = settings.factored(products, bias)
    scores = values * factor
    if masked:
        index = first_key + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        scores = jnp.where((ref["start"][...] <= index) & (index < ref["end"][...]), scores, -jnp.inf)
    return scores, slope


class _Block:
    """The tile that a step of the grid is at, among those of its row: `ranges` is what a kernel prefetched."""

    def __init__(self, ranges: Any, row: Any, column: Any):
        self.column = column
        self.first, self.full, self.full_end, self.last = (ranges[row * 4 + n] for n in range(4))

    def visit(self, step: Callable[[bool], None]) -> None:
        """step(masked), unless nothing is seen."""
        seen = (self.first <= self.column) & (self.column < self.last)
        whole = (self.full <= self.column) & (self.column < self.full_end)
        pl.when(seen & whole)(lambda: step(False))
        pl.when(seen & ~whole)(lambda: step(True))

    @property
    def fetched(self) -> Any:
        """The nearest tile that is seen: an index that stays the same is not fetched again."""
        return jnp.clip(self.column, self.first, jnp.maximum(self.last - 1, self.first))


def _call(
    name: str,
    kernel: Callable[..., None],
    settings: Settings,
    layout: _Layout,
    ranges: Ranges,
    *,
    operands: Operands,
    gradients: Mapping[str, tuple[str, jax.Array]],
    outputs: Mapping[str, tuple[str, int, Any]],
    scratch: Mapping[str, tuple[int, int]],
    by_keys: bool,
    cost: launch.Cost,
) -> list[jax.Array]:
    """Run a kernel that takes its references by name, on a grid over blocks of keys for each block of queries, or the
    other way round; other arrays and outputs come with their kind: "query", "row" (one number per query) or "key"."""
    (B, T, S, N, K, H, V), blocks, rows, columns = layout
    group = N // K
    outer = columns if by_keys else rows

    def of_tile(index: Callable[..., tuple]) -> Callable[..., tuple]:
        """An index map from (b, n, i, j), where the tile of scores that is fetched stands, to a block's index."""

        def at(*ids: Any) -> tuple:
            *ids, ranges = ids
            if by_keys:
                b, k, j, g, i = ids
                return index(b, k * group + g, _Block(ranges, b * outer + j, i).fetched, j)
            b, n, i, j = ids
            return index(b, n, i, _Block(ranges, b * outer + i, j).fetched)

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

    def run(ranges: Any, *refs: Any) -> None:
        b, outer_id, inner_id = pl.program_id(0), pl.program_id(2), pl.program_id(4 if by_keys else 3)
        kernel(_Block(ranges, b * outer + outer_id, inner_id), dict(zip(names, refs, strict=True)))

    return launch.call(
        run,
        [ranges.stacked().reshape(-1), *(x for x, _ in inputs.values())],
        [jax.ShapeDtypeStruct(whole[kind](width), dtype) for kind, width, dtype in outputs.values()],
        params=launch.mosaic_tpu(("parallel",) * 3 + ("arbitrary",) * (2 if by_keys else 1)),
        grid=(B, K, columns, group, rows) if by_keys else (B, N, rows, columns),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec(kind, width) for kind, width, _ in outputs.values()],
        scratch=[launch.vmem(shape, jnp.float32) for shape in scratch.values()],
        prefetched=1,
        cost=cost,
        name=f"flash_attention_{name}",
        interpret=settings.interpret,
    )
