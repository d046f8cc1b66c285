"""Measure on one NVIDIA GPU what decides the defaults, in ten minutes, with the expected figure beside each.

    pip install -e '.[cuda]'              # JAX 0.11.2 or newer; PyTorch, where it is installed, is timed as well
    python benchmarks/gpu.py [--minutes 10] [--only TEXT] [--out DIR]
    JAX_PLATFORMS=cpu python benchmarks/gpu.py --dry-run [--out DIR]   # every measurement, tiny, on a CPU

Measurements run in the order of what they decide, each in a process of its own. Every figure is printed, and written to
DIR/<chip>/gpu.json, as soon as it is there; the programs and traces of training steps lie beside it. At the time limit,
or at Ctrl-C, the measurement that runs is stopped, and what was measured stays. Kernels' rows are also written to
DIR/<chip>/kernels.json, and the table that such rows make for `implementation=None` to DIR/<chip>/measured.json. DIR is
`benchmarks/results`, where `python -m kernels_pallas.bench.choose` makes it the table of this repository, or with
`--dry-run` a new temporary folder.

A second run on the same day with the same versions, such as one with `--only`, replaces what it measures again and
keeps the rest; any other run replaces the files.

Expectations are of an H100 SXM: measured there on 2026-11-26, or predicted from compiled programs. docs/kernels.md and
benchmarks/README.md say which.
"""

import argparse
import importlib.util
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import results
from gpu_rows import MEASUREMENTS

from jaxlm.cli.tables import TextTable, names, numbers, texts
from jaxlm.core.errors import InputError


class Expected(NamedTuple):
    """The range that a figure is expected in. `is_measured`: an H100 gave it before; otherwise it is predicted."""

    low: float
    high: float
    is_measured: bool = False

    def __str__(self) -> str:
        low, high = f"{self.low:.4g}", f"{self.high:.4g}"
        return (low if low == high else f"{low} to {high}") + ("" if self.is_measured else " (predicted)")


@dataclass(frozen=True)
class Measurement:
    """A measurement in a process of its own.

    Attributes:
      seconds: how long it takes on an H100 with its compilations, about.
      kind: a function of `gpu_rows`, with its `arguments`.
      expected: by the name of a figure.
    """

    name: str
    seconds: int
    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Expected] = field(default_factory=dict)


def _attention() -> dict[str, Expected]:
    """Return expectations of attention's forward pass and training, TFLOP/s."""
    forward = {
        ("causal 8192 × 64", "mosaic_gpu"): Expected(430, 480),
        ("causal 8192 × 128", "mosaic_gpu"): Expected(560, 620),
        ("full 8192 × 128", "mosaic_gpu"): Expected(600, 660),
        ("causal 8192 × 256", "mosaic_gpu"): Expected(520, 600),
        ("causal 8192 × 256", "triton"): Expected(390, 410),
        ("causal 8192 × 64", "triton"): Expected(413, 413, True),
        ("causal 8192 × 128", "triton"): Expected(450, 450, True),
        ("causal 8192 × 64", "cudnn"): Expected(462, 462, True),
        ("causal 8192 × 128", "cudnn"): Expected(590, 590, True),
        ("full 8192 × 128", "cudnn"): Expected(665, 665, True),
        ("causal 2048 × 128", "cudnn"): Expected(484, 484, True),
        ("causal 8192 × 256", "cudnn"): Expected(618, 618, True),
    }
    training = {
        ("causal 8192 × 128", "mosaic_gpu"): Expected(435, 435),
        ("causal 8192 × 128", "cudnn"): Expected(521, 521, True),
        ("causal 8192 × 256", "triton"): Expected(250, 270),
    }
    return {
        f"flash_attention, {case}, {direction}, {name}, TFLOP/s": expected
        for direction, of_direction in (("forward", forward), ("training", training))
        for (case, name), expected in of_direction.items()
    }


def _shares(*cases: tuple[str, str]) -> dict[str, Expected]:
    """Return expectations of row-wise kernels: the share of a copy's bandwidth, at least 90 % of it."""
    return {
        f"{operation}, {case}, {direction}, triton, share of copy": Expected(0.9, 1.0)
        for operation, case in cases
        for direction in ("forward", "training")
    }


_ATTENTION = ("causal 8192 × 64", "causal 8192 × 128", "causal 8192 × 256", "full 8192 × 128", "causal 2048 × 128")
_ROWS = ("rms_norm", "layer_norm", "softmax", "gated_activation", "bias_activation", "rotary_embedding")
_OF_ROWS = ("8192 × 4096*", "8192 × 14336, SwiGLU", "16384 × 6400*", "Llama 3 8B, queries")
_LOOP, _NAMED = "execution.scan_layers=true", 'execution.remat=["query", "key", "value", "attention", "up"]'
_LLAMA = {"model": "llama3.2_1b"}
_KEPT = "execution.remat=none"

