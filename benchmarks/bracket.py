"""Compare the measured training step of a CPU with its counted bracket.

    python benchmarks/bracket.py [--calibrations N] [--busy-loop]

Repeats N times: calibrates the machine as `jaxlm train` does once, and times blocks of steps of each setting on random
tokens, of which the median counts. Each expected time and its bracket are compared with the block of the same round,
and the bracket with all blocks. With a busy loop, only the calibrations are disturbed.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import interleave
import results
from training_steps import jaxlm_steps

from jaxlm import config as configuration
from jaxlm.config.experiment import Experiment
from jaxlm.costs.hardware.calibration import Calibration
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import step_time
from jaxlm.costs.workload import Workload

ROOT = Path(__file__).parents[1]
QUICKSTART = "configs/quickstart.toml"
_MEASURE = "import sys; from jaxlm.cli import main; sys.exit(main(['hardware', 'host', '--measure', '--json']))"
_BUSY = "while True: pass"
# Of one process. The steps after the first block may be slow too, while a virtual machine is given memory.
_BLOCKS = 3


@dataclass(frozen=True)
class BracketSetting:
    """A configuration with overrides, and the number of steps in a block."""

    config: str
    steps: int
    overrides: tuple[str, ...] = ()

    def load(self) -> Experiment:
        return configuration.load(ROOT / self.config, list(self.overrides))


SETTINGS = {
    "quickstart": BracketSetting(QUICKSTART, 12),
    "quickstart, rematerialised": BracketSetting(QUICKSTART, 12, ("execution.remat=full",)),
    "quickstart, 4 microbatches": BracketSetting(QUICKSTART, 12, ("training.microbatches=4",)),
    "shakespeare_char": BracketSetting("configs/shakespeare_char.toml", 60, ("data.text=stdlib",)),
    "gpt2_25m": BracketSetting("benchmarks/gpt2_25m.toml", 3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrations", type=int, default=4, metavar="N")
    parser.add_argument("--busy-loop", action="store_true")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--worker", choices=SETTINGS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return interleave.serve(lambda: jaxlm_steps(SETTINGS[arguments.worker].load()))

    chips, seconds, blocks = [], [], {name: [] for name in arguments.settings}
    for _ in range(arguments.calibrations):
        with _busy(arguments.busy_loop):
            began = time.perf_counter()
            chips.append(_calibrated())
            seconds.append(time.perf_counter() - began)
        for name in arguments.settings:
            command = [sys.executable, __file__, "--worker", name]
            worked = interleave.run_or_exit({name: command}, SETTINGS[name].steps, blocks=_BLOCKS)[name]
            blocks[name].append(statistics.median(worked.step_s))
    rows = {name: _row(SETTINGS[name].load(), chips, blocks[name]) for name in arguments.settings}
    for name, row in rows.items():
        print(
            f"{name}: {1e3 * row['median_step_s']:.1f} ms, expected over measured {row['expected_over_measured']:.2f}, "
            f"inside {row['inside']}, upper over lower {row['width']:.2f}"
        )
    described = {"calibration_s": seconds, "calibrations": list(map(_figures, chips)), "settings": rows}
    name = "bracket-busy-loop" if arguments.busy_loop else "bracket"
    print(results.write(name, results.cpu(), described))


def _calibrated() -> Chip:
    """Calibrate this machine in a separate process, without the user's cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        subprocess.run([sys.executable, "-c", _MEASURE], env=environment, check=True, capture_output=True)
        (kept,) = Path(cache).rglob("host.json")
        return Calibration.model_validate_json(kept.read_text()).chip


def _row(experiment: Experiment, chips: list[Chip], step_s: list[float]) -> dict[str, Any]:
    work = Workload.of(experiment)
    times = [step_time(work.on(chip), Target(chip, (1, 1))) for chip in chips]
    brackets = [(bracket.low, bracket.upper_bound) for bracket in times]
    pairs = [low <= s <= high for low, high in brackets for s in step_s]
    same_round = [low <= s <= high for (low, high), s in zip(brackets, step_s, strict=True)]
    return {
        "median_step_s": statistics.median(step_s),
        "blocks_step_s": step_s,
        "expected_s": [each.expected for each in times],
        "expected_over_measured": statistics.median(each.expected / s for each, s in zip(times, step_s, strict=True)),
        "parts_s": [{name: part.seconds for name, part in each.parts.items()} for each in times],
        "lower_bounds_s": [each.lower_bound for each in times],
        "brackets_s": brackets,
        "width": statistics.median(high / low for low, high in brackets),
        "inside": f"{sum(same_round)} of {len(same_round)} in the same round, {sum(pairs)} of {len(pairs)} in any",
    }


def _figures(chip: Chip) -> dict[str, Any]:
    return chip.model_dump(
        mode="json", include={"peak_flops", "memory_bytes_per_s", "sustained"}, exclude_defaults=True
    )


@contextlib.contextmanager
def _busy(wanted: bool) -> Iterator[None]:
    """Keep one core busy with another process within the context."""
    process = subprocess.Popen([sys.executable, "-c", _BUSY]) if wanted else None
    try:
        yield
    finally:
        if process:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
