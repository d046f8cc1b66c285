"""Calls of the operations of kernels_pallas in a model: by XLA, or on each device's shards of the arrays."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxlm.models.execution_config import ContextParallel, ExpertWay, Kernels
from jaxlm.models.logical_axes import Axes
from jaxlm.parallel.collectives import on_each_device
from kernels_pallas.core import interpretation

# A user context: JAX keys its caches by it, so that what is traced under one choice is not reused under another.
_chosen: Any = jax.make_user_context(("auto", True, "auto", "gather"))


@contextlib.contextmanager
def using_kernels(
    kernels: Kernels,
    deterministic: bool = True,
    context_parallel: ContextParallel = "auto",
    expert_parallel: ExpertWay = "gather",
) -> Iterator[None]:
    """Trace models inside with this choice of kernels, also as a decorator; outside it is "auto".

    `deterministic`: gradients of kernels are bit-equal in each run. `context_parallel`: how devices that share a
    sequence attend to one another's tokens. `expert_parallel`: how tokens reach the devices of their experts.
    """
    with _chosen((kernels, deterministic, context_parallel, expert_parallel)):
        yield


def deterministic() -> bool:
    """Return whether gradients of kernels have to be bit-equal in each run."""
    return _chosen.value[1]


def context_parallel() -> ContextParallel:
    """Return how devices that share a sequence attend to one another's tokens, as it is asked for."""
    return _chosen.value[2]


def expert_parallel() -> ExpertWay:
    """Return how tokens reach the devices of their experts."""
    return _chosen.value[3]


def implementation() -> str | None:
    """Return the `implementation` that operations of kernels_pallas are given: "xla", or None where kernels may run.

    They run unless the choice leaves them out, and on a CPU only interpreted.
    """
    # The mesh knows the chip, and asks no backend; whoever runs a model on a chip has set a mesh.
    device = jax.sharding.get_abstract_mesh().abstract_device
    on_chip = device is not None and device.platform != "cpu"
    return None if _chosen.value[0] != "xla" and (interpretation.current() is not None or on_chip) else "xla"


def run(
    operation: Callable,
    *operands: tuple[jax.Array | None, Axes],
    results: Sequence[Axes] | None = None,
    **options: Any,
) -> Any:
    """Return operation(*arrays, **options) of kernels_pallas.

    XLA partitions "xla" itself; kernels run inside a shard_map, each device on its own shards.

    Args:
      operands: each array with its logical axes; what the operation looks at together must be whole on a device.
      results: the logical axes of each result, of a tuple; None: they are sharded as the first array is.
    """
    call = functools.partial(operation, implementation=implementation(), **options)
    if implementation() == "xla":
        return call(*(x for x, _ in operands))
    return on_each_device(call, *operands, results=results)
