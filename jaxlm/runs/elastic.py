"""A job that goes on when a process is lost: those that are left start again, with fewer replicas of the model.

Each process of the job trains in a child, since JAX ends a process whose job has lost another. Its parent waits for the
end of the child, meets the parents that are left in RUN, and starts the next child. RUN lies on storage that all share.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from jaxlm.config import mesh_layout
from jaxlm.config.experiment import Experiment
from jaxlm.core.errors import InputError, RunFailed
from jaxlm.core.files import replace, replacing
from jaxlm.parallel.config import ALL
from jaxlm.parallel.processes import LOOPBACK, LOST, ProcessSpec
from jaxlm.runs.job_folder import JobFolder

# The others notice a lost process within the time of a heartbeat, not all at once: who has not come after this is lost.
_SETTLE_S = 60.0
_POLL_S = 0.2
# Starts in a row that lose a process though all came back, which ends the job: nothing says that the next would not.
_STARTS_ALIKE = 3
_MEMBERS = "members"


class Attempt(NamedTuple):
    """One start of the job: the processes that take part, by their first numbers, and the address of the first.

    `data`: the size of the mesh's axis; None for that of the experiment.
    """

    number: int
    members: tuple[int, ...]
    coordinator: str
    data: int | None = None


def supervised(spec: ProcessSpec | None, experiment: Experiment, run: JobFolder) -> tuple[ProcessSpec, Experiment]:
    """Return, in a child process for each start of the job, its place in the job and what it trains.

    The calling process does not return: it ends as the last child does. Call it before there are threads. Raises
    InputError without `spec` and where another job has the run, and RunFailed where the processes that are left cannot
    go on.
    """
    if spec is None:
        raise InputError("--elastic needs to know the processes: give --process INDEX/COUNT@HOST:PORT")
    rounds, address = run.paths.elastic / "rounds", _own_address(spec.coordinator)
    run.check_free()
    if spec.index == 0:  # before the job begins, and so before any of it is lost
        shutil.rmtree(rounds, ignore_errors=True)
    attempt, alike = Attempt(0, tuple(range(spec.count)), spec.coordinator), 0
    while True:
        status, stopped = _run_child()
        if status is None:
            return _place(spec.index, attempt), _with_data(experiment, attempt.data)
        meeting = _Meeting(rounds / str(attempt.number + 1), spec.index)
        if stopped or status not in (LOST, -signal.SIGABRT):
            if status:
                meeting.stay_away()
            if status < 0:
                _say(f"process {spec.index} ended with {signal.Signals(-status).name}; the others go on without it")
            raise SystemExit(status if status >= 0 else 128 - status)
        before, attempt = attempt, meeting.agree(attempt, address, spec, experiment)
        alike = alike + 1 if attempt.members == before.members else 0
        if alike == _STARTS_ALIKE:
            raise RunFailed(
                f"{_STARTS_ALIKE} starts lost a process and all came back; start the job again once it is clear why"
            )
        if spec.index not in attempt.members:
            _say(f"process {spec.index} ends: mesh.data = {attempt.data} needs {len(attempt.members)} processes")
            raise SystemExit(0)
        if spec.index == attempt.members[0]:
            size = "" if attempt.data is None else f", with mesh.data = {attempt.data}"
            _say(f"going on with {len(attempt.members)} of {spec.count} processes{size}")


def _say(line: str) -> None:
    print(f"jaxlm: {line}", file=sys.stderr, flush=True)


def _place(index: int, attempt: Attempt) -> ProcessSpec:
    agreed = attempt.number > 0
    return ProcessSpec(attempt.members.index(index), len(attempt.members), attempt.coordinator, agreed)


def _with_data(experiment: Experiment, data: int | None) -> Experiment:
    if data is None:
        return experiment
    return experiment.model_copy(update={"mesh": experiment.mesh.model_copy(update={"data": data})})


def _run_child() -> tuple[int | None, bool]:
    """Fork. Return None in the child; in the parent, at its end, its status (minus the signal that killed it), and
    whether this process was asked to stop, which is passed on."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with _passed_on() as (children, heard):
        if (child := os.fork()) != 0:
            children.append(child)
            for number in heard:  # before there was a child
                os.kill(child, number)
            _, status = os.waitpid(child, 0)
            children.clear()
            return os.waitstatus_to_exitcode(status), bool(heard)
    return None, False


