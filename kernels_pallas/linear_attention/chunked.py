"""Linear attention by a kernel, with a kernel for its gradients."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.core.eager import compiled_once
from kernels_pallas.core.launch import KernelCost, KernelCosts, size_of
from kernels_pallas.linear_attention import mosaic_tpu
from kernels_pallas.linear_attention.operands import ChunkedOperands, chunked

KERNELS = {"mosaic_tpu": mosaic_tpu}


class _ChunkedSettings(NamedTuple):
    operation: str
    implementation: str

    @property
    def is_delta(self) -> bool:
        return self.operation == "gated_delta_rule"


def by_kernel(
    operation: str,
    implementation: str,
    arrays: tuple[jax.Array, ...],
    skip: jax.Array | None,
    state: jax.Array,
    is_token: jax.Array,
    begins: jax.Array,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the results of an operation. `arrays`: query, key, value, log_decay, and β or δ."""
    operands = chunked(*arrays, skip, state, is_token, begins, chunk)
    outputs, last = _by_kernel(_ChunkedSettings(operation, implementation), operands)
    return jnp.swapaxes(outputs, 1, 2)[:, : arrays[0].shape[1]], last


def kernel_costs(query: Any, value: Any, chunk: int, *, is_delta: bool) -> KernelCosts:
    """Return the costs of the kernels: the forward pass, which writes the state before each chunk, and the backward
    pass, which reads these and computes the chunks again.

    Args:
      query, value: as an operation takes them, arrays or shapes and dtypes.
    """
    (B, T, K, H), (N, V), C = query.shape, value.shape[2:], chunk
    chunks = -(-T // C)
    # What tokens read of one another and of the state, and what they leave in it; then the delta rule's system.
    of_tokens, of_state, inverse = 2 * C * C * (H + V), 4 * C * H * V, 0
    if is_delta:
        of_tokens, of_state = of_tokens + 2 * C * C * (H + V), of_state + 2 * C * H * V
        inverse = 4 * C**3 * max(C.bit_length() - 2, 0)
    elementwise, exponentials = 12 * C * C + 3 * C * (H + V) + 2 * H * V, C * C + 2 * C
    once = of_tokens + of_state + inverse + elementwise + exponentials
    again = once + 2 * (of_tokens + of_state + elementwise)
    times, tokens = B * N * chunks, B * chunks * C
    keys, values = 2 * query.dtype.itemsize * tokens * K * H, value.dtype.itemsize * tokens * N * V
    numbers, documents, states = 8 * tokens * N, 4 * tokens, 4 * B * N * H * V
    skip = 0 if is_delta else 4 * N
    forward = keys + 2 * values + numbers + documents + (2 + chunks) * states + skip
    backward = 2 * keys + 3 * values + 2 * numbers + documents + (2 + chunks) * states + skip
    return KernelCosts(
        KernelCost(times * once, times * exponentials, forward),
        KernelCost(times * again, times * exponentials, backward),
    )


def _costs(settings: _ChunkedSettings, operands: ChunkedOperands) -> KernelCosts:
    arrays = (jax.eval_shape(partial(jnp.swapaxes, axis1=1, axis2=2), x) for x in (operands.query, operands.value))
    return kernel_costs(*arrays, operands.decay.shape[-1], is_delta=settings.is_delta)


@compiled_once(static=2)
def _forward(settings: _ChunkedSettings, keeps_states: bool, operands: ChunkedOperands) -> list[jax.Array]:
    cost = _costs(settings, operands).forward
    if not keeps_states:
        cost = cost._replace(bytes=cost.bytes - operands.decay.shape[2] * size_of(operands.state))
    run = KERNELS[settings.implementation].forward
    return run(operands, is_delta=settings.is_delta, keeps_states=keeps_states, cost=cost, name=settings.operation)


@compiled_once(static=1)
def _backward(settings: _ChunkedSettings, operands: ChunkedOperands, states, d_y, d_last) -> list[jax.Array]:
    cost, run = _costs(settings, operands).backward, KERNELS[settings.implementation].backward
    name = f"{settings.operation}_backward"
    return run(operands, states, d_y, d_last, is_delta=settings.is_delta, cost=cost, name=name)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(settings: _ChunkedSettings, operands: ChunkedOperands) -> tuple[jax.Array, jax.Array]:
    return tuple(_forward(settings, False, operands))


def _fwd(settings: _ChunkedSettings, operands: ChunkedOperands) -> tuple:
    y, last, states = _forward(settings, True, operands)
    return (y, last), (operands, states)


def _bwd(settings: _ChunkedSettings, kept: tuple, cotangents: tuple[jax.Array, jax.Array]) -> tuple:
    (operands, states), (d_y, d_last) = kept, cotangents
    gradients = _backward(settings, operands, states, d_y, d_last)
    d_skip = None
    if operands.skip is not None:
        terms = d_y.astype(jnp.float32) * operands.value.astype(jnp.float32)
        d_skip = jnp.sum(terms, axis=(0, 2, 3)).reshape(operands.skip.shape)
    return (ChunkedOperands(*gradients, jnp.zeros_like(operands.document), d_skip),)


_by_kernel.defvjp(_fwd, _bwd)