PLAN = (
    Measurement("assembler", 15, "assembler", {}, {"remarks C75xx": Expected(0, 0)}),
    Measurement(
        "attention",
        120,
        "kernels",
        {
            "operations": ["flash_attention"],
            "patterns": list(_ATTENTION),
            "implementations": ["triton", "mosaic_gpu", "cudnn"],
        },
        _attention(),
    ),
    Measurement(
        "exactness",
        40,
        "exact",
        {},
        {f"{name}, largest error": Expected(0, 0.03) for name in ("triton", "mosaic_gpu")},
    ),
    Measurement(
        "GPT-2 355M, default",
        45,
        "train",
        {"model": "gpt2-355m", "keeps": "gpt2-355m"},
        {"ms a step": Expected(86, 90)},
    ),
    Measurement(
        "GPT-2 355M, in a loop",
        25,
        "train",
        {"model": "gpt2-355m", "overrides": [_LOOP]},
        {"ms a step": Expected(102, 108)},
    ),
    Measurement(
        "GPT-2 355M, in a loop, named remat",
        25,
        "train",
        {"model": "gpt2-355m", "overrides": [_LOOP, _NAMED]},
        {"ms a step": Expected(98, 103)},
    ),
    Measurement(
        "Llama 3.2 1B, default, batch 8",
        45,
        "train",
        {**_LLAMA, "overrides": [_KEPT], "keeps": "llama3.2_1b"},
        {"ms a step": Expected(242, 251), "MFU, %": Expected(54.2, 56.3)},
    ),
    Measurement(
        "Llama 3.2 1B, default, batch 4",
        35,
        "train",
        {**_LLAMA, "overrides": [_KEPT, "training.batch=4"]},
        {"ms a step": Expected(126, 132.8), "MFU, %": Expected(51.2, 54.1)},
    ),
    Measurement(
        "Llama 3.2 1B, cuDNN's attention, batch 8",
        40,
        "train",
        {**_LLAMA, "overrides": [_KEPT, "execution.deterministic=false"], "one_document": True},
        {"ms a step": Expected(236, 245), "MFU, %": Expected(55.6, 57.7)},
    ),
    Measurement(
        "Llama 3.2 1B, compiled PyTorch, batch 8",
        50,
        "train",
        {**_LLAMA, "overrides": [_KEPT], "pytorch": True},
        {"ms a step": Expected(262, 270)},
    ),
    Measurement(
        "decoding, Llama 3.1 8B",
        60,
        "decode",
        {"model": "llama3.1-8b", "contexts": [128, 2048]},
        {
            "128 tokens, ms a token": Expected(6, 7.5),
            "2048 tokens, ms a token": Expected(6, 7),
            "2048 tokens, % of the time to read the weights": Expected(80, 92),
        },
    ),
    Measurement(
        "row-wise kernels",
        60,
        "kernels",
        {"operations": list(_ROWS), "patterns": list(_OF_ROWS), "implementations": ["triton", "mosaic_gpu"]},
        _shares(
            *(("rms_norm", case) for case in ("8192 × 4096", "8192 × 4096 with residual")),
            *(("layer_norm", case) for case in ("8192 × 4096", "8192 × 4096 with residual")),
            ("softmax", "8192 × 4096"),
            ("gated_activation", "8192 × 14336, SwiGLU"),
            ("bias_activation", "16384 × 6400, by tanh"),
            ("rotary_embedding", "Llama 3 8B, queries"),
        ),
    ),
    Measurement("loss", 45, "kernels", {"operations": ["linear_cross_entropy"], "patterns": ["8192 × 768 × 50257"]}),
    Measurement(
        "GPT-2 355M, merged products",
        30,
        "train",
        {"model": "gpt2-355m", "overrides": ["execution.compiler_options.xla_gpu_dot_merger_threshold_mb=512"]},
        {"ms a step": Expected(84, 92)},
    ),
    Measurement(
        "GPT-2 355M, products by cuBLAS alone",
        30,
        "train",
        {"model": "gpt2-355m", "overrides": ["execution.compiler_options.xla_gpu_enable_triton_gemm=false"]},
        {"ms a step": Expected(84, 92)},
    ),
)
_ENDS_IN_S = 8  # from SIGTERM until a process is killed
_MARK = "gpu.py: "  # before a line of JSON of a measurement's process


