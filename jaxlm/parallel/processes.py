"""Several processes as one job: how they find one another, take turns, agree, and notice that one is lost."""

import hashlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlm.core import accelerators
from jaxlm.core.errors import InputError, exit_status, in_one_line
from jaxlm.core.output import native_output_to_stderr
from jaxlm.core.schema import changed

if TYPE_CHECKING:
    from jax.sharding import Mesh

# Others that are not there at once are named, and not waited for for ever: a scheduler may start them minutes apart.
_SAY_AFTER_S, _JOIN_TIMEOUT_S = 30, 300
# A process that is silent for this long is lost, and the others end.
_HEARTBEAT_TIMEOUT_S = 30
# The first still draws a sample and a picture while the others leave.
_SHUTDOWN_TIMEOUT_S = 300
# One process may prepare data for hours while the others wait.
_BARRIER_TIMEOUT_S = 7 * 24 * 3600
# What Slurm and Open MPI tell each of several processes: their number.
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_TPU_FILES = ("/dev/accel", "/dev/vfio/")
# An error that this process has, others may find as well, and end by themselves before the first one's end aborts them.
_SAME_S = 1
# What JAX's coordination service, Gloo and NCCL say of a process that is gone.
_LOST = re.compile(
    r"^(UNAVAILABLE|DEADLINE_EXCEEDED)|(?i:heartbeat|barrier (timed out|failed)|another task|timed out waiting"
    r"|connection (reset|closed|refused)|broken pipe|socket closed|remote process exited)"
)
_said = itertools.count()


class Place(NamedTuple):
    """Process `index` of `count`, which meet at `coordinator`, host:port of process 0."""

    index: int
    count: int
    coordinator: str

    @staticmethod
    def parse(text: str) -> "Place":
        """From INDEX/COUNT@HOST:PORT. Raises InputError."""
        match = re.fullmatch(r"(\d+)/(\d+)@(\S+:\d+)", text)
        if match is None or int(match[1]) >= int(match[2]) or not 0 < int(match[3].rpartition(":")[2]) < 2**16:
            raise InputError(f"--process {text!r} is not INDEX/COUNT@HOST:PORT, such as 0/2@127.0.0.1:9876")
        return Place(int(match[1]), int(match[2]), match[3])


def join(place: Place | None) -> None:
    """Join the job: as told, or as Slurm, Open MPI or Cloud TPU tell; alone where nobody does.

    Call it before anything asks JAX for devices. Ends the process, with exit status 1, where the others do not come.
    Raises InputError where a TPU cannot ask for its other hosts, where JAX does not know the launcher, or where process
    0 cannot listen at its place.
    """
    launched = any(os.environ.get(name, "") not in ("", "0", "1") for name in _LAUNCHERS)
    if place is None and not launched and _tpu_processes() == 1:
        return

    import jax

    native_output_to_stderr()
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    noticed = {
        "initialization_timeout": 2 * _JOIN_TIMEOUT_S,  # never reached: JAX would abort the process
        "heartbeat_timeout_seconds": _HEARTBEAT_TIMEOUT_S,
        "shutdown_timeout_seconds": _SHUTDOWN_TIMEOUT_S,
    }
    if place is None:
        try:
            with _waiting("this process", "the other processes of the job"):
                jax.distributed.initialize(**noticed)
        except jax.errors.JaxRuntimeError:
            raise
        except (ValueError, RuntimeError) as error:
            raise InputError(
                f"this process was started as one of several, and JAX does not find the others ({error}), as under "
                "Open MPI 5; say it with --process INDEX/COUNT@HOST:PORT"
            ) from None
        return
    host = place.coordinator.rpartition(":")[0]
    bind = place.coordinator if host in ("127.0.0.1", "localhost", "[::1]") else None  # else on every interface
    if place.index == 0:
        _check_free(place.coordinator, host if bind else "")
    others = f"process {1 - place.index}" if place.count == 2 else f"the other {place.count - 1} processes"
    with _waiting(f"process {place.index} of {place.count}", f"{others} to meet at {place.coordinator}"):
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            cluster_detection_method="deactivate",  # a launcher would still choose the devices
            coordinator_bind_address=bind if place.index == 0 else None,
            **noticed,
        )


def _check_free(coordinator: str, host: str) -> None:
    """Raises InputError where process 0 cannot listen, on every interface where the host is "". JAX may crash there."""
    port = int(coordinator.rpartition(":")[2])
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host.strip("[]"), port), family=family).close()
    except OSError as error:
        why = os.strerror(error.errno)  # Python's own has the place in it, again
        raise InputError(f"process 0 cannot listen at {coordinator} ({why}); choose another port") from None


