"""The ten-minute benchmark of a GPU runs end to end on a CPU, keeps what it has measured, and says what it expects."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def measured(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, dict]:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--out", str(folder), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    file = next(folder.glob("cpu*/gpu.json"), None)
    return done, json.loads(file.read_text()) if file else {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "only", ["assembler;attention;default, batch 8;decoding", pytest.param("", marks=pytest.mark.exhaustive)]
)
def test_every_measurement_runs_on_a_cpu(tmp_path, only):
    done, results = measured(tmp_path, "--dry-run", "--minutes", "30", "--only", only)
    assert done.returncode == 0, done.stderr
    assert results["dry_run"] and len(results["measurements"]) >= 4
    for each in results["measurements"]:
        assert each["ended"] == "complete" and each["figures"], each
    (place,) = tmp_path.iterdir()
    (program,) = place.glob("llama*/optimised_hlo.txt.gz")
    assert gzip.decompress(program.read_bytes()).startswith(b"HloModule jit_train")
    assert list(place.glob("llama*/trace/**/*.xplane.pb"))
    kernels = json.loads((place / "kernels.json").read_text())
    assert {"reference", "xla"} <= {row["implementation"] for row in kernels["rows"]}


@pytest.mark.slow
def test_it_ends_at_its_time_limit_with_what_it_has(tmp_path):
    done, results = measured(tmp_path, "--dry-run", "--minutes", "0.03", "--only", "decoding")
    assert done.returncode == 0 and "stopped; what was measured is kept" in done.stderr
    assert all(each["ended"] == "the time limit" for each in results["measurements"])


def test_a_second_run_keeps_what_it_does_not_measure_again(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    def run(measurement, operation, value):
        found = gpu.Results("cpu", tmp_path, dry=True)
        found.take({"begins": measurement})
        found.take({"name": "of it", "value": value, "details": {}, "kernel": {"operation": operation, "ms": value}})
        found.end("complete")
        measurements = json.loads(found.write().read_text())["measurements"]
        kernels = json.loads(found.write().with_name("kernels.json").read_text())["rows"]
        values = {each["name"]: figure["value"] for each in measurements for figure in each["figures"]}
        return values, {row["operation"]: row["ms"] for row in kernels}

    run("attention", "flash_attention", 1)
    assert run("loss", "linear_cross_entropy", 2) == (
        {"attention": 1, "loss": 2},
        {"flash_attention": 1, "linear_cross_entropy": 2},
    )
    assert run("attention", "flash_attention", 3)[1] == {"flash_attention": 3, "linear_cross_entropy": 2}
    monkeypatch.setattr(gpu.results, "versions", lambda: {"jax": "another"})
    assert run("loss", "linear_cross_entropy", 4) == ({"loss": 4}, {"linear_cross_entropy": 4})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "JAX finds no GPU, only a CPU; --dry-run measures tiny sizes there"),
        (("--only", "nothing"), "--only nothing: there are assembler; attention;"),
        (("--only", "nothing; "), "--only nothing; : there are assembler; attention;"),
        (("--minutes", "0"), "--minutes must be positive"),
        (("--minutes", "inf"), "--minutes must be positive, and finite"),
        (("--dry-run", "--out", __file__), "cannot be written: Not a directory"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_measured(tmp_path, arguments, message):
    done, results = measured(tmp_path, *arguments)
    assert done.returncode == 2 and message in done.stderr and not results


def test_the_page_has_what_is_expected(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    assert "\n".join(gpu.page(gpu.Results("", tmp_path, dry=False))) in (BENCHMARKS / "README.md").read_text()


def test_what_is_expected_has_names_that_measurements_give(monkeypatch):
    """Their operations, cases, directions and implementations exist."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    from kernels_pallas.core.registry import OPERATIONS

    for measurement in gpu.PLAN:
        if measurement.kind != "kernels":
            continue
        for name in measurement.expected:
            operation, rest = name.split(", ", 1)
            case, direction, implementation, _ = rest.rsplit(", ", 3)
            known = OPERATIONS[operation]
            assert case in {each.name for each in known.used_in("bench")} and direction in ("forward", "training")
            assert implementation in (*known.implementations, *known.others), name
            assert operation in measurement.arguments["operations"]
