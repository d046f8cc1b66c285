"""A program of a mesh whose devices need not be present: a jitted function and its abstract operands."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh


@dataclass(frozen=True)
class MeshProgram:
    """A jitted function on a mesh, and the shapes and shardings of its operands; no array is created."""

    function: Any
    operands: tuple
    mesh: Mesh

    def trace(self) -> jax.stages.Traced:
        """Trace the function under the mesh."""
        with jax.set_mesh(self.mesh):
            return self.function.trace(*self.operands)

    def lower(self) -> jax.stages.Lowered:
        """Lower the function for the mesh's devices."""
        return self.trace().lower()

    def compile(self) -> jax.stages.Compiled:
        """Compile the function for the mesh's devices."""
        return self.lower().compile()

    @property
    def operand_bytes(self) -> int:
        """Bytes of the operands on one device."""
        return bytes_on_device(self.operands)


def bytes_on_device(shapes: Any) -> int:
    """Return the bytes on one device of abstract arrays; those without a sharding are whole there."""

    def size(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(size(x) for x in jax.tree.leaves(shapes))