@contextmanager
def _waiting(who: str, whom: str) -> Iterator[None]:
    """A block in which JAX waits for others, and hears nothing: other threads say so, and end it."""

    def say() -> None:
        print(f"jaxlm: {who} waits for {whom}", file=sys.stderr, flush=True)

    def give_up() -> None:
        try:
            print(
                f"jaxlm: {who} waited {_JOIN_TIMEOUT_S} s in vain for {whom}; "
                "start all of them, each with its own number",
                file=sys.stderr,
                flush=True,
            )
        finally:
            os._exit(1)

    timers = threading.Timer(_SAY_AFTER_S, say), threading.Timer(_JOIN_TIMEOUT_S, give_up)
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _tpu_processes() -> int:
    """How many processes Cloud TPU has for the job, one per host of all slices: GKE says so in the environment, a TPU
    VM in its metadata. Asked only where a TPU is: elsewhere nobody would answer, nor need JAX be imported."""
    here = any(file.startswith(_TPU_FILES) for file in accelerators.found())
    if not here or "tpu" not in (accelerators.platforms() or "tpu"):
        return 1
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

    try:
        return next((c.get_process_count() for c in (GceTpuCluster, GkeTpuCluster) if c.is_env_present()), 1)
    except OSError as error:
        raise InputError(
            f"this TPU cannot ask the metadata server for its other hosts ({error}); say it with --process, "
            "0/1@127.0.0.1:9876 where it has none"
        ) from None


def process_count() -> int:
    """How many processes the job has."""
    return _state().num_processes or 1


def is_first() -> bool:
    """Whether this process is the one that writes and speaks for the job."""
    return not _state().process_id


def _state():
    if "jax" not in sys.modules:  # nor has anybody joined a job; bad input need not wait for the import
        return SimpleNamespace(process_id=0, num_processes=1)
    # jax.process_count() and jax.process_index() would start the backend, before it is told how many devices to make.
    from jax._src import distributed

    return distributed.global_state


@contextmanager
def first_process_first(name: str) -> Iterator[None]:
    """A block that process 0 leaves before the others enter it, so that they find what it made."""
    first = is_first()
    if not first:
        barrier(name)
    yield
    if first:
        barrier(name)


def barrier(name: str) -> None:
    """Wait for all processes, however long they take; collectives give up on the slowest after half a minute."""
    if process_count() > 1:
        _state().client.wait_at_barrier(f"jaxlm {name}", timeout_in_ms=_BARRIER_TIMEOUT_S * 1000)


@contextmanager
def failing_as_one() -> Iterator[None]:
    """A block in which an error of this process ends it at once, with exit status 1, or 2 for bad input: an orderly
    end would wait for the others, which are told by its absence. A failed collective means that another one is gone."""
    try:
        yield
    except Exception as error:
        if process_count() == 1:
            raise
        try:
            _say_why(error)
            if is_first():
                time.sleep(_SAME_S)
        finally:  # whatever has become of the streams
            os._exit(exit_status(error))


def _say_why(error: Exception) -> None:
    """Print what ends this process of several."""
    import jax

    who = f"jaxlm: process {_state().process_id} of {process_count()}"
    goes_on = "started again, all of them, the run goes on from its newest checkpoint"
    native = str(error).partition("\n")[0][:200] if isinstance(error, jax.errors.JaxRuntimeError) else ""
    if line := in_one_line(error):
        print(f"{who}: {line}; {goes_on}" if native else f"{who}: {line}", file=sys.stderr)
    elif _LOST.search(native):
        print(f"{who} lost another one ({native}); {goes_on}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()


def broadcast_from_first(value: int) -> int:
    """The value that process 0 has, on every process. All of them call it, in the same order.

    Not a collective: process 0 may have long to find out.
    """
    if process_count() == 1:
        return value
    key = f"jaxlm said {next(_said)}"
    if is_first():
        _state().client.key_value_set(key, str(int(value)))
        return value
    return int(_state().client.blocking_key_value_get(key, _BARRIER_TIMEOUT_S * 1000))


def check_same(name: str, values: dict[str, Any], remedy: str) -> None:
    """Raises InputError, with the first difference and the remedy, on every process where one of them has other values
    than process 0. All of them call it."""
    if process_count() == 1:
        return
    client, key, mine = _state().client, f"jaxlm same {name}", json.dumps(values, sort_keys=True)
    client.key_value_set(f"{key}/values/{_state().process_id}", mine)
    client.key_value_set(f"{key}/digests/{_state().process_id}", hashlib.sha256(mine.encode()).hexdigest())
    barrier(f"same {name}")
    told = client.key_value_dir_get(f"{key}/digests/")
    digests = {int(path.rpartition("/")[2]): digest for path, digest in told}
    others = sorted(index for index in digests if digests[index] != digests[0])
    if not others:
        return
    its, first = (
        json.loads(client.blocking_key_value_get(f"{key}/values/{index}", _BARRIER_TIMEOUT_S * 1000))
        for index in (others[0], 0)
    )
    who, what = ", ".join(map(str, others)), changed("", its, first)
    raise InputError(f"{name} of process {who} are not those of process 0 ({what}); {remedy}")


class Agreement:
    """The largest of a number that each process proposes, known to all of them at the same step.

    Proposals travel with the steps: `propose` starts, `settled` waits for the last one proposed.
    """

    def __init__(self, mesh: "Mesh"):
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        self._alone = process_count() == 1
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
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
            flags = jax.make_array_from_callback((self._size,), self._sharding, lambda _: np.full(1, number, np.int32))
            self._proposed = self._largest(flags)

    def settled(self) -> int:
        """The largest of the last proposals."""
        return int(self._proposed)
