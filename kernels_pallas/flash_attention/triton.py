"""Attention on NVIDIA GPUs, compiled by Triton: FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2).

One program holds a block of queries and loops over the keys, or holds a block of keys and loops over the queries of all
heads that share it: no sum crosses programs. A loop over fully unmasked blocks applies no masks.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import interpretation, launch, target, tuning
from kernels_pallas.core.attention.scores import (
    LN_2,
    LOG2_E,
    LOWEST,
    FlashSettings,
    dot,
    recomputed,
    score_gradient,
    tanh_by_exp2,
)
from kernels_pallas.core.target import TargetChip
from kernels_pallas.flash_attention.blocks import key_ranges, query_ranges
from kernels_pallas.flash_attention.operands import Operands

MAX_WIDTH = 256
# Rows of a matrix unit's smallest tile: widths are multiples.
TILE = 16


class FlashTritonBlocks(NamedTuple):
    """A tile of `queries` × `keys` scores, computed by `warps` of 32 threads, with loads `stages` ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


class FlashTritonTiling(NamedTuple):
    """Blocks of each kernel."""

    forward: FlashTritonBlocks
    query_gradient: FlashTritonBlocks
    key_gradient: FlashTritonBlocks


def _tiling(*blocks: tuple[int, int, int, int]) -> FlashTritonTiling:
    return FlashTritonTiling(*itertools.starmap(FlashTritonBlocks, blocks))


