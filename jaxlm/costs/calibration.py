"""This machine as a chip: what its default JAX device does, measured once and kept.

Calibration is the one part of `jaxlm.costs` that starts a JAX backend, and only to measure.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxlm import accelerators
from jaxlm.costs.chips import Chip, OnChip
from jaxlm.data.config import default_cache
from jaxlm.errors import InputError
from jaxlm.schema import Section

HOST = "host"
_MEASURE = "run jaxlm hardware host --measure"
_DTYPES = ("float32", "bfloat16")
_LONG_ENOUGH_S = 0.05  # a product that takes so long hides its dispatch
_MOST_S = 4.0  # on the products of one type
_REPEATS = 5
_SMALLEST, _WIDTH = 32, 2048
_LOOPS = 20


class Machine(Section):
    """What a calibration is true of; `accelerators` and `platforms` tell which device JAX chooses, without starting
    it."""

    cpu: str
    cores: int
    accelerators: tuple[str, ...]
    platforms: str
    jax: str


class Calibration(Section):
    """What is kept: the machine, the kind of the device that was measured, and its figures."""

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
    try:
        kept = Calibration.model_validate_json(_file().read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"this machine is not calibrated yet; {_MEASURE}") from None
    except (OSError, ValidationError):
        raise InputError(f"the calibration in {_file()} cannot be read; {_MEASURE}") from None
    here = machine()
    for fact, was in kept.machine:
        if was != getattr(here, fact):
            raise InputError(
                f"the calibration is of another machine ({fact} {was!r}, here {getattr(here, fact)!r}); {_MEASURE}"
            )
    return kept.chip


def measure(
    say: Callable[[str], None] = lambda line: None,
    *,
    largest: int = 16384,
    copied_bytes: int = 2**30,
    calls: int = 300,
) -> Chip:
    """Measure the default device and keep what was found; less than 20 s.

    `peak_flops` is the best rate, over products of up to `largest`, of the median of some calls;
    `memory_bytes_per_s` counts reads and writes of an array of `copied_bytes` that is changed in place;
    `dispatch_s` is the median of `calls` calls that each wait for a compiled function of one number;
    `elementwise_flops` is of a function whose mixture is that of a softmax: of six operations, one an exponential.
    """
    import jax

    accelerators.choose()
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    here = machine()
    memory = stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    say(f"measuring {device.device_kind}")
    with jax.default_device(device):
        dispatch = _dispatch(calls)
        say(f"a call takes {dispatch * 1e6:.1f} µs")
        bandwidth = _bandwidth(min(copied_bytes, memory // 8))
        say(f"memory moves {bandwidth / 1e9:.1f} GB/s")
        elementwise = _elementwise(min(2**20, copied_bytes // 4))
        say(f"element by element it computes {elementwise / 1e9:.2f} GFLOP/s")
        rates, peaks = {}, {}
        for dtype in _DTYPES:
            rates[dtype] = tuple(_products(dtype, largest))
            peaks[dtype] = max(rate for _, rate in rates[dtype])
            say(f"{dtype} products run at {peaks[dtype] / 1e12:.3f} TFLOP/s")
    chip = Chip(
        id=HOST,
        name=here.cpu if device.platform == "cpu" else device.device_kind,
        vendor="this machine",
        kind=device.platform if device.platform in ("cpu", "tpu") else "gpu",
        peak_flops=peaks,
        product_rates=rates,
        memory_bytes=memory,
        device_memory_bytes=memory,
        memory_bytes_per_s=bandwidth,
        on_chip=OnChip(core="core", cores=here.cores) if device.platform == "cpu" else None,
        dispatch_s=dispatch,
        elementwise_flops=elementwise,
        notes=f"Measured with JAX {here.jax} at its default precision: what programs reach, not what is sold.",
        sources={
            "measured on this machine": (
                "peak_flops",
                "memory_bytes_per_s",
                "dispatch_s",
                "elementwise_flops",
                "product_rates",
            ),
            "memory_stats" if stats else "the operating system": ("memory_bytes", "device_memory_bytes", "on_chip"),
        },
    )
    _keep(Calibration(machine=here, device_kind=device.device_kind, chip=chip))
    return chip


def _dispatch(calls: int) -> float:
    """Median seconds of a call that computes next to nothing."""
    import jax

    add = jax.jit(lambda x: x + 1.0)
    x = add(0.0)
    return statistics.median(_times(lambda: add(x).block_until_ready(), calls))


def _bandwidth(size: int) -> float:
    """Bytes/s read and written, of an array far larger than any cache. It is donated, so that no memory is allocated:
    the first touch of new pages would be measured in its place."""
    import jax
    import jax.numpy as jnp

    change = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    x = jnp.zeros(size // 4, jnp.float32)

    def once() -> None:
        nonlocal x
        x = change(x).block_until_ready()

    return 2 * x.nbytes / statistics.median(_times(once, _REPEATS))


def _elementwise(size: int) -> float:
    """FLOP/s of operations element by element, an exponential in six, on arrays that a cache may hold."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def change(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _LOOPS, lambda _, y: (jnp.exp(y * 0.5 - 1.0) + y) * 0.25 - 0.125, x)

    x = jnp.zeros(size, jnp.float32)
    return 6 * _LOOPS * size / statistics.median(_times(lambda: change(x).block_until_ready(), _REPEATS))


def _products(dtype: str, largest: int) -> Iterator[tuple[int, float]]:
    """Side and FLOP/s of products [n, side] × [side, n] of growing side, until a square one takes long enough; n is as
    large as most models are wide, so that small sides are what attention and narrow models multiply."""
    import jax
    import jax.numpy as jnp

    multiply = jax.jit(jnp.matmul)
    began, side = time.perf_counter(), min(_SMALLEST, largest)
    while True:
        n = max(side, min(_WIDTH, largest))
        left, right = jnp.full((n, side), 1e-3, dtype), jnp.full((side, n), 1e-3, dtype)
        with jax.default_matmul_precision("default"):
            times = _times(lambda: multiply(left, right).block_until_ready(), _REPEATS)  # noqa: B023
        seconds = statistics.median(times)
        yield side, 2 * n * n * side / seconds
        next_s = 8 * seconds * (_REPEATS + 2)
        over = time.perf_counter() - began + next_s > _MOST_S
        if (side == n and seconds >= _LONG_ENOUGH_S) or 2 * side > largest or over:
            return
        side *= 2


def _times(call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each call, after two that warm up."""
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times[2:]


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
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(calibration.model_dump_json(indent=2), encoding="utf-8")
    new.replace(file)  # whole, or not there
