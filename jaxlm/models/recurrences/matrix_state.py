"""The state of recurrences with a matrix per head, which `kernels_pallas.linear_attention` computes."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxlm.models.doors.scan import ChunkRows, Operation, Recurrence, States, TokenArray
from jaxlm.models.logical_axes import HEAD_STATE, HEADS
from kernels_pallas.linear_attention import CHUNK

_SLOT = "matrix"


def matrix_recurrence(
    operation: Operation, heads: int, key_dim: int, value_dim: int, weights: tuple[TokenArray, ...] = ()
) -> Recurrence:
    """Return the recurrence of an operation whose state is a matrix [N, H, V] called `matrix`, float32 and zero at
    first."""
    first = {_SLOT: (jnp.zeros((heads, key_dim, value_dim), jnp.float32), HEAD_STATE)}
    return Recurrence(_OperationChunk(operation), first, HEADS, CHUNK, weights, operation)


@dataclass(frozen=True)
class _OperationChunk:
    """A chunk of an operation, as XLA computes it."""

    operation: Operation

    def __call__(self, states: States, rows: ChunkRows, *arrays: jax.Array) -> tuple[States, jax.Array]:
        of_xla = {"chunk": rows.is_token_BC.shape[1], "implementation": "xla"}
        outputs_BCNV, after = self.operation(*arrays, states[_SLOT], *rows, **of_xla)
        return {_SLOT: after}, outputs_BCNV
