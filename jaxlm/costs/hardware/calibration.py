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
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from jaxlm.core import accelerators
from jaxlm.core.errors import InputError
from jaxlm.core.files import default_cache, replace, unwritable
from jaxlm.core.schema import Section
from jaxlm.costs.hardware.chips import Chip, OnChip
from jaxlm.costs.hardware.sustained import AttentionRates, Launches, PassRates, ProductRates, Sustained

if TYPE_CHECKING:
    import jax

    from jaxlm.costs.hardware.timed import Microbenchmark

HOST = "host"
# The calibration for this process alone, where no file can be written.
_uncached: Chip | None = None
_MEASURE = "run jaxlm hardware host --measure"
_DTYPES = ("float32", "bfloat16")
_MAX_SECONDS = 10.0  # for all programs together
_MEASURED = "measured on this machine"
# Numbers of an array that a pass reads; sequences and head dims of attention, on a CPU and on an accelerator.
_NUMBERS = 2**16, 2**20, 2**22
_CPU_SEQUENCES, _CPU_HEAD_DIMS = (64, 128, 256, 1024), (16, 32, 128)
_SEQUENCES, _HEAD_DIMS = (1024, 4096, 16384), (64, 128)
_FORMAT = 4  # of the cached file


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
    copied_bytes: int = 2**29,
    calls: int = 300,
) -> Chip:
    """Measure the default device and cache the result; about 20 s on a CPU.

    Peak rates come from the fastest call: `peak_flops` over products with sides up to `largest`, and
    `memory_bytes_per_s` of an array of `copied_bytes` changed in place, reads and writes counted. The rates that
    programs sustain (`Chip.sustained`) come from the first decile of call times, and their spreads from the quartiles.
    Programs alternate, each at most `calls` times (`jaxlm.costs.hardware.timed`).

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
        empty, kernels = timed.empty_call(), timed.kernels()
        timed.alternate([empty, kernels], calls, _MAX_SECONDS / 10)
        copied = timed.change_in_place(min(copied_bytes, memory // 8))
        matrices, squares, heads = {}, {}, {}
        for dtype in _DTYPES:
            matrices[dtype], squares[dtype] = timed.products(dtype, largest)
            heads[dtype] = timed.heads(dtype, largest)
        numbers = sorted({min(size, copied_bytes // 4) for size in _NUMBERS})
        passes = [timed.passes(each) for each in numbers]
        updates = [[timed.update(each)] for each in numbers]
        reads = [[timed.weights(4 * each)] for each in numbers]
        attention = _attention(device, largest)
        say(f"compiled; measuring for about {_MAX_SECONDS:.0f} s")
        products = {dtype: [*matrices[dtype], squares[dtype], *heads[dtype]] for dtype in _DTYPES}
        others = [program for kind in (passes, updates, reads) for each in kind for program in each]
        others += [program for each in attention.values() for program in each]
        timed.alternate([copied, *itertools.chain(*products.values()), *others], calls, _MAX_SECONDS)
        dispatch_s = empty.undisturbed
        measured = Sustained(
            products=tuple(
                ProductRates(dtype=dtype, batched=kind is heads, **_measured([[each] for each in by_side], dispatch_s))
                for kind in (matrices, heads)
                for dtype, by_side in kind.items()
            ),
            passes=tuple(
                PassRates(kind=kind, **_measured(by_size, dispatch_s))
                for kind, by_size in (("pass", passes), ("optimizer", updates), ("weights", reads))
            ),
            attention=tuple(
                AttentionRates(
                    kernel=kernel,
                    direction=direction,
                    mask="causal",
                    head_dim=head_dim,
                    dtype=dtype,
                    **_measured([[each] for each in by_sequence], dispatch_s),
                )
                for (kernel, direction, head_dim, dtype), by_sequence in attention.items()
            ),
            launches=(
                Launches(
                    kernel_s=max(0.0, kernels.undisturbed - dispatch_s) / kernels.work,
                    eager_s=dispatch_s,
                    step_s=dispatch_s,
                    token_s=0.0,
                    source=_MEASURED,
                    spread=empty.spread,
                ),
            ),
        )
    chip = Chip(
        id=HOST,
        name=here.cpu if device.platform == "cpu" else device.device_kind,
        vendor="this machine",
        kind=device.platform if device.platform in ("cpu", "tpu") else "gpu",
        peak_flops={dtype: max(program.best for program in each) for dtype, each in products.items()},
        memory_bytes=memory,
        device_memory_bytes=memory,
        memory_bytes_per_s=copied.best,
        on_chip=OnChip(core="core", cores=here.cores) if device.platform == "cpu" else None,
        sustained=measured,
        notes=f"Measured with JAX {here.jax} at its default precision: rates that programs reach, not rated peaks.",
        sources={
            _MEASURED: ("peak_flops", "memory_bytes_per_s"),
            "memory_stats" if stats else "the operating system": ("memory_bytes", "device_memory_bytes", "on_chip"),
        },
    )
    say(f"memory moves {chip.memory_bytes_per_s / 1e9:.1f} GB/s")
    for dtype, peak in chip.peak_flops.items():
        usual = max(rate for each in measured.products if each.dtype == dtype for _, rate in each.rates)
        say(f"{dtype} products run at {peak / 1e12:.3f} TFLOP/s, in a step at {usual / 1e12:.3f}")
    _write(Calibration(format=_FORMAT, machine=here, device_kind=device.device_kind, chip=chip))
    return chip


def _attention(device: "jax.Device", largest: int) -> "dict[tuple[Any, ...], list[Microbenchmark]]":
    """Return programs of attention by (kernel, direction, head dim, dtype), each a list by ascending sequences."""
    import jax

    from jaxlm.costs.hardware import timed
    from kernels_pallas.core import target
    from kernels_pallas.flash_attention import kernel_of

    is_cpu = device.platform == "cpu"
    dtype, sequences, head_dims = "bfloat16", _SEQUENCES, _HEAD_DIMS
    if is_cpu:
        dtype, sequences, head_dims = "float32", _CPU_SEQUENCES, _CPU_HEAD_DIMS
    sequences = [each for each in sequences if each <= max(largest, sequences[0])]
    programs = {}
    for head_dim, direction in itertools.product(head_dims, ("training",) if is_cpu else ("forward", "training")):
        for sequence in sequences:
            kernel, trains = None, direction == "training"
            if not is_cpu:
                x = jax.ShapeDtypeStruct((1, sequence, 1, head_dim), dtype)
                mask = (jax.ShapeDtypeStruct((1, sequence), "int32"),) * 2
                chip = target.of_kind(device.platform, device.device_kind)
                kernel = kernel_of(chip, x, x, x, training=trains, key_range=mask, deterministic=False)
            program = timed.attention(head_dim, sequence, dtype, trains, xla=kernel is None)
            programs.setdefault((kernel or "xla", direction, head_dim, dtype), []).append(program)
    return programs


def _measured(programs: "list[list[Microbenchmark]]", dispatch_s: float) -> dict[str, Any]:
    """Return what a measured entry has: its curve, and as its spread the median of those of its programs."""
    from jaxlm.costs.hardware import timed

    spread = statistics.median(program.spread for each in programs for program in each)
    return {"rates": timed.curve(programs, dispatch_s), "spread": spread, "source": _MEASURED}


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
