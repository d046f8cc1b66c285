"""The operations of kernels_pallas in a model: on each device, its own part of the arrays."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxlm.models.config import Kernels
from jaxlm.parallel.collectives import on_each_device
from kernels_pallas.core import interpretation

# Logical axes of an array, which say what part of it a device has.
Axes = tuple[str | None, ...]

STREAM: Axes = ("batch", "residual", "act_model")


# A user context: JAX keys its caches by it, so that what is traced under one choice is not reused under another.
_chosen = jax.make_user_context("auto")


@contextlib.contextmanager
def using_kernels(kernels: Kernels) -> Iterator[None]:
    """Trace models inside with this choice of kernels; outside it is "auto". Also a decorator of a function."""
    with _chosen(kernels):
        yield


def kernels_run_here() -> bool:
    """Return whether kernels run here: not where the choice leaves them out, and on a CPU only interpreted."""
    return _chosen.value != "xla" and (interpretation.current() is not None or _platform() not in ("cpu", None))


def on_cpu() -> bool:
    """Whether what is traced here is for a CPU."""
    return _platform() == "cpu"


def _platform() -> str | None:
    """The mesh knows the chip, and asks no backend; who runs a model on one has set a mesh."""
    chip = jax.sharding.get_abstract_mesh().abstract_device
    return chip and chip.platform


def run(operation: Callable, *operands: tuple[jax.Array | None, Axes], **options: Any) -> Any:
    """operation(*arrays, **options) of kernels_pallas, whose results lie as the first array does.

    Args:
      operands: each array with its logical axes; what the operation looks at together must be whole on a device.
    """
    arrays = [x for x, _ in operands]
    if not kernels_run_here():
        return operation(*arrays, implementation="reference", **options)
    return on_each_device(lambda *parts: operation(*parts, **options), *operands)
