"""Time a compiled program on its device."""

import glob
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class KernelTime(NamedTuple):
    """Seconds per call: median and quartiles over rounds.

    `clock` is "device" for times from the device's own trace, and "host" for times of consecutive calls on the host.
    """

    median: float
    lower: float
    upper: float
    clock: str

    @classmethod
    def of(cls, seconds: list[float], clock: str) -> "KernelTime":
        lower, median, upper = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        return cls(median, lower, upper, clock)


def measure(call: Callable[[], Any], rounds: int = 7, seconds: float = 0.05) -> KernelTime:
    """Time a call that returns arrays: after a warm-up, `rounds` rounds of enough calls in a row to take `seconds`."""
    for _ in range(2):
        jax.block_until_ready(call())
    calls = max(1, min(1000, round(seconds / max(_in_a_row(call, 3), 1e-7))))
    device = jax.devices()[0]
    if device.platform != "cpu":
        on_device = [_on_device(call, calls, device) for _ in range(rounds)]
        if all(on_device):
            return KernelTime.of(on_device, "device")
    return KernelTime.of([_in_a_row(call, calls) for _ in range(rounds)], "host")


def _in_a_row(call: Callable[[], Any], calls: int) -> float:
    """Return seconds per call on the host, which runs ahead: if a call is long enough the device never waits for it."""
    start = time.perf_counter()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _on_device(call: Callable[[], Any], calls: int, device: jax.Device) -> float | None:
    """Return seconds per call that the device was busy, from a trace, or None where the trace shows no device."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            _in_a_row(call, calls)
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        profile = jax.profiler.ProfileData.from_file(file)
    name = f"/device:{device.platform.upper()}:{device.id}"
    planes = [plane for plane in profile.planes if plane.name == name]
    # A GPU's work is on its streams; a TPU's programs follow one another on a line of their own.
    busy = sum(
        event.duration_ns
        for plane in planes
        for line in plane.lines
        if line.name.startswith("Stream") or line.name == "XLA Modules" and device.platform == "tpu"
        for event in line.events
    )
    return busy * 1e-9 / calls or None
