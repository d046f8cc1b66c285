"""The state of recurrences with a matrix per head, which `kernels_pallas.linear_attention` computes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxlm.models.doors.cost import DoorProduct, Product
from jaxlm.models.doors.scan import ChunkRows, Operation, Recurrence, ScanKernel, ScanOperation, States, TokenArray
from jaxlm.models.logical_axes import HEAD_STATE, HEADS
from kernels_pallas.core.target import TargetChip
from kernels_pallas.linear_attention import (
    ChunkProducts,
    chunk_of,
    chunk_products,
    inverse_products,
    kernel_costs,
    kernel_memory,
    kernel_of,
    products_again,
)

_SLOT = "matrix"


def matrix_recurrence(
    operation: Operation,
    heads: int,
    key_dim: int,
    value_dim: int,
    weights: tuple[TokenArray, ...] = (),
    *,
    is_delta: bool = False,
) -> Recurrence:
    """Return the recurrence of an operation whose state is a matrix [N, H, V] called `matrix`, float32 and zero at
    first. `is_delta`: it is the delta rule, otherwise the state space."""
    first = {_SLOT: (jnp.zeros((heads, key_dim, value_dim), jnp.float32), HEAD_STATE)}
    return Recurrence(
        _OperationChunk(operation),
        first,
        HEADS,
        weights=weights,
        operation=ScanOperation(operation, _delta_kernel if is_delta else _state_space_kernel, chunk_of),
    )


def _kernel(name: str, chip: TargetChip, arrays: Sequence[jax.ShapeDtypeStruct], chunk: int) -> ScanKernel | None:
    """Return the kernels that compute an operation, and their products."""
    query, value = arrays[0], arrays[2]
    kernel = kernel_of(name, query, chunk, chip)
    if kernel is None:
        return None
    (B, T, _, H), (N, V), C, is_delta = query.shape, value.shape[2:], chunk, name == "gated_delta_rule"
    batch = B * N * math.ceil(T / C)
    shapes = Product(batch, C, H, C), Product(batch, C, C, V), Product(batch, C, H, V), Product(batch, H, C, V)

    def every(numbers: ChunkProducts) -> list[DoorProduct]:
        return [DoorProduct(each, 0) for each, times in zip(shapes, numbers, strict=True) for _ in range(times)]

    steps = inverse_products(kernel, C) if is_delta else 0
    inverse = [DoorProduct(Product(batch * steps, C, C, C), 0, gradients=(False, False))] * is_delta
    how = {"is_delta": is_delta}
    memory = kernel_memory(kernel, query, value, chunk, **how)
    return ScanKernel(
        kernel,
        kernel_costs(kernel, query, value, chunk, **how),
        (*every(chunk_products(is_delta)), *inverse),
        (*every(products_again(kernel, is_delta)), *inverse),
        memory.padding,
        (memory.forward, memory.backward),
    )


_delta_kernel = partial(_kernel, "gated_delta_rule")
_state_space_kernel = partial(_kernel, "state_space")


@dataclass(frozen=True)
class _OperationChunk:
    """A chunk of an operation, as XLA computes it."""

    operation: Operation

    def __call__(self, states: States, rows: ChunkRows, *arrays: jax.Array) -> tuple[States, jax.Array]:
        of_xla = {"chunk": rows.is_token_BC.shape[1], "implementation": "xla"}
        outputs_BCNV, after = self.operation(*arrays, states[_SLOT], *rows, **of_xla)
        return {_SLOT: after}, outputs_BCNV
