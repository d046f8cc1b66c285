"""Options of XLA's compiler for the programs of training."""

import re
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.core.errors import InputError

Option = bool | int | float | str  # as jaxlm.models.execution_config declares them

# On several GPUs a layer's products run while the weights of the next are gathered. XLA's default orders a program for
# the least memory.
_ON_GPUS: Mapping[str, Option] = {"xla_gpu_enable_latency_hiding_scheduler": True}
_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")


def on_mesh(mesh: Mesh, chosen: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options for a mesh: the defaults of its platform, and those that a configuration gives.

    Raises InputError for an option that the compiler of these devices does not know, or a value that it refuses.
    """
    device = mesh.devices.flat[0]
    defaults = _ON_GPUS if device.platform in ("gpu", "cuda") and mesh.size > 1 else {}
    if chosen:
        _check(mesh, chosen)
    return {**defaults, **chosen}


def _check(mesh: Mesh, chosen: Mapping[str, Option]) -> None:
    """Compile a program of one number with these options."""
    number = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(lambda x: x + 1, compiler_options=dict(chosen)).lower(number).compile()
    except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
        platform = mesh.devices.flat[0].platform
        if unknown := _UNKNOWN.search(str(error)):
            raise InputError(
                f"execution.compiler_options: XLA for a {platform} has no option {unknown[1]!r}; names are those of "
                "XLA_FLAGS, without dashes"
            ) from None
        raise InputError(f"execution.compiler_options: XLA for a {platform} refuses them: {error}") from None
