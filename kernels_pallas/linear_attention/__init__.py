"""Linear attention: each token decays, writes to and reads a matrix per head, as in Gated DeltaNet and Mamba-2.

The tokens of a chunk read one another by products, and chunks before by the matrix, the state.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.core import checks, rows, target
from kernels_pallas.core.choice import cannot_lower, choose, fastest
from kernels_pallas.core.launch import KernelCosts, vary
from kernels_pallas.core.measured import CallClass
from kernels_pallas.core.target import TargetChip
from kernels_pallas.linear_attention import reference, triton, xla
from kernels_pallas.linear_attention.chunked import KERNELS, by_kernel
from kernels_pallas.linear_attention.costs import (
    ChunkProducts,
    chunk_products,
    inverse_products,
    kernel_costs,
    kernel_memory,
    products_again,
)

__all__ = [
    "CHUNK",
    "CPU_CHUNK",
    "ChunkProducts",
    "chunk_of",
    "chunk_products",
    "costs",
    "gated_delta_rule",
    "inverse_products",
    "kernel_costs",
    "kernel_memory",
    "kernel_of",
    "products_again",
    "state_space",
]

CHUNK = 64  # tokens
CPU_CHUNK = 32  # a CPU's products of 64 are no faster, and the work within a chunk grows with its square
_LEAST_CHUNK = 16  # of kernels


def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    is_token: jax.Array | None = None,
    begins: jax.Array | None = None,
    *,
    chunk: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of the gated delta rule (Yang et al. 2024, arXiv:2412.06464, equation 10), and its state after
    the last token. For each of N heads, with q and k divided by their lengths, and q by √H besides:

        S ← exp(g)·S,   S ← S + k·(β·(v − Sᵀk))ᵀ,   y = Sᵀq.

    The backward pass keeps the operands and the states between chunks: memory is linear in T / chunk.

    Args:
      query, key: [B, T, K, H], in float32, bfloat16 or float16; each head is shared by N / K heads of values that
        follow one another.
      value: [B, T, N, V].
      log_decay, beta: g and β, [B, T, N]; g is at most 0.
      state: S before the first token, float32 [B, N, H, V].
      is_token: bool [B, T]; padding follows the tokens of a row, changes no state, and its outputs are anything. None:
        all are tokens.
      begins: bool [B, T], whether a document begins with a token: its tokens read no state of earlier ones. None: no
        document begins.
      chunk: the tokens that are computed at once; None: 64, on a CPU 32.
      implementation: "reference", which takes one token after the other, "xla", "triton" or "mosaic_tpu"; None chooses
        by the chip being lowered for. Kernels want chunks and rows of 16 tokens or more.

    Returns [B, T, N, V] in the value's dtype, and float32 [B, N, H, V]. Sums and states are float32; products of a
    chunk have the precision of `jax.default_matmul_precision`: by default Triton multiplies bfloat16 as bfloat16.

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    arrays = {"query": query, "key": key, "value": value, "log_decay": log_decay, "beta": beta}
    return _run("gated_delta_rule", arrays, {}, state, is_token, begins, chunk, implementation)


def state_space(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    delta: jax.Array,
    skip: jax.Array,
    state: jax.Array,
    is_token: jax.Array | None = None,
    begins: jax.Array | None = None,
    *,
    chunk: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of Mamba-2's state space (Dao and Gu 2024, arXiv:2405.21060, section 6), and its state after
    the last token. For each of N heads:

        S ← exp(g)·S + k·(δ·v)ᵀ,   y = Sᵀq + skip·v.

    In Mamba-2's names q is C, k is B and v is x.

    Args:
      delta: δ, [B, T, N].
      skip: [N].
      query, key, value, log_decay, state, is_token, begins, chunk, implementation: as in `gated_delta_rule`.

    Returns and raises as `gated_delta_rule` does.
    """
    arrays = {"query": query, "key": key, "value": value, "log_decay": log_decay, "delta": delta}
    return _run("state_space", arrays, {"skip": skip}, state, is_token, begins, chunk, implementation)


def chunk_of(platform: str | None) -> int:
    """Return the tokens of a chunk where none are asked for, by the platform that is lowered for."""
    return CPU_CHUNK if platform == "cpu" else CHUNK


def kernel_of(name: str, query: jax.Array | jax.ShapeDtypeStruct, chunk: int, chip: TargetChip) -> str | None:
    """Return the kernel that runs on a chip where none is named, or None where XLA computes.

    `query`: an array, or its shape and dtype.
    """

    def unsupported_reason(each: str) -> str | None:
        if each == "xla":
            return None
        return cannot_lower(each, chip) or _unsupported_reason(each, query, chunk, chip)

    chosen = fastest(name, unsupported_reason, (*KERNELS, "xla"), chip, call=CallClass.of_rows(query)).name
    return chosen if chosen in KERNELS else None


