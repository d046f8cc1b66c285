"""Options of XLA's compiler for the programs of training."""

import re
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.core.errors import InputError

Option = bool | int | float | str  # as jaxlm.models.execution_config declares them

# The loop over layers writes each slot of its stacks, which JAX fills with zeros first. XLA's pass, off by default,
# leaves these stacks as they are allocated.
NO_ZERO_FILL = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
# On several GPUs a layer's products run while the weights of the next are gathered. XLA's default orders a program for
# the least memory.
_OVERLAP = "xla_gpu_enable_latency_hiding_scheduler"
_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")


def options(platform: str, devices: int, chosen: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options for a platform: its defaults, and those that a configuration gives in their place."""
    if platform not in ("gpu", "cuda"):
        return dict(chosen)
    return {NO_ZERO_FILL: True, **({_OVERLAP: True} if devices > 1 else {}), **chosen}


def on_mesh(mesh: Mesh, chosen: Mapping[str, Option]) -> dict[str, Option]:
    """Return the `options` for a mesh."""
    return options(mesh.devices.flat[0].platform, mesh.size, chosen)


def check(mesh: Mesh, chosen: Mapping[str, Option]) -> None:
    """Compile a program of one number with the options that a configuration gives, if it gives any.

    Raises InputError for an option that the compiler of these devices does not know, or a value that it refuses.
    """
    if not chosen:
        return
    number = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(lambda x: x + 1, compiler_options=dict(chosen)).lower(number).compile()
    except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
        platform = mesh.devices.flat[0].platform
        if unknown := _UNKNOWN.search(str(error)):
            raise InputError(
                f"execution.compiler_options: XLA for a {platform.upper()} has no option {unknown[1]!r}; names are "
                "those of XLA_FLAGS, without dashes"
            ) from None
        raise InputError(f"execution.compiler_options: XLA for a {platform.upper()} refuses a value: {error}") from None