# Defaults until sizes are measured, by the least compute capability, shared memory in KiB and the wider of the two head
# dims: tiles fit a chip's registers and shared memory. On Hopper a tile has 64 rows for each four warps, for of fewer
# all warps compute the same scores. Gradients of 64 keys of width 256 need eight warps, and wgmma has no 32 keys.
_DEFAULTS = {
    (10, 220, 129): _tiling((64, 64, 8, 2), (64, 32, 8, 2), (32, 64, 8, 1)),
    (0, 220, 193): _tiling((128, 64, 8, 2), (128, 32, 8, 2), (32, 64, 8, 2)),
    (0, 220, 129): _tiling((128, 64, 8, 2), (128, 32, 8, 2), (32, 64, 4, 2)),
    (0, 160, 129): _tiling((64, 64, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2)),
    (0, 160, 65): _tiling((128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 8, 2)),
    (0, 160, 0): _tiling((128, 64, 4, 3), (128, 64, 4, 3), (64, 128, 8, 2)),
    (0, 0, 129): _tiling((64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    (0, 0, 65): _tiling((128, 32, 8, 2), (64, 32, 4, 2), (32, 64, 4, 2)),
    (0, 0, 0): _tiling((128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
}
# float32 is for checking, not for speed: tiles that fit every chip.
_FLOAT32, _WIDE_FLOAT32 = (_tiling(*[(size, size, 4, 1)] * 3) for size in (32, 16))
_INTERPRETED = _tiling((32, 16, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1))


def default_blocks(chip: TargetChip, width: int, dtype: Any) -> FlashTritonTiling:
    """Return tiles for heads of this width, the wider of the two."""
    if chip.platform != "gpu":
        return _INTERPRETED
    if dtype == jnp.float32:
        return _FLOAT32 if width <= 128 else _WIDE_FLOAT32
    has = chip.compute_capability or (0, 0)
    return next(
        found
        for (capability, kib, least), found in _DEFAULTS.items()
        if has >= (capability, 0) and chip.scratchpad >= kib * 2**10 and width >= least
    )


def _blocks(kernel: str, operands: Operands) -> FlashTritonBlocks:
    """Return the tiles of one of the three kernels on these arrays."""
    _, T, S, _, _, H, V = operands.sizes
    dtype = operands.query.dtype
    chip, width = target.current(), max(H, V)
    if (chip.compute_capability or (0, 0)) >= (10, 0) and max(len(_column_chunks(H)), len(_column_chunks(V))) > 2:
        width = max(width, 129)  # each chunk of a sum has columns of tensor memory to itself, and rounded up
    default = getattr(default_blocks(chip, width, dtype), kernel)
    return tuning.blocks(f"flash_attention_{kernel}", "triton", (T, S, H, V), dtype, default)


def unsupported_reason(operands: Operands) -> str | None:
    """Return why these kernels cannot serve a call, or None."""
    widths = operands.sizes[5:]
    if any(width % TILE or width > MAX_WIDTH for width in widths):
        return f"head widths {widths[0]} and {widths[1]} are not both multiples of {TILE} up to {MAX_WIDTH}"
    return None


def forward(settings: FlashSettings, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, T, N, V] and log-sum-exp [B, N, T] in float32."""
    B, T, S, N, _, H, V = operands.sizes
    blocks = _blocks("forward", operands)
    rows = pl.cdiv(T, blocks.queries)
    ranges = key_ranges(operands.start, operands.end, blocks.queries, blocks.keys).stacked(B)

    def kernel(ref: Mapping[str, Any]) -> None:
        i = _block_of_queries(rows)
        at = _rows(0, blocks.queries, i * blocks.queries, T)
        start, end = _load_row(ref["start"], at), _load_row(ref["end"], at)
        query = _load(ref["query"], at, H)
        largest = jnp.full((blocks.queries,), LOWEST, jnp.float32)
        total = jnp.zeros((blocks.queries,), jnp.float32)
        if "sinks" in ref:
            sink = ref["sinks"][0].astype(jnp.float32) * LOG2_E
            largest = jnp.maximum(largest, sink)
            total = jnp.exp2(sink - largest)
        acc = tuple(jnp.zeros((blocks.queries, size), jnp.float32) for _, size in _column_chunks(V))

        def step(j: jax.Array, carry: tuple, masked: bool) -> tuple:
            largest, total, acc = carry
            keys = _rows(j * blocks.keys, blocks.keys, j * blocks.keys, S if masked else None)
            products = _dot_rows(query, _load(ref["key"], keys, H))
            values, factor, _ = settings.factored(products, _load_bias(ref, at, keys), _tanh)
            if masked:
                values = jnp.where(_sees(start[:, None], keys.index[None], end[:, None]), values, -jnp.inf)
            raised = jnp.maximum(largest, jnp.max(values, axis=1) * factor)
            kept, weights = _exp2(largest, 1.0, raised), _exp2(values, factor, raised[:, None])
            total = total * kept + jnp.sum(weights, axis=1)
            values = _load(ref["value"], keys, V)
            added = (dot(weights.astype(chunk.dtype), chunk, (1, 0)) for chunk in values)
            return raised, total, tuple(m * kept[:, None] + a for m, a in zip(acc, added, strict=True))

        largest, total, acc = _over_blocks(ref["ranges"], step, (largest, total, acc))
        some = total != 0  # also true of NaN
        total = jnp.where(some, total, 1.0)
        _store(ref["out"], at, tuple(chunk / total[:, None] for chunk in acc))
        log_sum_exp = jnp.where(some, (largest + jnp.log2(total)) * LN_2, -jnp.inf)
        launch.store(ref["log_sum_exp"].at[at.slice], log_sum_exp, at.inside)

    spec = _Specs(operands, blocks, lambda i, n, b: (b, n, rows - 1 - i, None))
    out, log_sum_exp = operands.out
    return _call(
        "forward",
        kernel,
        settings,
        blocks,
        inputs=spec.inputs(operands) | {"ranges": (ranges, spec.ranges)},
        outputs={"out": (out, spec.query(V)), "log_sum_exp": (log_sum_exp, spec.query_row)},
        grid=(rows, N, B),
        cost=operands.forward_cost(settings.unmasked_scores),
    )


def backward(settings: FlashSettings, operands: Operands, *rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of query, key and value.

    Rows are log_sum_exp in units of log₂ e and delta, float32 [B, N, T], and d_out.
    """
    return _query_gradient(settings, operands, *rows), *_key_gradient(settings, operands, *rows)


def _query_gradient(
    settings: FlashSettings, operands: Operands, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array
) -> jax.Array:
    """Return the gradient of the query; log_sum_exp, in units of log₂ e, and delta are float32 [B, N, T]."""
    B, T, S, N, _, H, V = operands.sizes
    blocks = _blocks("query_gradient", operands)
    rows = pl.cdiv(T, blocks.queries)
    ranges = key_ranges(operands.start, operands.end, blocks.queries, blocks.keys).stacked(B)

    def kernel(ref: Mapping[str, Any]) -> None:
        i = _block_of_queries(rows)
        at = _rows(0, blocks.queries, i * blocks.queries, T)
        start, end = _load_row(ref["start"], at), _load_row(ref["end"], at)
        log_sum_exp, delta = _load_row(ref["log_sum_exp"], at), _load_row(ref["delta"], at)
        query, d_out = _load(ref["query"], at, H), _load(ref["d_out"], at, V)

        def step(j: jax.Array, d_query: tuple, masked: bool) -> tuple:
            keys = _rows(j * blocks.keys, blocks.keys, j * blocks.keys, S if masked else None)
            key = _load(ref["key"], keys, H)
            bias = _load_bias(ref, at, keys)
            values, factor, slope = settings.factored(_dot_rows(query, key), bias, _tanh)
            if masked:
                values = jnp.where(_sees(start[:, None], keys.index[None], end[:, None]), values, -jnp.inf)
            weights = recomputed(_exp2(values, factor, log_sum_exp[:, None]))
            d_weights = _dot_rows(d_out, _load(ref["value"], keys, V))
            d_scores = score_gradient(weights, d_weights, delta[:, None], slope).astype(ref["key"].dtype)
            return tuple(d + dot(d_scores, chunk, (1, 0)) for d, chunk in zip(d_query, key, strict=True))

        d_query = tuple(jnp.zeros((blocks.queries, size), jnp.float32) for _, size in _column_chunks(H))
        d_query = _over_blocks(ref["ranges"], step, d_query)
        _store(ref["d_query"], at, tuple(chunk * settings.scale for chunk in d_query))

    spec = _Specs(operands, blocks, lambda i, n, b: (b, n, rows - 1 - i, None))
    by_row = {"log_sum_exp": (log_sum_exp, spec.query_row), "delta": (delta, spec.query_row)}
    (d_query,) = _call(
        "query_gradient",
        kernel,
        settings,
        blocks,
        inputs=spec.inputs(operands) | by_row | {"d_out": (d_out, spec.query(V)), "ranges": (ranges, spec.ranges)},
        outputs={"d_query": (operands.query, spec.query(H))},
        grid=(rows, N, B),
        cost=operands.query_cost(settings.unmasked_scores),
    )
    return d_query


def _key_gradient(
    settings: FlashSettings, operands: Operands, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of key and value: see `_query_gradient`."""
    B, T, S, N, K, H, V = operands.sizes
    blocks = _blocks("key_gradient", operands)
    columns = pl.cdiv(S, blocks.keys)
    of_queries = key_ranges(operands.start, operands.end, blocks.queries, blocks.keys)
    ranges = query_ranges(of_queries, columns).stacked(B)

    shares = operands.shares(columns * K * B)

    def kernel(ref: Mapping[str, Any]) -> None:
        keys = _rows(0, blocks.keys, pl.program_id(0) * blocks.keys, S)
        key, value = _load(ref["key"], keys, H), _load(ref["value"], keys, V)

        def of_head(g: jax.Array | int, carry: tuple) -> tuple:
            def step(i: jax.Array, carry: tuple, masked: bool) -> tuple:
                d_key, d_value = carry
                at = _rows(i * blocks.queries, blocks.queries, i * blocks.queries, T if masked else None)
                query, d_out = _load(ref["query"], at, H, g), _load(ref["d_out"], at, V, g)
                bias = _load_bias(ref, at, keys, g)
                products = _dot_rows(key, query)  # transposed: [keys, queries]
                values, factor, slope = settings.factored(products, None if bias is None else bias.T, _tanh)
                if masked:
                    start, end = _load_row(ref["start"], at), _load_row(ref["end"], at)
                    values = jnp.where(_sees(start[None], keys.index[:, None], end[None]), values, -jnp.inf)
                weights = recomputed(_exp2(values, factor, _load_row(ref["log_sum_exp"], at, g)[None]))
                narrow = weights.astype(ref["value"].dtype)
                d_value = tuple(d + dot(narrow, chunk, (1, 0)) for d, chunk in zip(d_value, d_out, strict=True))
                d_weights = _dot_rows(value, d_out)
                delta = _load_row(ref["delta"], at, g)[None]
                d_scores = score_gradient(weights, d_weights, delta, slope).astype(ref["query"].dtype)
                d_key = tuple(d + dot(d_scores, chunk, (1, 0)) for d, chunk in zip(d_key, query, strict=True))
                return d_key, d_value

            return _over_blocks(ref["ranges"], step, carry)

        zeros = tuple(
            tuple(jnp.zeros((blocks.keys, size), jnp.float32) for _, size in _column_chunks(width)) for width in (H, V)
        )
        heads = N // (K * shares)
        d_key, d_value = of_head(jnp.int32(0), zeros) if heads == 1 else jax.lax.fori_loop(0, heads, of_head, zeros)
        _store(ref["d_key"], keys, tuple(chunk * settings.scale for chunk in d_key))
        _store(ref["d_value"], keys, d_value)

    spec = _Specs(operands, blocks, lambda j, n, b: (b, n, None, j), shares)
    by_row = {"log_sum_exp": (log_sum_exp, spec.query_row), "delta": (delta, spec.query_row)}
    gradients = _call(
        "key_gradient",
        kernel,
        settings,
        blocks,
        inputs=spec.inputs(operands) | by_row | {"d_out": (d_out, spec.query(V)), "ranges": (ranges, spec.ranges)},
        outputs={
            name: (operands.of_shares(x, shares), spec.key_share(x.shape[-1]))
            for name, x in (("d_key", operands.key), ("d_value", operands.value))
        },
        grid=(columns, K * shares, B),
        cost=operands.key_cost(settings.unmasked_scores),
    )
    return tuple(operands.joined(x, shares) for x in gradients)


# Functions of each number of a tile, in PTX: from jnp code Triton fuses no product with a sum, and guards each exp2
# against numbers below 2⁻¹²⁶, which weights do not need.


def _exp2(x: jax.Array, factor: float, less: jax.Array) -> jax.Array:
    """Return 2 to the power of x · factor − less; 0 where x is −∞."""
    if interpretation.current():
        return jnp.exp2(x * factor - less)
    ptx = "{ .reg .f32 t; neg.f32 t, $3; fma.rn.f32 t, $1, $2, t; ex2.approx.ftz.f32 $0, t; }"
    return launch.inline_ptx(ptx, x, factor, less)


def _tanh(x: jax.Array, factor: float) -> jax.Array:
    """See `tanh_by_exp2`."""
    if interpretation.current():
        return tanh_by_exp2(x, factor)
    ptx = """{ .reg .f32 t; mul.f32 t, $1, $2; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 t, t; fma.rn.f32 $0, t, 0fC0000000, 0f3F800000; }"""
    return launch.inline_ptx(ptx, x, factor * 2 * LOG2_E)


class _RowSlice(NamedTuple):
    """Rows of an array that a program accesses.

    Their slice in its reference, their indices in the array, and which of them are inside; None where all are.
    """

    slice: Any
    index: jax.Array
    inside: jax.Array | None


def _rows(at: Any, size: int, first: Any, length: int | None) -> _RowSlice:
    """Return `size` rows from `at` of a reference; the first is row `first` of `length`, None if all are inside."""
    index = first + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
    return _RowSlice(pl.ds(at, size), index, None if length is None or length % size == 0 else index < length)


def _column_chunks(width: int) -> list[tuple[int, int]]:
    """Return the offsets and sizes of the chunks of a width: Triton's arrays have only powers of two."""
    chunks, offset = [], 0
    while offset < width:
        size = 1 << ((width - offset).bit_length() - 1)
        chunks.append((offset, size))
        offset += size
    return chunks


def _load(ref: Any, rows: _RowSlice, width: int, *head: Any) -> tuple[jax.Array, ...]:
    """Load rows of [_, width], or of a head of [_, heads, width], in column chunks; zeros for rows beyond the array."""
    size = rows.index.shape[0]

    def mask(chunk: int) -> jax.Array | None:
        return None if rows.inside is None else jnp.broadcast_to(rows.inside[:, None], (size, chunk))

    return tuple(
        launch.load(ref.at[(rows.slice, *head, pl.ds(offset, chunk))], mask(chunk))
        for offset, chunk in _column_chunks(width)
    )


def _load_row(ref: Any, rows: _RowSlice, *head: Any) -> jax.Array:
    return launch.load(ref.at[(*head, rows.slice)], rows.inside)


def _load_bias(ref: Mapping[str, Any], queries: _RowSlice, keys: _RowSlice, *head: Any) -> jax.Array | None:
    """Load the bias of a tile [queries, keys], or a single row of it where all queries share it."""
    if "bias" not in ref:
        return None
    *heads, rows, _ = ref["bias"].shape
    head, shared = (jnp.int32(0),) if heads == [1] else head, rows == 1
    sizes = (1 if shared else queries.index.shape[0], keys.index.shape[0])
    masks = [] if shared or queries.inside is None else [queries.inside[:, None]]
    masks += [] if keys.inside is None else [keys.inside[None]]
    mask = None
    for chunk in masks:
        mask = jnp.broadcast_to(chunk, sizes) if mask is None else mask & jnp.broadcast_to(chunk, sizes)
    return launch.load(ref["bias"].at[(*head, pl.ds(0, 1) if shared else queries.slice, keys.slice)], mask)


def _store(ref: Any, rows: _RowSlice, chunks: tuple[jax.Array, ...]) -> None:
    for (offset, size), chunk in zip(_column_chunks(ref.shape[-1]), chunks, strict=True):
        mask = None if rows.inside is None else jnp.broadcast_to(rows.inside[:, None], chunk.shape)
        launch.store(ref.at[rows.slice, pl.ds(offset, size)], chunk, mask)


def _dot_rows(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> jax.Array:
    """Return a · bᵀ of two blocks of rows in column chunks."""
    return functools.reduce(operator.add, (dot(left, right, (1, 1)) for left, right in zip(a, b, strict=True)))


def _sees(start: jax.Array, index: jax.Array, end: jax.Array) -> jax.Array:
    return (start <= index) & (index < end)


def _block_of_queries(blocks: int) -> jax.Array:
    """Return this program's block of queries, the last block first.

    Under a causal mask the last has most to do, and the shortest are left for the end.
    """
    return blocks - 1 - pl.program_id(0)


def _over_blocks(ranges: Any, step: Callable[..., Any], carry: Any) -> Any:
    """Run step(j, carry, masked) over the blocks of a range: the full ones without masks, then the partial ones."""
    first, full, full_end, last = (ranges[n] for n in range(4))
    carry = jax.lax.fori_loop(full, full_end, lambda j, carry: step(j, carry, masked=False), carry)

    def partial(n: jax.Array, carry: Any) -> Any:
        j = first + n
        return step(jnp.where(j < full, j, j + (full_end - full)), carry, masked=True)

    return jax.lax.fori_loop(0, last - first - (full_end - full), partial, carry)


class _Specs:
    """The block of each array that a program reads or writes.

    `where` maps a program's ids to the batch, the head (of queries, or of keys), and the blocks of queries and of keys.
    One of the two blocks is None: the program reads that whole dimension, for all heads that share a key head, or for
    one of their `shares`.
    """

    def __init__(self, operands: Operands, blocks: FlashTritonBlocks, where: Callable[..., tuple], shares: int = 1):
        self.B, self.T, self.S, self.N, self.K, self.H, self.V = operands.sizes
        self.where, self.by_keys = where, where(0, 0, 0)[2] is None
        self.blocks, self.group, self.shares = blocks, self.N // (self.K * shares), shares
        self.all_queries = pl.cdiv(self.T, blocks.queries) * blocks.queries
        self.all_keys = pl.cdiv(self.S, blocks.keys) * blocks.keys

    def query(self, width: int) -> pl.BlockSpec:
        if self.by_keys:
            return self._spec((None, self.all_queries, self.group, width), lambda b, n, i, j: (b, 0, n, 0))
        return self._spec((None, self.blocks.queries, None, width), lambda b, n, i, j: (b, i, n, 0))

    def key(self, width: int) -> pl.BlockSpec:
        if self.by_keys:
            return self._spec((None, self.blocks.keys, None, width), lambda b, n, i, j: (b, j, n // self.shares, 0))
        return self._spec((None, self.all_keys, None, width), lambda b, n, i, j: (b, 0, n // self.group, 0))

    def key_share(self, width: int) -> pl.BlockSpec:
        """Return the spec of an array that has every key head once for each share."""
        return self._spec((None, self.blocks.keys, None, width), lambda b, n, i, j: (b, j, n, 0))

    @property
    def query_row(self) -> pl.BlockSpec:
        if self.by_keys:
            return self._spec((None, self.group, self.all_queries), lambda b, n, i, j: (b, n, 0))
        return self._spec((None, None, self.blocks.queries), lambda b, n, i, j: (b, n, i))

    @property
    def ranges(self) -> pl.BlockSpec:
        return self._spec((None, None, 4), lambda b, n, i, j: (b, j if self.by_keys else i, 0))

    def inputs(self, operands: Operands) -> dict[str, tuple[Any, pl.BlockSpec]]:
        """Return the operands that are present, with their specs."""
        if self.by_keys:
            interval = self._spec((None, self.all_queries), lambda b, n, i, j: (b, 0))
        else:
            interval = self._spec((None, self.blocks.queries), lambda b, n, i, j: (b, i))
        start, end = operands.intervals
        inputs = {
            "query": (operands.query, self.query(self.H)),
            "key": (operands.key, self.key(self.H)),
            "value": (operands.value, self.key(self.V)),
            "start": (start, interval),
            "end": (end, interval),
        }
        if operands.sinks is not None and not self.by_keys:
            inputs["sinks"] = operands.sinks, self._spec((1,), lambda b, n, i, j: (n,))
        if operands.bias is not None:
            inputs["bias"] = operands.bias, self._bias(operands.bias.shape)
        return inputs

    def _bias(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Return the spec of a bias; axes of size 1 are broadcast."""
        many_b, many_n, many_t = (size > 1 for size in shape[:3])
        if self.by_keys:
            block = (None, self.group if many_n else 1, self.all_queries if many_t else 1, self.blocks.keys)
            return self._spec(block, lambda b, n, i, j: (b * many_b, n * many_n, 0, j))
        block = (None, None, self.blocks.queries if many_t else 1, self.all_keys)
        return self._spec(block, lambda b, n, i, j: (b * many_b, n * many_n, i * many_t, 0))

    def _spec(self, block: tuple, index: Callable[..., tuple]) -> pl.BlockSpec:
        return pl.BlockSpec(block, lambda *ids: index(*self.where(*ids)))


def _call(
    name, kernel, settings: FlashSettings, blocks: FlashTritonBlocks, *, inputs, outputs, grid, cost
) -> list[jax.Array]:
    """Run a kernel that takes its references by name; inputs and outputs are arrays with their specs, by name."""
    names = [*inputs, *outputs]
    return launch.call(
        lambda *refs: kernel(dict(zip(names, refs, strict=True))),
        [x for x, _ in inputs.values()],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in outputs.values()],
        params=launch.triton(blocks.warps, blocks.stages),
        grid=grid,
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in outputs.values()],
        cost=cost,
        name=f"flash_attention_{name}",
    )
