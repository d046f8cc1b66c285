"""Attention on Hopper, compiled by Mosaic GPU: FlashAttention-3 (arXiv:2407.08608, section 3) without float8.

One warpgroup is the producer: by TMA it loads blocks of keys and values into a ring in shared memory, several stages
ahead. Two or three are consumers: each holds 64 queries and their accumulators in registers. Barriers make them take
turns, so that the tensor cores multiply for one while the others exponentiate. The backward pass is in
`mosaic_gpu_backward.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.core.attention.scores import LN_2, LOG2_E, LOWEST, FlashSettings, tanh_by_exp2
from kernels_pallas.core.hopper.launch import run_kernel
from kernels_pallas.core.hopper.memory import MAX_COLUMNS, ROWS, TILE, Barriers, SharedBuffer, extent
from kernels_pallas.core.hopper.ring import TWO_CONSUMERS, Consumers, References, padded, warp_specialize
from kernels_pallas.core.hopper.warpgroup import Warpgroup
from kernels_pallas.flash_attention.blocks import key_ranges
from kernels_pallas.flash_attention.mosaic_gpu_backward import backward
from kernels_pallas.flash_attention.operands import Operands
from kernels_pallas.flash_attention.pipeline import BlockOrder, KeyBlocks, pipeline_of, tiled

__all__ = ["backward", "forward", "unsupported_reason"]


def unsupported_reason(operands: Operands) -> str | None:
    """Return why these kernels cannot serve a call, or None."""
    H, V = operands.sizes[5:]
    if operands.query.dtype not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 and float16, not {operands.query.dtype}"
    if operands.bias is not None and operands.bias.dtype.itemsize not in (2, 4):
        return f"a bias of it is bfloat16, float16 or float32, not {operands.bias.dtype}"
    if any(width % TILE or width > MAX_COLUMNS for width in (H, V)):
        return f"head widths {H} and {V} are not both multiples of {TILE} up to {MAX_COLUMNS}"
    return None


def _block(operands: Operands) -> tuple[Consumers, int]:
    """Return the warpgroups that compute, and the most keys whose scores, with the sums of V columns, registers hold.

    Where sums are narrow a third warpgroup shares the keys that are loaded (FlashAttention-3's 192 × 128). Where an
    interval's start has to be compared as well, CUDA 13.5's assembler would spill.
    """
    H, V = operands.sizes[5:]
    biased = KeyBlocks(operands).biased
    if max(H, V) == 64 and not biased and _from_first(operands):
        return Consumers(3), 128
    # Mosaic GPU multiplies keys in multiples of 64 alone: FlashAttention-3's 176 and 80 are none.
    return TWO_CONSUMERS, 128 if max(H, V) <= 128 and not biased else 64


def _from_first(operands: Operands) -> bool:
    """Return whether it is known while tracing that all queries attend from the first key on."""
    return isinstance(operands.start, np.ndarray) and not operands.start.any()


def forward(settings: FlashSettings, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, T, N, V] and log-sum-exp [B, N, T] in float32."""
    B, T, S, N, K, H, V = operands.sizes
    consumers, keys = _block(operands)
    queries, of_keys = consumers.rows, KeyBlocks(operands, consumers.rows)
    dtype, rows, from_first = operands.query.dtype, pl.cdiv(T, queries), _from_first(operands)
    own = {
        "query_tile": SharedBuffer((consumers.count, ROWS, H), dtype, tiled=True),
        "log_sum_exp_tile": SharedBuffer((consumers.count, ROWS), jnp.float32),
    }
    if H != V:  # otherwise the output overwrites the queries, which have been read by then
        own["out_tile"] = SharedBuffer((consumers.count, ROWS, V), dtype, tiled=True)
    pipeline = pipeline_of("forward", operands, keys, of_keys.buffers, own, late=("value",), consumers=consumers)
    keys = pipeline.blocks.rows

    def kernel(warpgroup: Warpgroup, ref: References) -> None:
        me, b, n = warpgroup.index(), warpgroup.index("batch"), warpgroup.index("head")
        i = rows - 1 - warpgroup.index("block")  # under a causal mask the last block has most to do: it goes first
        order = BlockOrder(*(ref["ranges"][b, i, c] for c in range(4))).at_least_one()

        def sources(step: jax.Array) -> dict[str, Any]:
            return of_keys.sources(ref, b, n, i, order.block(step), keys)

        def compute() -> None:
            tile, query, ping_pong = i * consumers.count + me, ref["query_tile"].at[me], ref["ping_pong"].at[me]
            at = pl.ds(tile * ROWS, ROWS)
            warpgroup.tma_load(ref["query"].at[b, at, n], query, ref["query_ready"].at[me])
            start, end = (warpgroup.load_by_row(ref[name].at[b, tile]) for name in ("start", "end"))
            largest = warpgroup.by_row(jnp.full((ROWS,), LOWEST, jnp.float32))
            total = warpgroup.by_row(jnp.zeros((ROWS,), jnp.float32))
            if "sinks" in ref:
                sink = warpgroup.by_row(jnp.full((ROWS,), ref["sinks"][n] * LOG2_E))
                largest = jnp.maximum(largest, sink)
                total = jnp.exp2(sink - largest)

            def let_other_multiply() -> None:
                warpgroup.arrive(ref["ping_pong"].at[lax.rem(me + 1, consumers.count)])

            def online_softmax(products: jax.Array, j: jax.Array, sums: tuple, masked: bool) -> tuple:
                """Return the softmax statistics after a step, the factor of earlier accumulators, and the weights."""
                pipeline.consumer_release(warpgroup, ref, j, order.steps, "key")
                largest, total = sums
                bias = of_keys.bias(warpgroup, ref, pipeline, j, order.steps)
                values, factor, _ = settings.factored(products, bias, tanh=tanh_by_exp2)
                if masked:
                    index = order.block(j) * keys + warpgroup.iota((ROWS, keys), 1)
                    unmasked = index < warpgroup.broadcast_by_row(end, keys)
                    if not from_first:
                        unmasked &= warpgroup.broadcast_by_row(start, keys) <= index
                    values = jnp.where(unmasked, values, -jnp.inf)
                raised = jnp.maximum(largest, jnp.max(values, axis=1) * factor)
                kept = jnp.exp2(largest - raised)
                weights = jnp.exp2(values * factor - warpgroup.broadcast_by_row(raised, keys))
                total = total * kept + jnp.sum(weights, axis=1)
                # The compiler may not move any of this after the wait for the next key.
                result = lax.optimization_barrier(((raised, total), kept, weights))
                pl.when(j + 1 < order.steps)(lambda: await_block(j + 1, "key") and None)
                return result

            def await_block(j: jax.Array, name: str) -> Any:
                """Wait for the keys or values of step j; return them."""
                (slot,) = pipeline.consumer_wait(warpgroup, ref, j, name)
                return slot

            def step(j: jax.Array, carry: tuple, masked: bool) -> tuple:
                """Multiply the keys of step j and the values of step j − 1: the softmax of one overlaps the other."""
                sums, acc, weights = carry
                (key,) = pipeline.slots(ref, j, "key")  # which the softmax of step j − 1 waited for
                warpgroup.wait(ping_pong)
                (sums, kept, following), acc = warpgroup.qk_with_pv(
                    (query, key),
                    acc,
                    weights,
                    lambda: await_block(j - 1, "value"),
                    lambda x: online_softmax(x, j, sums, masked),
                    let_other_multiply,
                )
                pipeline.consumer_release(warpgroup, ref, j - 1, order.steps, "value")
                # Converted now that the product has ended: during it, ptxas 13.0 would serialize all products (C7513).
                return sums, acc * warpgroup.broadcast_by_row(kept, V), following.astype(dtype)

            pl.when(me == consumers.count - 1)(let_other_multiply)  # to the first
            warpgroup.wait(ref["query_ready"].at[me])
            key = await_block(jnp.int32(0), "key")
            warpgroup.wait(ping_pong)
            (products,) = warpgroup.wgmma((query, key), meanwhile=let_other_multiply)
            # Where the first block is unmasked its mask changes nothing: that costs less than another copy of the code.
            sums, _, weights = online_softmax(products, jnp.int32(0), (largest, total), masked=True)
            weights = weights.astype(dtype)
            acc = warpgroup.tile(jnp.zeros((ROWS, V), jnp.float32))
            sums, acc, weights = order.over(step, (sums, acc, weights), begin=1)
            value = await_block(order.steps - 1, "value")
            warpgroup.wait(ping_pong)
            pl.when(me < consumers.count - 1)(let_other_multiply)
            (acc,) = warpgroup.wgmma_accumulate((acc, weights, value))
            largest, total = sums

            some = total != 0  # also true of NaN
            total = jnp.where(some, total, 1.0)
            log_sum_exp = jnp.where(some, (largest + jnp.log(total) * LOG2_E) * LN_2, -jnp.inf)
            buffer = query if H == V else ref["out_tile"].at[me]
            warpgroup.tma_store(
                (acc * warpgroup.broadcast_by_row(1.0 / total, V), buffer, ref["out"].at[b, at, n]),
                (log_sum_exp, ref["log_sum_exp_tile"].at[me], ref["log_sum_exp"].at[b, n, at]),
            )

        warp_specialize(
            warpgroup, consumers, lambda: pipeline.producer_loop(warpgroup, ref, order.steps, sources), compute
        )

    start, end = operands.intervals
    inputs = {
        "query": padded(operands.query, extent(T, queries)),
        "start": tiled(start, queries),
        "end": tiled(end, queries),
        "ranges": key_ranges(operands.start, operands.end, queries, keys).stacked(B),
    } | of_keys.inputs(keys)
    if operands.sinks is not None:
        inputs["sinks"] = operands.sinks.astype(jnp.float32)
    out, log_sum_exp = run_kernel(
        kernel,
        inputs,
        {
            "out": jax.ShapeDtypeStruct((B, extent(T, queries), N, V), dtype),
            "log_sum_exp": jax.ShapeDtypeStruct((B, N, rows * queries), jnp.float32),
        },
        grid={"head": N, "block": rows, "batch": B},
        warpgroups=consumers.warpgroups,
        shared=own
        | pipeline.shared()
        | {"query_ready": Barriers(consumers.count), "ping_pong": Barriers(consumers.count)},
        cost=operands.forward_cost(settings.unmasked_scores),
        name="flash_attention_forward",
    )
    return out[:, :T], log_sum_exp[:, :, :T]
