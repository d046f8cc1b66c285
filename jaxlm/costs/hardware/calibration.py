"""This machine as a chip: what its default JAX device does, measured once and kept.

Calibration is the one part of `jaxlm.costs` that starts a JAX backend, and only to measure.
"""

import itertools
import os
import platform
import statistics
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from jaxlm.core import accelerators
from jaxlm.core.errors import InputError
from jaxlm.core.files import replace, unwritable
from jaxlm.core.schema import Section
from jaxlm.costs.hardware.chips import Chip, OnChip
from jaxlm.data.config import default_cache

if TYPE_CHECKING:
    from jaxlm.costs.hardware.timed import Microbenchmark

HOST = "host"
# Of this machine, where none can be kept: for this process.
_unkept: Chip | None = None
_MEASURE = "run jaxlm hardware host --measure"
_DTYPES = ("float32", "bfloat16")
_MOST_S = 5.0  # on all programs together
_FORMAT = 2  # of what is kept


class Machine(Section):
    """What a calibration is true of; `accelerators` and `platforms` tell which device JAX chooses, without starting
    it."""

    cpu: str
    cores: int
    accelerators: tuple[str, ...]
    platforms: str
    jax: str


class Calibration(Section):
    """What is kept: the machine, the kind of the device that was measured, and its figures. One in another format was
    measured otherwise, and is measured again."""

    format: Literal[_FORMAT]
    machine: Machine
    device_kind: str
    chip: Chip


def machine() -> Machine:
    """The facts of this machine, without JAX."""
    return Machine(
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        accelerators=accelerators.found(),
        platforms=accelerators.platforms(),
        jax=metadata.version("jax"),
    )


def load() -> Chip:
    """The calibration of this machine. Raises InputError where there is none, or only that of another machine."""
    if _unkept is not None:
        return _unkept
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


def check_kept() -> None:
    """Raises InputError where a calibration could not be kept."""
    folder = _file().parent
    if why := unwritable(folder):
        raise InputError(
            f"a calibration is kept in {folder}, which cannot be written to ({why}); set XDG_CACHE_HOME to one that can"
        )


def use(chip: Chip) -> None:
    """What `load` gives from now on, in this process alone."""
    global _unkept
    _unkept = chip


def measure(
    say: Callable[[str], None] = lambda line: None,
    *,
    largest: int = 16384,
    copied_bytes: int = 2**30,
    calls: int = 300,
) -> Chip:
    """Measure the default device and keep what was found; about 10 s on a CPU. Raises InputError, before it measures,
    where nothing can be kept.

    What it does at best, of the fastest call: `peak_flops`, over products of up to `largest`; `memory_bytes_per_s`, of
    an array of `copied_bytes` that is changed in place, reads and writes counted. What it does in a step, of calls
    three in four of which are faster: `product_rates`, of a matrix and both its gradients; `batched_rates`, of the
    heads of attention likewise; `elementwise_flops`, of a mixture as in a softmax; `pass_bytes_per_s`, of the slowest
    kind of pass between products. `dispatch_s` is the median of a call of nothing. Programs take turns, each at most
    `calls` times (`jaxlm.costs.hardware.timed`).
    """
    import jax

    from jaxlm.costs.hardware import timed

    check_kept()
    accelerators.choose()
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    here = machine()
    memory = stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    say(f"measuring {device.device_kind}")
    with jax.default_device(device), jax.default_matmul_precision("default"):
        nothing = timed.call_of_nothing()
        timed.in_turns([nothing], calls, _MOST_S)
        copied = timed.change_in_place(min(copied_bytes, memory // 8))
        numbers = min(2**20, copied_bytes // 4)
        mixture, passes = timed.mixture(numbers), timed.passes(numbers)
        matrices, squares, heads = {}, {}, {}
        for dtype in _DTYPES:
            matrices[dtype], squares[dtype] = timed.products(dtype, largest)
            heads[dtype] = timed.heads(dtype, largest)
        each = [by_side.values() for kind in (matrices, squares, heads) for by_side in kind.values()]
        timed.in_turns([copied, mixture, *passes, *itertools.chain(*each)], calls, _MOST_S)
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
        # In the upper bound they go through memory, so they are no faster than it.
        pass_bytes_per_s=min(copied.best, *(program.sustained for program in passes)),
        on_chip=OnChip(core="core", cores=here.cores) if device.platform == "cpu" else None,
        dispatch_s=statistics.median(nothing.seconds),
        elementwise_flops=mixture.sustained,
        notes=f"Measured with JAX {here.jax} at its default precision: what programs reach, not what is sold.",
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
    say(f"element by element it computes {chip.elementwise_flops / 1e9:.2f} GFLOP/s")
    for dtype, peak in chip.peak_flops.items():
        usual = max(rate for _, rate in chip.product_rates[dtype])
        say(f"{dtype} products run at {peak / 1e12:.3f} TFLOP/s, in a step at {usual / 1e12:.3f}")
    _keep(Calibration(format=_FORMAT, machine=here, device_kind=device.device_kind, chip=chip))
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


def _keep(calibration: Calibration) -> None:
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    replace(file, calibration.model_dump_json(indent=2))
