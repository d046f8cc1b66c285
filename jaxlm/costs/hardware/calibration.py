"""Calibration: this machine as a chip, with the rates of its default JAX device measured once and cached.

This is the only part of `jaxlm.costs` that starts a JAX backend, and only to measure.
"""

import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from jaxlm.core import accelerators
from jaxlm.core.errors import InputError
from jaxlm.core.files import default_cache, replace, unwritable
from jaxlm.core.schema import Section
from jaxlm.costs.hardware.chips import Chip, OnChip

if TYPE_CHECKING:
    from jaxlm.costs.hardware.timed import Microbenchmark

HOST = "host"
# The calibration for this process alone, where no file can be written.
_uncached: Chip | None = None
_MEASURE = "run jaxlm hardware host --measure"
_DTYPES = ("float32", "bfloat16")
_MAX_SECONDS = 5.0  # for all programs together
_FORMAT = 2  # of the cached file


class Machine(Section):
    """The machine that a calibration is valid for. `accelerators` and `platforms` determine which device JAX chooses,
    without starting JAX."""

    cpu: str
    cores: int
    accelerators: tuple[str, ...]
    platforms: str
    jax: str


class Calibration(Section):
    """The cached file: the machine, the kind of the measured device, and its figures. A file in another format was
    measured by another method, and is measured again."""

    format: Literal[_FORMAT]
    machine: Machine
    device_kind: str
    chip: Chip


def machine() -> Machine:
    """Describe this machine, without JAX."""
    return Machine(
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        accelerators=accelerators.found(),
        platforms=accelerators.platforms(),
        jax=metadata.version("jax"),
    )


def load() -> Chip:
    """Return the calibration of this machine. Raises InputError if there is none, or one of another machine."""
    if _uncached is not None:
        return _uncached
    try:
        kept = Calibration.model_validate_json(_file().read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"this machine is not calibrated yet; {_MEASURE}") from None
    except (OSError, ValidationError):
        raise InputError(f"the calibration in {_file()} is broken or of another version; {_MEASURE}") from None
    here = machine()
    for fact, was in kept.machine:
        if was != getattr(here, fact):
            raise InputError(
                f"the calibration is of another machine ({fact} {was!r}, here {getattr(here, fact)!r}); {_MEASURE}"
            )
    return kept.chip


def check_writable() -> None:
    """Raise InputError if a calibration could not be written."""
    folder = _file().parent
    if why := unwritable(folder):
        raise InputError(
            f"a calibration is kept in {folder}, which cannot be written to ({why}); set XDG_CACHE_HOME to one that can"
        )


def use(chip: Chip) -> None:
    """Make `load` return this chip, in this process alone."""
    global _uncached
    _uncached = chip


def ensure(say: Callable[[str], None]) -> None:
    """Measure a CPU, once per machine, or once per start where that cannot be kept, so that what it should do can be
    counted. In a process of its own, whose memory does not stay."""
    if accelerators.platforms() != "cpu":
        return
    try:
        load()
        return
    except InputError:
        pass
    try:
        check_writable()
        kept = True
        say("measuring this machine, once: jaxlm hardware host shows the figures")
    except InputError as error:
        kept = False
        say(f"measuring this machine, for this attempt alone: {error}")
    command = [sys.executable, "-m", "jaxlm", "hardware", "host", "--measure", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        where = {} if kept else {"XDG_CACHE_HOME": folder}
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **where})
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        say(f"this machine could not be measured ({why}); nothing is counted in seconds")
    elif not kept:
        (row,) = json.loads(done.stdout)["rows"]
        use(Chip.model_validate({key: row[key] for key in row.keys() & Chip.model_fields.keys()}))


