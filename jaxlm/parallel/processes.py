"""Multi-process jobs: joining, barriers, agreement, and detection of lost processes."""

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
from jaxlm.core.schema import changes

if TYPE_CHECKING:
    from jax.sharding import Mesh

# Missing processes are named after a while, and not awaited forever: a scheduler may start them minutes apart.
_SAY_AFTER_S, _JOIN_TIMEOUT_S = 30, 300
# A process without a heartbeat for this long is lost, and the others end.
_HEARTBEAT_TIMEOUT_S = 30
# The first process still draws a sample and a plot while the others exit.
_SHUTDOWN_TIMEOUT_S = 300
# One process may prepare data for hours while the others wait.
_BARRIER_TIMEOUT_S = 7 * 24 * 3600
# The number of processes, as set by Slurm and Open MPI.
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# Hosts of a coordinator that only processes of its own machine reach.
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# The status of a process that ended because its job lost another.
LOST = 75
_TPU_FILES = ("/dev/accel", "/dev/vfio/")
# Delay of process 0's exit, which aborts the others, so that they report the same error first.
_EXIT_DELAY_S = 1
# Messages of JAX's coordination service, Gloo and NCCL about a lost process.
_LOST = re.compile(
    r"^(UNAVAILABLE|DEADLINE_EXCEEDED)|(?i:heartbeat|barrier (timed out|failed)|another task|timed out waiting"
    r"|connection (reset|closed|refused)|broken pipe|socket closed|remote process exited)"
)
_broadcasts = itertools.count()
_TOLD_KEPT = 4096  # messages that the others may be behind: more steps than can be dispatched ahead


class ProcessSpec(NamedTuple):
    """Process `index` of `count`, with the address of process 0, `coordinator` (host:port).

    `agreed`: the processes have met and agreed to join, so that one that does not is lost.
    """

    index: int
    count: int
    coordinator: str
    agreed: bool = False

    @staticmethod
    def parse(text: str) -> "ProcessSpec":
        """Parse INDEX/COUNT@HOST:PORT. Raise InputError for anything else."""
        match = re.fullmatch(r"(\d+)/(\d+)@(\S+:\d+)", text)
        if match is None or int(match[1]) >= int(match[2]) or not 0 < int(match[3].rpartition(":")[2]) < 2**16:
            raise InputError(f"--process {text!r} is not INDEX/COUNT@HOST:PORT, such as 0/2@127.0.0.1:9876")
        return ProcessSpec(int(match[1]), int(match[2]), match[3])


def join(spec: ProcessSpec | None) -> None:
    """Join the job given by `spec`, Slurm, Open MPI or Cloud TPU; without any of them, run as a single process.

    Call it before anything asks JAX for devices. Exit with status 1 if the other processes do not join in time, or LOST
    if they had agreed to. Raise InputError if a TPU cannot query its other hosts, if JAX does not support the launcher,
    or if process 0 cannot listen at the coordinator's address.
    """
    launched = any(os.environ.get(name, "") not in ("", "0", "1") for name in _LAUNCHERS)
    if spec is None and not launched and _tpu_processes() == 1:
        return

    import jax

    native_output_to_stderr()
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM
    timeouts: dict[str, Any] = {
        "initialization_timeout": 2 * _JOIN_TIMEOUT_S,  # never reached: JAX would abort the process
        "heartbeat_timeout_seconds": _HEARTBEAT_TIMEOUT_S,
        "shutdown_timeout_seconds": _SHUTDOWN_TIMEOUT_S,
    }
    if spec is None:
        try:
            with _waiting("this process", "the other processes of the job"):
                jax.distributed.initialize(**timeouts)
        except jax.errors.JaxRuntimeError:
            raise
        except (ValueError, RuntimeError) as error:
            raise InputError(
                f"this process was started as one of several, and JAX does not find the others ({error}), as under "
                "Open MPI 5; pass --process INDEX/COUNT@HOST:PORT"
            ) from None
        return
    host = spec.coordinator.rpartition(":")[0]
    bind = spec.coordinator if host in LOOPBACK else None  # otherwise on every interface
    if spec.index == 0:
        _check_free(spec.coordinator, host if bind else "")
    others = f"process {1 - spec.index}" if spec.count == 2 else f"the other {spec.count - 1} processes"
    status = LOST if spec.agreed else 1
    with _waiting(f"process {spec.index} of {spec.count}", f"{others} to meet at {spec.coordinator}", status):
        jax.distributed.initialize(
            spec.coordinator,
            spec.count,
            spec.index,
            cluster_detection_method="deactivate",  # a launcher would still select the devices
            coordinator_bind_address=bind if spec.index == 0 else None,
            **timeouts,
        )


