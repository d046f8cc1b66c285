"""Linear attention on NVIDIA GPUs, compiled by Triton.

The columns of a state are independent of one another: a program carries a block of them from chunk to chunk. What
chunks do not hand on is computed for all at once, as in Yang et al. 2024 (arXiv:2412.06464, section 3.3): before either
pass the scores, and the inverse of the delta rule's system (`_within_chunks`); after the backward pass has carried the
gradient of the state, those of values and scores, and of queries and keys (`triton_gradients`).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core.launch import KernelCost
from kernels_pallas.linear_attention import triton_gradients
from kernels_pallas.linear_attention.gpu_blocks import (
    HEADS_AXIS,
    LinearInputs,
    LinearTiles,
    LinearTritonBlocks,
    prepare,
)
from kernels_pallas.linear_attention.gpu_tile import inverse, iotas, seen
from kernels_pallas.linear_attention.operands import ChunkedOperands

__all__ = ["HEADS_AXIS", "backward", "forward", "unsupported_reason"]

_MAX_CHUNK, _MAX_WIDTH = 64, 128  # of queries and keys, of which a tile has all numbers


def unsupported_reason(query: Any, chunk: int) -> str | None:
    """Return why these kernels cannot serve a call, or None."""
    if chunk > _MAX_CHUNK:
        return f"chunks of {chunk} tokens are longer than {_MAX_CHUNK}"
    return f"queries of {query.shape[-1]} numbers are wider than {_MAX_WIDTH}" if query.shape[-1] > _MAX_WIDTH else None


def forward(
    operands: ChunkedOperands, *, is_delta: bool, keeps_states: bool, costs: Mapping[str, KernelCost], name: str
) -> list[jax.Array]:
    """Return the outputs [B, T, N, V] in the value's dtype and the state after the last token; and, where a backward
    pass follows, the state before each chunk [B, N, T / C, H, V]."""
    prepared = prepare(is_delta, operands.document, operands.query, operands.key, operands.decay)
    within = _within_chunks(operands, prepared, is_delta, costs["within_chunks"], name)
    tiles = LinearTiles(operands, name, LinearTritonBlocks(32, warps=4, stages=2))
    B, K, G, chunks, C, H, V = tiles.sizes

    def kernel(ref: Mapping[str, Any], out: Mapping[str, Any]) -> None:
        j, g = pl.program_id(0), pl.program_id(1) % G

        def step(c: jax.Array, state: jax.Array) -> jax.Array:
            if keeps_states:
                tiles.store_state(out["states"], j, g, c, x=state)
            before, left, weight = (tiles.column(ref[each], g, c) for each in ("before", "left", "weight"))
            value, k = tiles.value(ref["value"], g, c, j), tiles.query(ref["key"], c)
            changes = weight * value
            if is_delta:
                changes -= weight * before * tiles.product("ab", k, state)
                changes = tiles.product("ab", tiles.square(ref["inverse"], g, c), changes)
            y = before * tiles.product("ab", tiles.query(ref["query"], c), state)
            y += tiles.product("ab", tiles.square(ref["scores"], g, c), changes)
            tiles.store_value(out["y"], g, c, j, x=y if is_delta else y + ref["skip"][g] * value)
            return tiles.kept(ref["before"], g, c) * state + tiles.product("atb", k, left * changes)

        last = jax.lax.fori_loop(0, chunks, step, tiles.state(ref["state"], j, g))
        tiles.store_state(out["last"], j, g, x=last)

    inputs = tiles.of_queries(prepared) | tiles.of_numbers(prepared, operands, "before", "left", "weight") | within
    inputs |= {"value": (operands.value, "value"), "state": (operands.state, "state")}
    inputs |= {} if is_delta else {"skip": (operands.skip.reshape(-1), "head")}
    outputs = {"y": (operands.value.shape, operands.value.dtype, "value")}
    outputs["last"] = operands.state.shape, jnp.float32, "state"
    if keeps_states:
        outputs["states"] = (B, K * G, chunks, H, V), jnp.float32, "states"
    grid = tiles.blocks, K * G, B
    return list(tiles.call(kernel, grid, lambda j, n, b: (b, n // G), inputs, outputs, costs["forward"]).values())


def backward(
    operands: ChunkedOperands,
    states: jax.Array,
    d_y: jax.Array,
    d_last: jax.Array,
    *,
    is_delta: bool,
    costs: Mapping[str, KernelCost],
    name: str,
) -> list[jax.Array]:
    """Return the gradients of query, key, value, decay, weight and state, from those of the results."""

    def inputs_from(*arrays: jax.Array) -> LinearInputs:
        return prepare(is_delta, operands.document, *arrays)

    prepared, pull_back = jax.vjp(inputs_from, operands.query, operands.key, operands.decay)
    within = _within_chunks(operands, prepared, is_delta, costs["within_chunks"], name)
    call = triton_gradients.LinearGradientCall(operands, prepared, within, states, d_y, is_delta, costs, name)
    d_states, d_state = triton_gradients.state_gradients(call, d_last)
    of_values = triton_gradients.value_gradients(call, d_states)
    d_query, d_key = triton_gradients.query_gradients(call, d_states, of_values)
    numbers = (of_values[each].reshape(operands.decay.shape) for each in ("total", "before", "left"))
    d_query, d_key, d_decay = pull_back(LinearInputs(d_query, d_key, *numbers))
    return [d_query, d_key, of_values["value"], d_decay, of_values["weight"].reshape(operands.weight.shape), d_state]


def _within_chunks(
    operands: ChunkedOperands, prepared: LinearInputs, is_delta: bool, cost: KernelCost, name: str
) -> dict[str, tuple[jax.Array, str]]:
    """Return what a chunk's tokens read of one another ("scores") and, of the delta rule, the inverse of its system
    ("inverse"), [B, N, T / C, C, C] in the dtype that is multiplied, with the kind of each."""
    tiles = LinearTiles(operands, f"{name}_within_chunks", LinearTritonBlocks(0, warps=4, stages=1))
    B, K, G, chunks, C, _, _ = tiles.sizes

    def kernel(ref: Mapping[str, Any], out: Mapping[str, Any]) -> None:
        c, g = pl.program_id(0), pl.program_id(1) % G
        decay = seen(tiles.row(ref["total"], g, c), tiles.document(ref["document"], c))
        k = tiles.query(ref["key"], c)
        scores = tiles.product("abt", tiles.query(ref["query"], c), k) * decay
        tiles.store_square(out["scores"], g, c, x=scores)
        if is_delta:
            row, column = iotas(C)
            system = tiles.column(ref["weight"], g, c) * tiles.product("abt", k, k) * decay
            tiles.store_square(out["inverse"], g, c, x=inverse(jnp.where(column < row, system, 0.0)))

    inputs = tiles.of_queries(prepared) | tiles.of_documents(operands)
    inputs |= tiles.of_numbers(prepared, operands, "total", *["weight"] * is_delta)
    square = (B, K * G, chunks, C, C), tiles.multiplied, "square"
    outputs = dict.fromkeys(("scores", "inverse") if is_delta else ("scores",), square)
    made = tiles.call(kernel, (chunks, K * G, B), lambda c, n, b: (b, n // G), inputs, outputs, cost)
    return {each: (x, "square") for each, x in made.items()}