def measure(
    say: Callable[[str], None] = lambda line: None,
    *,
    largest: int = 16384,
    copied_bytes: int = 2**30,
    calls: int = 300,
) -> Chip:
    """Measure the default device and cache the result; about 10 s on a CPU.

    Peak rates come from the fastest call: `peak_flops` over products with sides up to `largest`, and
    `memory_bytes_per_s` of an array of `copied_bytes` changed in place, reads and writes counted. Rates in a step come
    from the third quartile of call times: `product_rates` of a matrix and both its gradients, `batched_rates` the same
    for the heads of attention, `elementwise_flops` of operations as in a softmax, and `pass_bytes_per_s` of the slowest
    kind of pass between products. `dispatch_s` is the median time of an empty call. Programs alternate, each at most
    `calls` times (`jaxlm.costs.hardware.timed`).

    Raises InputError, before measuring, if the result could not be written.
    """
    import jax

    from jaxlm.costs.hardware import timed

    check_writable()
    accelerators.choose()
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    here = machine()
    memory = stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    say(f"measuring {device.device_kind}")
    with jax.default_device(device), jax.default_matmul_precision("default"):
        empty = timed.empty_call()
        timed.alternate([empty], calls, _MAX_SECONDS)
        copied = timed.change_in_place(min(copied_bytes, memory // 8))
        numbers = min(2**20, copied_bytes // 4)
        elementwise, passes = timed.elementwise(numbers), timed.passes(numbers)
        matrices, squares, heads = {}, {}, {}
        for dtype in _DTYPES:
            matrices[dtype], squares[dtype] = timed.products(dtype, largest)
            heads[dtype] = timed.heads(dtype, largest)
        each = [by_side.values() for kind in (matrices, squares, heads) for by_side in kind.values()]
        timed.alternate([copied, elementwise, *passes, *itertools.chain(*each)], calls, _MAX_SECONDS)
    chip = Chip(
        id=HOST,
        name=here.cpu if device.platform == "cpu" else device.device_kind,
        vendor="this machine",
        kind=device.platform if device.platform in ("cpu", "tpu") else "gpu",
        peak_flops={
            dtype: max(program.best for kind in (matrices, squares, heads) for program in kind[dtype].values())
            for dtype in _DTYPES
        },
        product_rates=_rates(matrices),
        batched_rates=_rates(heads),
        memory_bytes=memory,
        device_memory_bytes=memory,
        memory_bytes_per_s=copied.best,
        # In the upper bound passes go through memory, so they are no faster than memory.
        pass_bytes_per_s=min(copied.best, *(program.sustained for program in passes)),
        on_chip=OnChip(core="core", cores=here.cores) if device.platform == "cpu" else None,
        dispatch_s=statistics.median(empty.seconds),
        elementwise_flops=elementwise.sustained,
        notes=f"Measured with JAX {here.jax} at its default precision: rates that programs reach, not rated peaks.",
        sources={
            "measured on this machine": (
                "peak_flops",
                "memory_bytes_per_s",
                "pass_bytes_per_s",
                "dispatch_s",
                "elementwise_flops",
                "product_rates",
                "batched_rates",
            ),
            "memory_stats" if stats else "the operating system": ("memory_bytes", "device_memory_bytes", "on_chip"),
        },
    )
    say(f"a call takes {chip.dispatch_s * 1e6:.1f} µs")
    say(f"memory moves {chip.memory_bytes_per_s / 1e9:.1f} GB/s, a pass {chip.pass_bytes_per_s / 1e9:.1f} GB/s")
    say(f"elementwise operations run at {chip.elementwise_flops / 1e9:.2f} GFLOP/s")
    for dtype, peak in chip.peak_flops.items():
        usual = max(rate for _, rate in chip.product_rates[dtype])
        say(f"{dtype} products run at {peak / 1e12:.3f} TFLOP/s, in a step at {usual / 1e12:.3f}")
    _write(Calibration(format=_FORMAT, machine=here, device_kind=device.device_kind, chip=chip))
    return chip


def _rates(programs: dict[str, dict[int, "Microbenchmark"]]) -> dict[str, tuple[tuple[int, float], ...]]:
    return {
        dtype: tuple((side, program.sustained) for side, program in by_side.items())
        for dtype, by_side in programs.items()
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def _file() -> Path:
    return Path(default_cache(), "hardware", "host.json").expanduser()


def _write(calibration: Calibration) -> None:
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    replace(file, calibration.model_dump_json(indent=2))
