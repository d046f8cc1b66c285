"""Linear attention by kernels, with kernels for its gradients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.core.eager import compiled_once
from kernels_pallas.core.launch import KernelCost, size_of
from kernels_pallas.linear_attention import mosaic_tpu, triton
from kernels_pallas.linear_attention.costs import COSTS, LinearWork
from kernels_pallas.linear_attention.operands import ChunkedOperands, chunked

KERNELS = {"triton": triton, "mosaic_tpu": mosaic_tpu}


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
    heads = KERNELS[implementation].HEADS_AXIS
    operands = chunked(*arrays, skip, state, is_token, begins, chunk, heads)
    outputs, last = _by_kernel(_ChunkedSettings(operation, implementation), operands)
    return jnp.moveaxis(outputs, heads, 2)[:, : arrays[0].shape[1]], last


def _costs(settings: _ChunkedSettings, operands: ChunkedOperands) -> dict[str, KernelCost]:
    heads = KERNELS[settings.implementation].HEADS_AXIS
    arrays = (jax.eval_shape(partial(jnp.moveaxis, source=heads, destination=2), x) for x in operands[:3:2])
    work = LinearWork.of(*arrays, operands.decay.shape[-1], is_delta=settings.is_delta)
    return COSTS[settings.implementation](work)


@compiled_once(static=2)
def _forward(settings: _ChunkedSettings, keeps_states: bool, operands: ChunkedOperands) -> list[jax.Array]:
    costs = _costs(settings, operands)
    if not keeps_states:
        forward = costs["forward"]
        unwritten = operands.decay.shape[2] * size_of(operands.state)
        costs["forward"] = forward._replace(bytes=forward.bytes - unwritten)
    run = KERNELS[settings.implementation].forward
    return run(operands, is_delta=settings.is_delta, keeps_states=keeps_states, costs=costs, name=settings.operation)


@compiled_once(static=1)
def _backward(settings: _ChunkedSettings, operands: ChunkedOperands, states, d_y, d_last) -> list[jax.Array]:
    costs, run = _costs(settings, operands), KERNELS[settings.implementation].backward
    return run(operands, states, d_y, d_last, is_delta=settings.is_delta, costs=costs, name=settings.operation)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(settings: _ChunkedSettings, operands: ChunkedOperands) -> tuple[jax.Array, jax.Array]:
    return tuple(_forward(settings, False, operands))


def _fwd(settings: _ChunkedSettings, operands: ChunkedOperands) -> tuple:
    y, last, states = _forward(settings, True, operands)
    return (y, last), (operands, states)


def _bwd(settings: _ChunkedSettings, kept: tuple, cotangents: tuple[jax.Array, jax.Array]) -> tuple:
    (operands, states), (d_y, d_last) = kept, cotangents
    # As the gradients come: XLA would make what this pass makes again of the operands in the forward pass, and keep it.
    operands, d_y = jax.lax.optimization_barrier((operands, d_y))
    gradients = _backward(settings, operands, states, d_y, d_last)
    d_skip = None
    if operands.skip is not None:
        terms = d_y.astype(jnp.float32) * operands.value.astype(jnp.float32)
        heads = KERNELS[settings.implementation].HEADS_AXIS
        d_skip = jnp.sum(terms, axis=(0, 3 - heads, 3)).reshape(operands.skip.shape)
    return (ChunkedOperands(*gradients, jnp.zeros_like(operands.document), d_skip),)


_by_kernel.defvjp(_fwd, _bwd)
