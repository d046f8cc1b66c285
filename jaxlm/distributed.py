"""Several processes as one job: how they find one another, take turns, agree, and notice that one is lost."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlm.errors import InputError

if TYPE_CHECKING:
    from jax.sharding import Mesh

# A process that is silent for this long is lost, and the others end.
_HEARTBEAT_S = 30
# One process may prepare data for hours while the others wait.
_TURN_S = 7 * 24 * 3600
# What Slurm and Open MPI tell each of several processes: their number.
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_TPU_HOSTS = "TPU_WORKER_HOSTNAMES"


class Place(NamedTuple):
    """Process `index` of `count`, which meet at `coordinator`, host:port of process 0."""

    index: int
    count: int
    coordinator: str

    @staticmethod
    def parse(text: str) -> "Place":
        """From INDEX/COUNT@HOST:PORT. Raises InputError."""
        match = re.fullmatch(r"(\d+)/(\d+)@(\S+:\d+)", text)
        if match is None or int(match[1]) >= int(match[2]):
            raise InputError(f"--process {text!r} is not INDEX/COUNT@HOST:PORT, such as 0/2@127.0.0.1:9876")
        return Place(int(match[1]), int(match[2]), match[3])


def join(place: Place | None) -> None:
    """Join the job: as told, or as Slurm, Open MPI or Cloud TPU tell; alone where nobody does.

    Call it before anything asks JAX for devices.
    """
    import jax

    noticed = {"heartbeat_timeout_seconds": _HEARTBEAT_S, "shutdown_timeout_seconds": _HEARTBEAT_S}
    if place is not None:
        jax.distributed.initialize(place.coordinator, place.count, place.index, **noticed)
    elif any(int(os.environ.get(name) or 1) > 1 for name in _LAUNCHERS) or "," in os.environ.get(_TPU_HOSTS, ""):
        jax.distributed.initialize(**noticed)


def is_first() -> bool:
    """Whether this process is the one that writes and speaks for the job."""
    import jax

    return jax.process_index() == 0


@contextmanager
def first_goes_first(name: str) -> Iterator[None]:
    """A block that process 0 leaves before the others enter it, so that they find what it made."""
    first = is_first()
    if not first:
        _wait(name)
    yield
    if first:
        _wait(name)


def _wait(name: str) -> None:
    import jax
    from orbax.checkpoint import multihost

    if jax.process_count() > 1:
        multihost.sync_global_processes(name, timeout=_TURN_S)


def as_first_says(value: int) -> int:
    """The value that process 0 has, on every process."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    return value if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int64(value)))


class Agreement:
    """The largest of a number that each process proposes, known to all of them at the same step.

    Proposals travel with the steps: `propose` starts, `settled` waits for the last one proposed.
    """

    def __init__(self, mesh: "Mesh"):
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        self._alone = jax.process_count() == 1
        self._lies = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._size = mesh.size
        self._proposed: Any = 0

    def propose(self, number: int) -> None:
        """Offer this process's number; every process calls it once per step."""
        import jax
        import numpy as np

        if self._alone:
            self._proposed = number
        else:
            flags = jax.make_array_from_callback((self._size,), self._lies, lambda _: np.full(1, number, np.int32))
            self._proposed = self._largest(flags)

    def settled(self) -> int:
        """The largest of the last proposals."""
        return int(self._proposed)