def _check_free(coordinator: str, host: str) -> None:
    """Raise InputError if process 0 cannot listen, where JAX may crash. `host` = "": on every interface."""
    port = int(coordinator.rpartition(":")[2])
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host.strip("[]"), port), family=family).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)  # Python's message repeats the address
        raise InputError(f"process 0 cannot listen at {coordinator} ({why}); choose another port") from None


@contextmanager
def _waiting(who: str, whom: str, status: int = 1) -> Iterator[None]:
    """Run a block in which JAX waits for other processes. Timer threads report the wait, and exit with this status at
    the timeout."""

    def say() -> None:
        print(f"jaxlm: {who} waits for {whom}", file=sys.stderr, flush=True)

    def give_up() -> None:
        try:
            print(
                f"jaxlm: {who} timed out after {_JOIN_TIMEOUT_S} s waiting for {whom}; "
                "start all processes, each with its own index",
                file=sys.stderr,
                flush=True,
            )
        finally:
            os._exit(status)

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
    """Return the number of Cloud TPU processes of the job, one per host of all slices.

    GKE sets it in the environment, a TPU VM in its metadata. Without a TPU return 1: there is no metadata server, and
    no need to import JAX.
    """
    here = any(file.startswith(_TPU_FILES) for file in accelerators.found())
    if not here or "tpu" not in (accelerators.platforms() or "tpu"):
        return 1
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

    try:
        return next((c.get_process_count() for c in (GceTpuCluster, GkeTpuCluster) if c.is_env_present()), 1)
    except OSError as error:
        raise InputError(
            f"this TPU cannot ask the metadata server for its other hosts ({error}); pass --process, "
            "0/1@127.0.0.1:9876 if it is the only host"
        ) from None


def process_count() -> int:
    """Return the number of processes of the job."""
    return _state().num_processes or 1


def process_index() -> int:
    """Return the number of this process in the job."""
    return _state().process_id or 0


def is_first() -> bool:
    """Return whether this is process 0, which writes files and reports for the job."""
    return not _state().process_id


def _state() -> Any:
    if "jax" not in sys.modules:  # no job was joined; avoid the import for bad input
        return SimpleNamespace(process_id=0, num_processes=1)
    # jax.process_count() and jax.process_index() would start the backend before its number of devices is set.
    from jax._src import distributed

    return distributed.global_state


@contextmanager
def first_process_first(name: str) -> Iterator[None]:
    """Run a block on process 0 before all others, so that they find what it created."""
    first = is_first()
    if not first:
        barrier(name)
    yield
    if first:
        barrier(name)


def barrier(name: str) -> None:
    """Wait for all processes, for up to a week; collectives time out after half a minute."""
    if process_count() > 1:
        _state().client.wait_at_barrier(f"jaxlm {name}", timeout_in_ms=_BARRIER_TIMEOUT_S * 1000)


@contextmanager
def failing_as_one() -> Iterator[None]:
    """Run a block in which an error exits this process at once, with status 2 for bad input, LOST where another process
    is lost, and 1 otherwise.

    An orderly exit would wait for the other processes, which notice the missing heartbeat. A failed collective means
    that another process is lost.
    """
    try:
        yield
    except Exception as error:
        if process_count() == 1:
            raise
        try:
            _say_why(error)
            if is_first():
                time.sleep(_EXIT_DELAY_S)
        finally:  # even if the streams are closed
            os._exit(LOST if _lost(error) else exit_status(error))


