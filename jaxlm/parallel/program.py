"""A program of a mesh whose devices need not be present: a jitted function and its abstract operands."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxlm.core import kept_programs
from kernels_pallas.core import interpretation


@dataclass(frozen=True)
class MeshProgram:
    """A jitted function on a mesh, and the shapes and shardings of its operands; no array is created.
    `compiler_options`: those that the function was jitted with."""

    function: Any
    operands: tuple
    mesh: Mesh
    compiler_options: Mapping[str, Any] | None = None

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

    def kept(self, *made_from: Any) -> jax.stages.Compiled:
        """Return the compiled function, perhaps from an earlier process that kept it (`kept_programs`).

        `made_from`: values whose texts tell all that the function has from elsewhere than its operands and the sources.
        """
        leaves, structure = jax.tree.flatten(self.operands)
        arrays = [(x.shape, x.dtype, x.weak_type, x.format) for x in leaves]
        how = f"{self.mesh} {interpretation.current()} {self.compiler_options}"
        described = f"{made_from}\n{how}\n{structure}\n{arrays}"
        return kept_programs.compiled(described, list(self.mesh.devices.flat), self.lower)

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
