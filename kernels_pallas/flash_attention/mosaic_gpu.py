"""Attention on Hopper, compiled by Mosaic GPU: FlashAttention-3 (arXiv:2407.08608, section 3) without its float8.

One warpgroup fetches: it has the copy engine bring blocks of keys and values into a ring in shared memory, several
ahead. The others compute: each holds 64 queries and their sums in registers, and they take turns, so that the tensor
cores multiply for one while the other exponentiates.

The gradients are those of the Triton kernels: they need nothing of the forward pass but its log-sum-exp.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import hopper
from kernels_pallas.flash_attention import triton
from kernels_pallas.flash_attention.blocks import key_ranges
from kernels_pallas.flash_attention.operands import Operands
from kernels_pallas.flash_attention.tiles import LN_2, LOG2_E, LOWEST, Settings
from kernels_pallas.hopper import ROWS, Barriers, Shared, Warpgroup

query_gradient, key_gradient = triton.query_gradient, triton.key_gradient

# A row of a swizzled tile in shared memory is 64 numbers of two bytes; wgmma has at most 256 columns.
TILE, MAX_WIDTH = 64, 256


# Warpgroups that compute, and registers per thread of theirs and of the one that fetches: of the 504 of three that the
# chip has. A tile of 64 × 128 numbers takes 64 of them.
_COMPUTING = 2
_COMPUTING_REGISTERS, _FETCHING_REGISTERS = 232, 40
_QUERIES = ROWS * _COMPUTING
# Bytes of shared memory that a block may have, less what barriers and the compiler take.
_SHARED_MEMORY = 232_448 - 6144
_MOST_STAGES = 4


class Blocks(NamedTuple):
    """Scores are computed in tiles of 64 queries × `keys`; of so many keys, `stages` blocks are in shared memory."""

    keys: int
    stages: int


def default_blocks(H: int, V: int) -> Blocks:
    """Blocks for heads of these widths: as many keys as registers hold scores of, besides the sums of all V columns; as
    many stages as shared memory holds besides the queries."""
    keys = 128 if max(H, V) <= 128 else 64
    alone, of_one = (sum(place.bytes for place in _arrays(Blocks(keys, n), H, V, jnp.bfloat16).values()) for n in (0, 1))
    return Blocks(keys, min(_MOST_STAGES, (_SHARED_MEMORY - alone) // (of_one - alone)))


def refusal(operands: Operands) -> str | None:
    """Why this kernel cannot serve a call."""
    H, V = operands.sizes[5:]
    if operands.query.dtype not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 and float16, not {operands.query.dtype}"
    if operands.bias is not None:
        return "it has no bias"
    if any(width % TILE or width > MAX_WIDTH for width in (H, V)):
        return f"head widths {H} and {V} are not both multiples of {TILE} up to {MAX_WIDTH}"
    return None


def forward(settings: Settings, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, V] and log-sum-exp [B, N, T] in float32."""
    B, T, S, N, K, H, V = operands.sizes
    blocks = default_blocks(H, V)
    computing, stages = _COMPUTING, blocks.stages
    rows, dtype = pl.cdiv(T, _QUERIES), operands.query.dtype
    ranges = key_ranges(operands.start, operands.end, _QUERIES, blocks.keys).stacked()

    def kernel(warpgroup: Warpgroup, ref: Mapping[str, Any]) -> None:
        me = warpgroup.index()
        b, n = warpgroup.index("batch"), warpgroup.index("head")
        i = rows - 1 - warpgroup.index("block")  # under a causal mask the last has most to do: it goes first
        order = _Order(*(ref["ranges"][b, i, c] for c in range(4)))

        @pl.when(me == computing)
        def _() -> None:
            warpgroup.registers(_FETCHING_REGISTERS, more=False)
            k = lax.div(n, N // K)

            def fetch(step: jax.Array, _: None) -> None:
                slot = lax.rem(step, stages)
                at = b, pl.ds(order.block(step) * blocks.keys, blocks.keys), k
                for part in ("key", "value"):
                    pl.when(step >= stages)(lambda part=part: warpgroup.wait(ref[f"{part}_free"].at[slot]))
                    place, ready = (ref[f"{part}_{what}"].at[slot] for what in ("ring", "ready"))
                    warpgroup.fetch(ref[part].at[at], place, ready)

            lax.fori_loop(0, order.steps, fetch, None)

        @pl.when(me < computing)
        def _() -> None:
            warpgroup.registers(_COMPUTING_REGISTERS, more=True)
            tile, query, my_turn = i * computing + me, ref["query_tile"].at[me], ref["turn"].at[me]
            at = pl.ds(tile * ROWS, ROWS)
            warpgroup.fetch(ref["query"].at[b, at, n], query, ref["query_ready"].at[me])
            start, end = (warpgroup.load_by_row(ref[name].at[b, tile]) for name in ("start", "end"))
            largest = warpgroup.by_row(jnp.full((ROWS,), LOWEST, jnp.float32))
            total = warpgroup.by_row(jnp.zeros((ROWS,), jnp.float32))
            if "sinks" in ref:
                sink = warpgroup.by_row(jnp.full((ROWS,), ref["sinks"][n] * LOG2_E))
                largest = jnp.maximum(largest, sink)
                total = jnp.exp2(sink - largest)
            mixed = warpgroup.tile(jnp.zeros((ROWS, V), jnp.float32))

            def next_turn() -> None:
                warpgroup.arrive(ref["turn"].at[lax.rem(me + 1, computing)])

            def step(j: jax.Array, carry: tuple, masked: bool) -> tuple:
                largest, total, mixed = carry
                slot, fetched_again = lax.rem(j, stages), j + stages < order.steps
                warpgroup.wait(ref["key_ready"].at[slot])
                products = warpgroup.product(query, ref["key_ring"].at[slot], transposed=True)
                next_turn()
                pl.when(fetched_again)(lambda: warpgroup.arrive(ref["key_free"].at[slot]))
                values, factor = settings.factored(products, _tanh)
                if masked:
                    index = order.block(j) * blocks.keys + warpgroup.count(values.shape, 1)
                    seen = warpgroup.across(start, blocks.keys) <= index
                    seen &= index < warpgroup.across(end, blocks.keys)
                    values = jnp.where(seen, values, -jnp.inf)
                raised = jnp.maximum(largest, jnp.max(values, axis=1) * factor)
                kept = jnp.exp2(largest - raised)
                weights = jnp.exp2(values * factor - warpgroup.across(raised, blocks.keys))
                total = total * kept + jnp.sum(weights, axis=1)
                mixed = mixed * warpgroup.across(kept, V)
                # Nothing of this may be put off until it is this warpgroup's turn again.
                state = lax.optimization_barrier((raised, total, mixed, weights.astype(dtype)))
                raised, total, mixed, weights = state
                warpgroup.wait(ref["value_ready"].at[slot])
                warpgroup.wait(my_turn)
                mixed = warpgroup.product(weights, ref["value_ring"].at[slot], mixed)
                pl.when(fetched_again)(lambda: warpgroup.arrive(ref["value_free"].at[slot]))
                return raised, total, mixed

            pl.when(me == computing - 1)(next_turn)  # the first one's
            warpgroup.wait(ref["query_ready"].at[me])
            warpgroup.wait(my_turn)
            carry = lax.fori_loop(0, order.whole, lambda j, c: step(j, c, masked=False), (largest, total, mixed))
            carry = lax.fori_loop(order.whole, order.steps, lambda j, c: step(j, c, masked=True), carry)
            pl.when(me < computing - 1)(next_turn)

            largest, total, mixed = carry
            some = total > 0
            total = jnp.where(some, total, 1.0)
            log_sum_exp = jnp.where(some, (largest + jnp.log(total) * LOG2_E) * LN_2, -jnp.inf)
            place = query if H == V else ref["out_tile"].at[me]
            warpgroup.send(
                (mixed * warpgroup.across(1.0 / total, V), place, ref["out"].at[b, at, n]),
                (log_sum_exp, ref["log_sum_exp_tile"].at[me], ref["log_sum_exp"].at[b, n, at]),
            )

    tiles = rows * computing
    inputs = {
        "query": _padded(operands.query, _QUERIES),
        "key": _padded(operands.key, blocks.keys),
        "value": _padded(operands.value, blocks.keys),
        "start": _padded(operands.start, _QUERIES).reshape(B, tiles, ROWS),
        "end": _padded(operands.end, _QUERIES).reshape(B, tiles, ROWS),
        "ranges": ranges,
    }
    if operands.sinks is not None:
        inputs["sinks"] = operands.sinks.astype(jnp.float32)
    out, log_sum_exp = hopper.run(
        kernel,
        inputs,
        {
            "out": jax.ShapeDtypeStruct((B, tiles * ROWS, N, V), dtype),
            "log_sum_exp": jax.ShapeDtypeStruct((B, N, tiles * ROWS), jnp.float32),
        },
        grid={"head": N, "block": rows, "batch": B},
        warpgroups=computing + 1,
        shared=_arrays(blocks, H, V, dtype) | _barriers(blocks),
        cost=operands.forward_cost(settings.seen),
        name="flash_attention_forward",
        interpret=settings.interpret,
    )
    return out[:, :T], log_sum_exp[:, :, :T]


class _Order:
    """In which order a block of queries goes through blocks of keys: the `whole` ones that it sees all of first, then
    those beside them, which have a mask; `steps` in all."""

    def __init__(self, first: jax.Array, full: jax.Array, full_end: jax.Array, last: jax.Array):
        self.first, self.full = first, full
        self.whole, self.steps = full_end - full, last - first

    def block(self, step: jax.Array) -> jax.Array:
        beside = self.first + step - self.whole
        beside = jnp.where(beside < self.full, beside, beside + self.whole)
        return jnp.where(step < self.whole, self.full + step, beside)


def _arrays(blocks: Blocks, H: int, V: int, dtype: Any) -> dict[str, Shared]:
    """What is in shared memory."""
    queries, ring = (_COMPUTING, ROWS), (blocks.stages, blocks.keys)
    arrays = {
        "query_tile": Shared((*queries, H), dtype, tiled=True),
        "key_ring": Shared((*ring, H), dtype, tiled=True),
        "value_ring": Shared((*ring, V), dtype, tiled=True),
        "log_sum_exp_tile": Shared(queries, jnp.float32),
    }
    # The queries have been read when the output is written: it takes their place where it has their shape.
    return arrays if H == V else arrays | {"out_tile": Shared((*queries, V), dtype, tiled=True)}


def _barriers(blocks: Blocks) -> dict[str, Barriers]:
    """Of the ring a place is `free` once all warpgroups have multiplied by it, `ready` once it is filled."""
    ready, free = Barriers(blocks.stages), Barriers(blocks.stages, arrivals=_COMPUTING)
    turns = dict(query_ready=Barriers(_COMPUTING), turn=Barriers(_COMPUTING))
    return turns | dict(key_ready=ready, value_ready=ready, key_free=free, value_free=free)


def _tanh(x: jax.Array) -> jax.Array:
    """To 10⁻⁶, where the instruction has 5 · 10⁻⁴."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2_E)))


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    """With zeros to a multiple of rows along axis 1: whole blocks are copied, and tiles in shared memory want it so."""
    lacking = -x.shape[1] % multiple
    return jnp.pad(x, [(0, lacking if axis == 1 else 0) for axis in range(x.ndim)]) if lacking else x