class Results:
    """Figures as they come, written to files after each."""

    def __init__(self, device: str, folder: Path, dry: bool):
        """Begin with those of an earlier run that may be added to. `device`: JAX's name of it."""
        self._device, self._chip, self._folder, self._dry = device, results.chip(device), folder, dry
        self._began = time.monotonic()
        earlier, kernels = (results.of_today(results.file_of(x, self._chip, folder)) for x in ("gpu", "kernels"))
        if earlier.get("device") != device or earlier.get("dry_run") != dry:
            earlier, kernels = {}, {}
        self._measured: list[dict[str, Any]] = [each for each in earlier.get("measurements", ()) if each["ended"]]
        self._kernels: list[dict[str, Any]] = [*kernels.get("rows", ()), *kernels.get("left_out", ())]
        self._ceilings: dict[str, Any] = kernels.get("ceilings", {})

    @property
    def place(self) -> Path:
        """The folder of the chip's results."""
        return self.write().parent

    def take(self, said: dict[str, Any]) -> None:
        """Add what a measurement's process says, print it, and write all files again."""
        if name := said.get("begins"):
            self.end("complete")
            self._now = next(each for each in PLAN if each.name == name)
            again = self._now.arguments.get("operations", ())
            self._measured = [each for each in self._measured if each["name"] != name]
            self._kernels = [row for row in self._kernels if row["operation"] not in again]
            self._measured.append({"name": name, "figures": [], "ended": ""})
            print(f"{name} ({time.monotonic() - self._began:.0f} s)", flush=True)
        elif error := said.get("error"):
            print(f"  {error}", flush=True)
            self.end(error)
        else:
            self._add(said)
        self.write()

    def _add(self, figure: dict[str, Any]) -> None:
        if kernel := figure.pop("kernel"):
            self._kernels.append(kernel)
        self._ceilings |= figure["details"].get("ceilings", {})
        expected = None if self._dry else self._now.expected.get(figure["name"])
        self._measured[-1]["figures"].append({**figure, "expected": expected and expected._asdict()})
        beside = f"   expected {expected}" if expected else ""
        print(f"  {figure['name']}: {_number(figure['value'])}{beside}", flush=True)

    def end(self, how: str) -> None:
        """Note how the measurement that runs has ended."""
        if self._measured and not self._measured[-1]["ended"]:
            self._measured[-1]["ended"] = how
            self.write()

    def write(self) -> Path:
        """Write the figures, and the rows of kernels as `kernels_pallas.bench` does."""
        rows = [row for row in self._kernels if "reason" not in row]
        left_out = [row for row in self._kernels if "reason" in row]
        if rows:
            described = {"device": self._device, "ceilings": self._ceilings, "rows": rows, "left_out": left_out}
            results.write("kernels", self._chip, described, self._folder)
        measured = {"device": self._device, "dry_run": self._dry, "measurements": self._measured}
        return results.write("gpu", self._chip, measured, self._folder)

    def finish(self) -> str:
        """Write the table that the rows of kernels make; return a line that names the files."""
        from kernels_pallas.bench import choose

        file = self.write()
        kernels = file.with_name("kernels.json")
        rows = choose.table([kernels], self._folder) if self._kernels and kernels.exists() else []
        if not rows:
            return f"wrote {file}"
        table = file.with_name("measured.json")
        table.write_text(choose.written(rows), encoding="utf-8")
        return (
            f"wrote {file}, {kernels.name} and {table.name}; python -m kernels_pallas.bench.choose reads {kernels.name}"
        )

    def table(self) -> TextTable:
        """Return every figure beside what is expected; those of a measurement that did not run are empty."""
        table = TextTable([*texts("figure"), *numbers("measured"), *names("expected")], self._chip)
        for row in self.compared():
            table.add(*row)
        return table

    def compared(self) -> Iterator[tuple[str, str, str]]:
        """Yield the name of each figure, what was measured and what is expected."""
        entries = {entry["name"]: entry for entry in self._measured}
        for measurement in PLAN:
            entry = entries.get(measurement.name, {"figures": []})
            figures = {each["name"]: each["value"] for each in entry["figures"]}
            for name in dict.fromkeys([*figures, *measurement.expected]):
                measured = _number(figures[name]) if name in figures else ""
                expected = "" if self._dry else str(measurement.expected.get(name, ""))
                yield f"{measurement.name}: {name}", measured, expected


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.4g}"


class TimeIsUp(Exception):
    """The time limit or a signal has come; with the exit status."""