def _lost(error: Exception) -> str:
    """Return the message of an error that says that another process is lost; empty for others."""
    native = _native(error)
    return native if in_one_line(error) is None and _LOST.search(native) else ""


def _native(error: Exception) -> str:
    """Return the beginning of the message of an error of JAX; empty for others."""
    import jax

    return str(error).partition("\n")[0][:200] if isinstance(error, jax.errors.JaxRuntimeError) else ""


def _say_why(error: Exception) -> None:
    """Print the error that ends this process of a job."""
    who = f"jaxlm: process {_state().process_id} of {process_count()}"
    remedy = "restart all processes to resume from the newest checkpoint"
    if line := in_one_line(error):
        print(f"{who}: {line}; {remedy}" if _native(error) else f"{who}: {line}", file=sys.stderr)
    elif native := _lost(error):
        print(f"{who} lost another process ({native}); {remedy}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()


def broadcast_from_first(value: int) -> int:
    """Return the value of process 0 on every process. All processes call it, in the same order.

    Not a collective: process 0 may take arbitrarily long.
    """
    if process_count() == 1:
        return value
    key = f"jaxlm broadcast {next(_broadcasts)}"
    if is_first():
        _state().client.key_value_set(key, str(int(value)))
        return value
    return int(_state().client.blocking_key_value_get(key, _BARRIER_TIMEOUT_S * 1000))


def gather(value: str) -> list[str]:
    """Return the values of all processes, in their order. All call it, in the same order of such calls."""
    if process_count() == 1:
        return [value]
    key, client = f"jaxlm gathered {next(_broadcasts)}", _state().client
    client.key_value_set(f"{key}/{process_index()}", value)
    wait_ms = _BARRIER_TIMEOUT_S * 1000
    return [client.blocking_key_value_get(f"{key}/{i}", wait_ms) for i in range(process_count())]


def tell_others(message: str) -> None:
    """Let `told_by_first` of every other process return a message, once; process 0 goes on at once."""
    number = next(_broadcasts)
    client = _state().client
    client.key_value_set(f"jaxlm told {number}", message)
    if number >= _TOLD_KEPT:
        client.key_value_delete(f"jaxlm told {number - _TOLD_KEPT}")


def told_by_first() -> str:
    """Return the next message of process 0, which may take arbitrarily long."""
    return _state().client.blocking_key_value_get(f"jaxlm told {next(_broadcasts)}", _BARRIER_TIMEOUT_S * 1000)


def check_same(name: str, values: dict[str, Any], remedy: str) -> None:
    """Raise InputError on every process if any has other values than process 0. All processes call it.

    The message gives the first difference and the remedy.
    """
    if process_count() == 1:
        return
    client, key, mine = _state().client, f"jaxlm same {name}", json.dumps(values, sort_keys=True)
    client.key_value_set(f"{key}/values/{_state().process_id}", mine)
    client.key_value_set(f"{key}/digests/{_state().process_id}", hashlib.sha256(mine.encode()).hexdigest())
    barrier(f"same {name}")
    entries = client.key_value_dir_get(f"{key}/digests/")
    digests = {int(path.rpartition("/")[2]): digest for path, digest in entries}
    others = sorted(index for index in digests if digests[index] != digests[0])
    if not others:
        return
    theirs, first = (
        json.loads(client.blocking_key_value_get(f"{key}/values/{index}", _BARRIER_TIMEOUT_S * 1000))
        for index in (others[0], 0)
    )
    who, what = ", ".join(map(str, others)), next(changes(theirs, first))
    raise InputError(f"{name} of process {who} differ from those of process 0 ({what}); {remedy}")


class StopConsensus:
    """The maximum of a number proposed by each process, known to all processes at the same step.

    `propose` starts an asynchronous reduction alongside the step; `result` waits for the last one.
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
        """Propose the number of this process. Every process calls it once per step."""
        import jax
        import numpy as np

        if self._alone:
            self._proposed = number
        else:
            flags = jax.make_array_from_callback((self._size,), self._sharding, lambda _: np.full(1, number, np.int32))
            self._proposed = self._largest(flags)

    def result(self) -> int:
        """Return the maximum of the last proposals."""
        return int(self._proposed)