def costs(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    *,
    skip: jax.Array | None = None,
    chunk: int | None = None,
    implementation: str = "triton",
    **_: Any,
) -> KernelCosts:
    """Return an implementation's costs on the arrays, or shapes and dtypes, of a call of either operation that is
    differentiated; without gradients the forward pass writes no states of chunks."""
    chunk = chunk_of(target.current().platform) if chunk is None else chunk
    return kernel_costs(implementation, query, value, chunk, is_delta=skip is None)


_FUNCTIONS: dict[str, tuple[Callable, Callable]] = {
    "gated_delta_rule": (reference.gated_delta_rule, xla.gated_delta_rule),
    "state_space": (reference.state_space, xla.state_space),
}


def _run(
    name: str,
    arrays: dict[str, jax.Array],
    weights: dict[str, jax.Array],
    state: jax.Array,
    is_token: jax.Array | None,
    begins: jax.Array | None,
    chunk: int | None,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the results of an operation by the implementation that is asked for or chosen."""
    chunk = chunk_of(target.current().platform) if chunk is None else chunk
    _check(name, arrays, weights, state, {"is_token": is_token, "begins": begins}, chunk)
    query, value = arrays["query"], arrays["value"]
    by_recurrence, in_chunks = _FUNCTIONS[name]
    reasons = {each: functools.partial(_unsupported_reason, each, query, chunk) for each in KERNELS}
    reasons["xla"] = lambda chip: None
    chosen = choose(name, implementation, reasons, call=CallClass.of_rows(query))
    if 0 in (query.size, value.size):
        return jnp.zeros_like(value), state
    each_row = query.shape[:2]
    is_token = jnp.ones(each_row, bool) if is_token is None else is_token
    begins = jnp.zeros(each_row, bool) if begins is None else begins
    if chosen in KERNELS:
        operands = tuple(vary(*arrays.values())), weights.get("skip"), state, is_token, begins
        return by_kernel(name, chosen, *operands, chunk)
    operands = *arrays.values(), *weights.values(), state, is_token, begins
    return by_recurrence(*operands) if chosen == "reference" else in_chunks(*operands, chunk=chunk)


def _unsupported_reason(implementation: str, query: Any, chunk: int, chip: TargetChip) -> str | None:
    """Return why a kernel cannot compute a call on a chip, or None."""
    if chunk < _LEAST_CHUNK or chunk & (chunk - 1):
        return f"chunks of {chunk} tokens are no power of two from {_LEAST_CHUNK} on"
    if query.shape[1] < _LEAST_CHUNK:
        return f"{query.shape[1]} tokens are fewer than {_LEAST_CHUNK}"
    general = rows.unsupported_reason(query, chip, max_width=None)
    return general or (triton.unsupported_reason(query, chunk) if implementation == "triton" else None)


def _check(
    name: str,
    arrays: dict[str, jax.Array],
    weights: dict[str, jax.Array],
    state: jax.Array,
    flags: dict[str, jax.Array | None],
    chunk: int,
) -> None:
    checks.floating(name, **arrays, **weights, state=state)
    query, value = arrays["query"], arrays["value"]
    if query.ndim != 4 or value.ndim != 4 or 0 in query.shape[2:] or value.shape[2] % query.shape[2]:
        raise ValueError(
            f"{name}: query is {list(query.shape)} and value is {list(value.shape)}; they must be [B, T, K, H] and "
            "[B, T, N, V], with N a multiple of K"
        )
    (B, T, _, H), (N, V) = query.shape, value.shape[2:]
    checks.like(name, "query", query, key=arrays["key"])
    fourth, fifth = tuple(arrays)[3:]
    wanted = {"value": (B, T, N, V), fourth: (B, T, N), fifth: (B, T, N), "skip": (N,), "state": (B, N, H, V)}
    for each, x in {**arrays, **weights, "state": state}.items():
        if each in wanted and x.shape != wanted[each]:
            raise ValueError(f"{name}: {each} is {list(x.shape)}; it must be {list(wanted[each])}")
    for each, flag in flags.items():
        if flag is not None and (flag.shape, flag.dtype) != ((B, T), jnp.bool_):
            raise ValueError(f"{name}: {each} is {flag.dtype}{list(flag.shape)}; it must be bool{[B, T]}")
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"{name}: chunk = {chunk!r}; it must be 1 or more tokens")