def measure(
    measurements: Sequence[Measurement], arguments: argparse.Namespace, deadline: float, found: Results
) -> None:
    """Run measurements in one process until it ends or the deadline comes. Raises TimeIsUp then, or at a signal."""
    command = [sys.executable, __file__, "--out", str(found.place), *(["--dry-run"] if arguments.dry_run else [])]
    command += ["--worker", *(each.name for each in measurements)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    try:
        while (line := lines.get(timeout=max(deadline - time.monotonic(), 0.01))) is not None:
            if line.startswith(_MARK):  # other lines are of libraries
                found.take(json.loads(line.removeprefix(_MARK)))
        found.end("complete" if _end(process) == 0 else f"its process ended with status {process.returncode}")
    except queue.Empty:
        found.end("the time limit")
        raise TimeIsUp(0) from None
    except KeyboardInterrupt:
        found.end("a signal")
        raise TimeIsUp(130) from None
    finally:
        _end(process)


def _read(process: subprocess.Popen, lines: "queue.Queue[str | None]") -> None:
    for line in process.stdout or ():
        lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen) -> int:
    """Return the status of a process that ended, or is ended by SIGTERM and then SIGKILL: one whose kernel hangs ends
    in no other way."""
    for stop in (process.poll, process.terminate, process.kill):
        stop()
        try:
            return process.wait(1 if stop == process.poll else _ENDS_IN_S)
        except subprocess.TimeoutExpired:
            continue
    return process.wait()


def work(names: Sequence[str], dry: bool, folder: Path) -> None:
    """Run as the process of these measurements: a line for the beginning of each, for each figure, and for an error."""

    def say(**values: Any) -> None:
        print(_MARK + json.dumps(values), flush=True)

    for measurement in (each for each in PLAN if each.name in names):
        say(begins=measurement.name)
        try:
            for figure in MEASUREMENTS[measurement.kind](dry, folder, **measurement.arguments):
                say(**figure._asdict())
        except Exception as error:  # also of compilers and of PyTorch, of any type
            say(error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def page(found: Results) -> Iterator[str]:
    """Yield the lines of a table in Markdown: figures, what was measured and what is expected."""
    yield from ("| figure | measured | expected |", "| --- | --- | --- |")
    for row in found.compared():
        yield f"| {' | '.join(row)} |"


def device() -> str:
    """Return JAX's name of the first device, asked in a process of its own: this one holds no memory of it."""
    program = "import jax; print(jax.devices()[0].device_kind)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"JAX starts no device here: {(done.stderr.strip().splitlines() or ['it ended'])[-1]}")
    return done.stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="the time limit")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose names contain one of TEXT;TEXT …")
    parser.add_argument("--out", type=Path, help="folder of the results (benchmarks/results; a new one with --dry-run)")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--list", action="store_true", help="print all figures expected, as a table in Markdown")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if arguments.worker:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it here too; who started this ends it
        return work(arguments.worker, arguments.dry_run, arguments.out)
    texts = [text.strip() for text in arguments.only.split(";") if text.strip()]
    wanted = [each for each in PLAN if not texts or any(text in each.name for text in texts)]
    if not wanted:
        parser.error(f"--only {arguments.only}: there are {'; '.join(each.name for each in PLAN)}")
    if not 0 < 60 * arguments.minutes < threading.TIMEOUT_MAX:
        parser.error("--minutes must be positive, and finite")
    if arguments.list:
        return print(*page(Results("", results.FOLDER, False)), sep="\n")
    deadline = time.monotonic() + 60 * arguments.minutes
    try:
        kind = device()
    except InputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if results.chip(kind) == results.cpu() and not arguments.dry_run:
        parser.error("JAX finds no GPU, only a CPU; --dry-run measures tiny sizes there")
    if not importlib.util.find_spec("torch"):
        wanted = [each for each in wanted if not each.arguments.get("pytorch")]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = arguments.out or (Path(tempfile.mkdtemp(prefix="jaxlm-gpu-")) if arguments.dry_run else results.FOLDER)
    found = Results(kind, out, arguments.dry_run)
    try:
        found.write()
    except OSError as error:
        parser.error(f"--out {out} cannot be written: {error.strerror}")
    try:
        for together in [wanted] if arguments.dry_run else [[each] for each in wanted]:
            left = deadline - time.monotonic()
            if left < together[0].seconds / 2 and not arguments.dry_run:
                print(f"{together[0].name}: left out, {left:.0f} s are left")
                continue
            measure(together, arguments, deadline, found)
        status = 0
    except (TimeIsUp, KeyboardInterrupt) as stopped:
        status = stopped.args[0] if isinstance(stopped, TimeIsUp) else 130
        print("stopped; what was measured is kept", file=sys.stderr)
    found.table().print()
    print(found.finish())
    raise SystemExit(status)


if __name__ == "__main__":
    main()