@contextmanager
def _passed_on() -> Iterator[tuple[list[int], list[int]]]:
    """Pass requests to stop on to the children that the block adds to the first list; the second has their numbers."""
    children: list[int] = []
    heard: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        heard.append(number)
        for child in children:
            os.kill(child, number)

    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = {n: signal.signal(n, pass_on) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield children, heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Meeting:
    """A folder in which the processes that are left of a start agree on the next."""

    def __init__(self, folder: Path, index: int):
        self._folder, self._index = folder, index

    def stay_away(self) -> None:
        """Tell the others not to wait for this process."""
        self._come({})

    def _come(self, row: dict[str, str]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace(self._folder / f"{self._index}.json", json.dumps(row))
        except OSError as error:
            raise RunFailed(
                f"{self._folder} cannot be written to ({error.strerror}); start the job again to resume"
            ) from error

    def agree(self, last: Attempt, address: str, spec: ProcessSpec, experiment: Experiment) -> Attempt:
        """Return the next start. Raises RunFailed where those that are left cannot go on, or went on without this."""
        self._come({"address": address})
        deadline = time.monotonic() + _SETTLE_S
        while not (self._folder / _MEMBERS).exists():
            rows = {i: row for i in last.members if (row := self._row(i)) is not None}
            if len(rows) == len(last.members) or time.monotonic() > deadline:
                left = [i for i, row in rows.items() if row]
                self._decide(self._next(last, left, {i: rows[i]["address"] for i in left}, spec, experiment))
                break
            time.sleep(_POLL_S)
        decided = json.loads((self._folder / _MEMBERS).read_text())
        if "refused" in decided:
            raise RunFailed(decided["refused"])
        came = decided.pop("came")
        if self._index not in came:
            raise RunFailed(f"the others went on without process {self._index}, which came too late")
        return Attempt(**{**decided, "members": tuple(decided["members"])})

    def _row(self, index: int) -> dict[str, str] | None:
        try:
            return json.loads((self._folder / f"{index}.json").read_text())
        except FileNotFoundError:
            return None

    def _next(
        self, last: Attempt, left: Sequence[int], addresses: dict[int, str], spec: ProcessSpec, experiment: Experiment
    ) -> dict[str, object]:
        """Return the fields of the next start as this process sees it."""
        try:
            count, data = _part(experiment, spec.count, len(left))
        except InputError as error:
            return {"refused": str(error)}
        number, port = last.number + 1, int(spec.coordinator.rpartition(":")[2])
        members = left[:count]
        coordinator = f"{addresses[members[0]]}:{port + number}"
        return {"number": number, "members": members, "coordinator": coordinator, "data": data, "came": left}

    def _decide(self, fields: dict[str, object]) -> None:
        """Decide, unless another process did."""
        with replacing(self._folder / f"{_MEMBERS}-{self._index}") as own:
            own.write_text(json.dumps(fields))
            try:
                os.link(own, self._folder / _MEMBERS)
            except FileExistsError:
                pass


def _part(experiment: Experiment, count: int, left: int) -> tuple[int, int | None]:
    """Return how many of the processes that are `left` of `count` go on, and with which size of mesh.data; None for
    that of the experiment, where axes of "all" follow the devices. Raises InputError where none can."""
    sizes = experiment.mesh.sizes()
    data = sizes["data"]
    if left < count and experiment.training.local_sgd is not None:
        raise InputError(
            f"{left} of {count} processes are left, and the replicas of training.local_sgd stay as many as they were; "
            "start the job again when all are back"
        )
    if data == ALL or (data == 1 and ALL in sizes.values()):
        return left, None
    for fewer in range(min(data, left * data // count), 0, -1):
        resized = _with_data(experiment, fewer)
        try:
            mesh_layout.check_layout(resized, resized.mesh.least())
        except InputError:
            continue
        if fewer * count % data == 0:
            return fewer * count // data, fewer
    raise InputError(
        f"{left} of {count} processes are left, on which no mesh.data up to {data} fits the rest of [mesh] and divides "
        "training.batch / training.microbatches; start the job again with another [mesh], or when all are back"
    )


def _own_address(coordinator: str) -> str:
    """Return the address of this machine on the network of the coordinator's."""
    host, _, port = coordinator.rpartition(":")
    if host in LOOPBACK:
        return host
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing: the system chooses the interface
            own = probe.getsockname()[0]
    except OSError as error:
        raise InputError(
            f"--process: {host} cannot be found ({error.strerror}); give the address of process 0"
        ) from None
    return f"[{own}]" if ":" in own else own
