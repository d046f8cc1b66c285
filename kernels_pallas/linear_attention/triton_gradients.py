"""Gradients of linear attention on NVIDIA GPUs: see `triton`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import target
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.linear_attention.gpu_blocks import LinearInputs, LinearTiles, LinearTritonBlocks
from kernels_pallas.linear_attention.gpu_tile import iotas, seen
from kernels_pallas.linear_attention.operands import ChunkedOperands


class LinearGradientCall(NamedTuple):
    """The arrays that the kernels of a backward pass read.

    Attributes:
      within: what tokens read of one another in a chunk: see `triton`.
      states: those before each chunk, [B, N, T / C, H, V].
      d_y: the gradient of the outputs.
      costs: of each kernel, by its name after that of the operation, `name`.
    """

    operands: ChunkedOperands
    prepared: LinearInputs
    within: Mapping[str, tuple[jax.Array, str]]
    states: jax.Array
    d_y: jax.Array
    is_delta: bool
    costs: Mapping[str, KernelCost]
    name: str

    def tiles(self, kernel: str, blocks: LinearTritonBlocks) -> LinearTiles:
        """Return the tiles of one of the kernels."""
        return LinearTiles(self.operands, f"{self.name}_{kernel}", blocks)


def state_gradients(call: LinearGradientCall, d_last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Carry the gradient of the state from the last chunk to the first: return that of the states after each chunk
    [B, N, T / C, H, V], and of the first state."""
    tiles = call.tiles("state_gradients", LinearTritonBlocks(32, warps=4, stages=1))
    B, K, G, chunks, *_ = tiles.sizes

    def kernel(ref: Mapping[str, Any], out: Mapping[str, Any]) -> None:
        j, g = pl.program_id(0), pl.program_id(1) % G

        def step(i: jax.Array, d_after: jax.Array) -> jax.Array:
            c = chunks - 1 - i
            tiles.store_state(out["d_states"], j, g, c, x=d_after)
            before, d_y = tiles.column(ref["before"], g, c), tiles.value(ref["d_y"], g, c, j)
            d_state = tiles.kept(ref["before"], g, c) * d_after
            d_state += tiles.product("atb", tiles.query(ref["query"], c), before * d_y)
            if not call.is_delta:
                return d_state
            left, weight = (tiles.column(ref[each], g, c) for each in ("left", "weight"))
            k = tiles.query(ref["key"], c)
            d_changes = left * tiles.product("ab", k, d_after)
            d_changes += tiles.product("atb", tiles.square(ref["scores"], g, c), d_y)
            d_right = tiles.product("atb", tiles.square(ref["inverse"], g, c), d_changes)
            return d_state - tiles.product("atb", k, weight * before * d_right)

        first = jax.lax.fori_loop(0, chunks, step, tiles.state(ref["d_last"], j, g))
        tiles.store_state(out["d_state"], j, g, x=first)

    inputs = tiles.of_queries(call.prepared) | {"d_y": (call.d_y, "value"), "d_last": (d_last, "state")}
    if call.is_delta:
        inputs |= tiles.of_numbers(call.prepared, call.operands, "before", "left", "weight") | call.within
    else:
        inputs |= tiles.of_numbers(call.prepared, call.operands, "before")
        inputs.pop("key")
    outputs = {
        "d_states": (call.states.shape, jnp.float32, "states"),
        "d_state": (d_last.shape, jnp.float32, "state"),
    }
    grid, cost = (tiles.blocks, K * G, B), call.costs["state_gradients"]
    made = tiles.call(kernel, grid, lambda j, n, b: (b, n // G), inputs, outputs, cost)
    return made["d_states"], made["d_state"]


def value_gradients(call: LinearGradientCall, d_states: jax.Array) -> dict[str, jax.Array]:
    """Return gradients by name: of the value; of the numbers of tokens, [B, N, T]; and of the products of queries and
    of keys with keys ("scores", "system"; the latter, and what follows, of the delta rule alone), [B, N, T / C, C, C].

    Besides, [B, T, N, V], what tokens write into the state ("changes"), which solves the delta rule's system, and the
    gradient of the right side of this ("right"). What is multiplied next has the dtype of that.
    """
    is_small = target.current().scratchpad < 200_000  # what Ampere's tensor cores multiply is held in registers
    blocks = LinearTritonBlocks(16, warps=4, stages=2) if is_small else LinearTritonBlocks(32, warps=4, stages=1)
    tiles = call.tiles("value_gradients", blocks)
    B, K, G, chunks, C, _, _ = tiles.sizes
    is_delta = call.is_delta

    def kernel(ref: Mapping[str, Any], out: Mapping[str, Any]) -> None:
        c, g = pl.program_id(0), pl.program_id(1) % G
        q, k = tiles.query(ref["query"], c), tiles.query(ref["key"], c)
        before, left, weight = (tiles.column(ref[each], g, c) for each in ("before", "left", "weight"))
        scores = tiles.square(ref["scores"], g, c)
        inverse = tiles.square(ref["inverse"], g, c) if is_delta else None

        def of_columns(j: jax.Array, sums: tuple) -> tuple:
            d_scores, d_system, d_before, d_left, d_weight, d_kept = sums
            state, d_after = (tiles.state(ref[each], j, g, c) for each in ("states", "d_states"))
            value, d_y = (tiles.value(ref[each], g, c, j) for each in ("value", "d_y"))
            d_kept += jnp.sum(state * d_after)
            after = tiles.product("ab", k, d_after)
            d_right = left * after + tiles.product("atb", scores, d_y)
            of_state = d_y * tiles.product("ab", q, state)
            missing = value.astype(jnp.float32)
            if is_delta:
                found = tiles.product("ab", k, state)
                missing -= before * found
                d_right = tiles.product("atb", inverse, d_right)
                changes = tiles.product("ab", inverse, weight * missing)
                of_state -= weight * d_right * found
                d_system -= tiles.product("abt", d_right, changes)
                tiles.store_value(out["changes"], g, c, j, x=changes)
                tiles.store_value(out["right"], g, c, j, x=d_right)
            else:
                changes = weight * missing
            d_value = weight * d_right
            tiles.store_value(out["value"], g, c, j, x=d_value if is_delta else d_value + ref["skip"][g] * d_y)
            d_scores += tiles.product("abt", d_y, changes)
            d_before += jnp.sum(of_state, axis=1)
            d_left += jnp.sum(changes * after, axis=1)
            d_weight += jnp.sum(d_right * missing, axis=1)
            return d_scores, d_system, d_before, d_left, d_weight, d_kept

        square, row = jnp.zeros((C, C), jnp.float32), jnp.zeros((C,), jnp.float32)
        start = square, square if is_delta else None, row, row, row, jnp.float32(0)
        sums = jax.lax.fori_loop(0, tiles.blocks, of_columns, start)
        d_scores, d_system, d_before, d_left, d_weight, d_kept = sums
        decay = seen(tiles.row(ref["total"], g, c), tiles.document(ref["document"], c))
        d_total = d_scores * scores
        tiles.store_square(out["scores"], g, c, x=d_scores * decay)
        if is_delta:
            at_row, at_column = iotas(C)
            d_system = jnp.where(at_column < at_row, d_system * decay, 0.0)
            of_weight = d_system * tiles.product("abt", k, k)
            d_weight += jnp.sum(of_weight, axis=1)
            d_total += weight * of_weight
            tiles.store_square(out["system"], g, c, x=weight * d_system)
        # The last token's number is also that of the state, of which so much is left after the chunk.
        is_last = jax.lax.broadcasted_iota(jnp.int32, (C,), 0) == C - 1
        tiles.store_row(out["before"], g, c, x=d_before + jnp.where(is_last, d_kept, 0.0))
        tiles.store_row(out["left"], g, c, x=d_left)
        tiles.store_row(out["weight"], g, c, x=d_weight)
        tiles.store_row(out["total"], g, c, x=jnp.sum(d_total, axis=1) - jnp.sum(d_total, axis=0))

    inputs = tiles.of_queries(call.prepared) | tiles.of_documents(call.operands) | call.within
    inputs |= tiles.of_numbers(call.prepared, call.operands, "total", "before", "left", "weight")
    inputs |= {"value": (call.operands.value, "value"), "d_y": (call.d_y, "value")}
    inputs |= {"states": (call.states, "states"), "d_states": (d_states, "states")}
    inputs |= {} if is_delta else {"skip": (call.operands.skip.reshape(-1), "head")}
    shape, dtype = call.operands.value.shape, call.operands.value.dtype
    number = (B, K * G, chunks * C), jnp.float32, "number"
    square = (B, K * G, chunks, C, C), tiles.multiplied, "square"
    outputs = {"value": (shape, dtype, "value"), "scores": square}
    outputs |= dict.fromkeys(("total", "before", "left", "weight"), number)
    if is_delta:
        outputs |= {"system": square, **dict.fromkeys(("changes", "right"), (shape, tiles.multiplied, "value"))}
    grid, cost = (chunks, K * G, B), call.costs["value_gradients"]
    return tiles.call(kernel, grid, lambda c, n, b: (b, n // G), inputs, outputs, cost)


def query_gradients(
    call: LinearGradientCall, d_states: jax.Array, of_values: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of queries and keys as they are multiplied, float32 [B, T, K, H]; a program adds up the
    value heads that share a chunk of them.

    `of_values`: what `value_gradients` returns.
    """
    tiles = call.tiles("query_gradients", LinearTritonBlocks(32, warps=8, stages=1))
    B, K, G, chunks, C, H, _ = tiles.sizes
    is_delta = call.is_delta

    def kernel(ref: Mapping[str, Any], out: Mapping[str, Any]) -> None:
        c = pl.program_id(0)

        def of_head(g: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            before, left, weight = (tiles.column(ref[each], g, c) for each in ("before", "left", "weight"))

            def of_columns(j: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                d_q, d_k = sums
                state, d_after = (tiles.state(ref[each], j, g, c) for each in ("states", "d_states"))
                changes = tiles.value(ref["changes"], g, c, j)
                d_q += tiles.product("abt", before * tiles.value(ref["d_y"], g, c, j), state)
                d_k += tiles.product("abt", (left if is_delta else left * weight) * changes, d_after)
                if is_delta:
                    d_k -= tiles.product("abt", weight * before * tiles.value(ref["right"], g, c, j), state)
                return d_q, d_k

            d_q, d_k = jax.lax.fori_loop(0, tiles.blocks, of_columns, sums)
            k, d_scores = tiles.query(ref["key"], c), tiles.square(ref["scores"], g, c)
            d_q += tiles.product("ab", d_scores, k)
            d_k += tiles.product("atb", d_scores, tiles.query(ref["query"], c))
            if is_delta:
                d_system = tiles.square(ref["system"], g, c)
                d_k += tiles.product("ab", d_system, k) + tiles.product("atb", d_system, k)
            return d_q, d_k

        zeros = jnp.zeros((C, tiles.width), jnp.float32)
        d_q, d_k = jax.lax.fori_loop(0, G, of_head, (zeros, zeros))
        tiles.store_query(out["query"], c, x=d_q)
        tiles.store_query(out["key"], c, x=d_k)

    inputs = tiles.of_queries(call.prepared)
    inputs |= tiles.of_numbers(call.prepared, call.operands, "before", "left", "weight")
    inputs |= {"states": (call.states, "states"), "d_states": (d_states, "states"), "d_y": (call.d_y, "value")}
    inputs |= {
        "scores": (of_values["scores"], "square"),
        "changes": (of_values.get("changes", call.operands.value), "value"),
    }
    inputs |= {"system": (of_values["system"], "square"), "right": (of_values["right"], "value")} if is_delta else {}
    outputs = dict.fromkeys(("query", "key"), ((B, chunks * C, K, H), jnp.float32, "query"))
    made = tiles.call(kernel, (chunks, K, B), lambda c, k, b: (b, k), inputs, outputs, call.costs["query_gradients"])
    return made["query"], made["key"]
