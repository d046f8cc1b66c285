"""Linear attention on TPUs, compiled by Mosaic: chunks run in sequence, and the states of the value heads that share a
key stay in VMEM from one to the next.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.linear_attention.operands import ChunkedOperands
from kernels_pallas.linear_attention.tile import TokenNumbers, tile

HEADS_AXIS = 1  # of query, key and value
_SEMANTICS = ("parallel", "parallel", "arbitrary", "arbitrary")
_READ = 6  # operands of a chunk's tokens and its documents


def forward(
    operands: ChunkedOperands, *, is_delta: bool, keeps_states: bool, costs: Mapping[str, KernelCost], name: str
) -> list[jax.Array]:
    """Return the outputs [B, N, T, V] in the value's dtype and the state after the last token; and, where a backward
    pass follows, the state before each chunk [B, N, T / C, H, V]."""
    B, K, G, chunks, C, H, V = operands.sizes(HEADS_AXIS)
    blocks = _LinearTpuBlocks(operands, backward=False)

    def kernel(*refs) -> None:
        tokens, refs = refs[:_READ], refs[_READ:]
        state_ref, refs = refs[0], refs[1:]
        skip_ref, refs = (None, refs) if operands.skip is None else (refs[0], refs[1:])
        y_ref, last_ref, *kept_refs, carried_ref = refs
        chunk, g = pl.program_id(2), pl.program_id(3)

        @pl.when(chunk == 0)
        def _() -> None:
            carried_ref[g] = state_ref[...]

        before = carried_ref[g]
        for kept_ref in kept_refs:
            kept_ref[...] = before
        y, after = _function(is_delta, tokens, skip_ref)(*_read(tokens), before)
        y_ref[...] = y.astype(y_ref.dtype)
        carried_ref[g] = after

        @pl.when(chunk == chunks - 1)
        def _() -> None:
            last_ref[...] = after

    skip = [] if operands.skip is None else [operands.skip]
    states = jax.ShapeDtypeStruct((B, K * G, chunks, H, V), jnp.float32)
    return launch.call(
        kernel,
        [*_tokens(operands), operands.state, *skip],
        [operands.value, operands.state, *[states] * keeps_states],
        params=launch.mosaic_tpu(_SEMANTICS),
        grid=(B, K, chunks, G),
        in_specs=[*blocks.tokens, blocks.at_start, *[blocks.skip] * len(skip)],
        out_specs=[blocks.value, blocks.at_end, *[blocks.states] * keeps_states],
        scratch=[launch.vmem((G, H, V), jnp.float32)],
        cost=costs["forward"],
        name=name,
    )


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
    """Return the gradients of query, key, value, decay, weight and state, from those of the results: the last chunk
    first, each computed again from the state before it."""
    B, K, G, chunks, C, H, V = operands.sizes(HEADS_AXIS)
    blocks = _LinearTpuBlocks(operands, backward=True)

    def kernel(*refs) -> None:
        tokens, refs = refs[:_READ], refs[_READ:]
        states_ref, d_y_ref, d_last_ref, *refs = refs
        skip_ref, refs = (None, refs) if operands.skip is None else (refs[0], refs[1:])
        d_q_ref, d_k_ref, d_v_ref, d_decay_ref, d_weight_ref, d_state_ref, carried_ref, q_sum_ref, k_sum_ref = refs
        step, g = pl.program_id(2), pl.program_id(3)

        @pl.when(step == 0)
        def _() -> None:
            carried_ref[g] = d_last_ref[...]

        @pl.when(g == 0)
        def _() -> None:
            q_sum_ref[...] = jnp.zeros_like(q_sum_ref)
            k_sum_ref[...] = jnp.zeros_like(k_sum_ref)

        _, pull_back = jax.vjp(_function(is_delta, tokens, skip_ref), *_read(tokens), states_ref[...])
        d_q, d_k, d_v, d_decay, d_weight, d_before = pull_back((d_y_ref[...].astype(jnp.float32), carried_ref[g]))
        q_sum_ref[...] += d_q
        k_sum_ref[...] += d_k
        d_v_ref[...] = d_v.astype(d_v_ref.dtype)
        d_decay_ref[...], d_weight_ref[...] = d_decay, d_weight
        carried_ref[g] = d_before

        @pl.when(g == G - 1)
        def _() -> None:
            d_q_ref[...] = q_sum_ref[...].astype(d_q_ref.dtype)
            d_k_ref[...] = k_sum_ref[...].astype(d_k_ref.dtype)

        @pl.when(step == chunks - 1)
        def _() -> None:
            d_state_ref[...] = d_before

    skip = [] if operands.skip is None else [operands.skip]
    sums = launch.vmem((C, H), jnp.float32)
    return launch.call(
        kernel,
        [*_tokens(operands), states, d_y, d_last, *skip],
        [*operands[:6]],
        params=launch.mosaic_tpu(_SEMANTICS),
        grid=(B, K, chunks, G),
        in_specs=[*blocks.tokens, blocks.states, blocks.value, blocks.at_start, *[blocks.skip] * len(skip)],
        out_specs=[*blocks.tokens[:-1], blocks.at_end],
        scratch=[launch.vmem((G, H, V), jnp.float32), sums, sums],
        cost=costs["backward"],
        name=f"{name}_backward",
    )


class _LinearTpuBlocks:
    """The blocks of each array that a step of the grid (B, K, T / C, G) reads or writes."""

    def __init__(self, operands: ChunkedOperands, backward: bool):
        _, _, G, chunks, C, H, V = operands.sizes(HEADS_AXIS)

        def chunk(c: jax.Array) -> jax.Array:
            return chunks - 1 - c if backward else c

        def of_head(shape: tuple[int, ...], rest: int) -> pl.BlockSpec:
            zeros = (0,) * rest
            return pl.BlockSpec((None, None, *shape), lambda b, k, c, g: (b, k * G + g, chunk(c), *zeros))

        def of_state(stays: Callable[[jax.Array, jax.Array], jax.Array]) -> pl.BlockSpec:
            return pl.BlockSpec((None, None, H, V), lambda b, k, c, g: (b, k * G + stays(c, g), 0, 0))

        shared = pl.BlockSpec((None, None, C, H), lambda b, k, c, g: (b, k, chunk(c), 0))
        numbers = of_head((None, 1, C), 2)
        documents = pl.BlockSpec((None, None, 1, C), lambda b, k, c, g: (b, chunk(c), 0, 0))
        self.value = of_head((C, V), 1)
        self.tokens = [shared, shared, self.value, numbers, numbers, documents]
        self.states = of_head((None, H, V), 2)
        self.skip = pl.BlockSpec((None, 1, 1), lambda b, k, c, g: (k * G + g, 0, 0))
        # Of the chunks between, a block that is read or written in the first or the last: nothing moves.
        self.at_start = of_state(lambda c, g: jnp.where(c == 0, g, G - 1))
        self.at_end = of_state(lambda c, g: jnp.where(c == chunks - 1, g, 0))


def _tokens(operands: ChunkedOperands) -> list[jax.Array]:
    return [*operands[:5], operands.document]


def _read(refs) -> list[jax.Array]:
    """Return a chunk's query, key, value, decay and weight, float32."""
    return [ref[...].astype(jnp.float32) for ref in refs[:-1]]


def _function(is_delta: bool, refs, skip_ref) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return the function of what `_read` returns and the state before the chunk."""
    document, skip = refs[-1][...], None if skip_ref is None else skip_ref[...]

    def of_arrays(q, k, v, decay, weight, state) -> tuple[jax.Array, jax.Array]:
        return tile(is_delta, q, k, v, state, TokenNumbers(decay, weight, document), skip)

    return of_arrays
