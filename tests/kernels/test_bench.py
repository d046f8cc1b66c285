"""The benchmark on a CPU: the reference on small cases, every figure of a row."""

import json
import os
import subprocess
import sys

import jax
import pytest

from jaxlm import cli
from kernels_pallas.bench import __main__ as bench
from kernels_pallas.bench import run
from kernels_pallas.bench.ceilings import Ceilings
from kernels_pallas.bench.show import show_row
from kernels_pallas.bench.timing import KernelTime
from kernels_pallas.core.registry import OPERATIONS


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(run, "ceilings", lambda: Ceilings(1e10, 1e11, "float32"))
    measured = run.measure
    monkeypatch.setattr(run, "measure", lambda call, rounds: measured(call, rounds, seconds=0.001))


def test_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    bench.main(["--rounds", "2", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "cpu" / "kernels.json").read_text())
    rows = results["rows"]
    assert {row["operation"] for row in rows} == set(OPERATIONS)
    assert {row["implementation"] for row in rows} == {"reference", "xla", "chunked"}
    assert results["left_out"] == []
    for row in rows:
        assert row["seconds"] > 0 and row["clock"] == "host"
        assert row["bytes_per_s"] == row["bytes"] / row["seconds"]
        assert row["of_copy"] == row["bytes_per_s"] / 1e10
        assert row["of_matmul"] == row["flops"] / row["seconds"] / 1e11
        assert row["of_bound"] == pytest.approx(max(row["of_copy"], row["of_matmul"]))
    said = capsys.readouterr().out
    assert said.count("\n") == len(rows) + 2
    assert "of copy" not in said and "of matmul" in said  # small cases stay in caches


def test_cases_are_chosen_by_pattern(tmp_path, capsys):
    bench.main(["rms_norm", "softmax", "--rounds", "1", "--case", "sm*", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "cpu" / "kernels.json").read_text())
    assert results["cases"] == ["sm*"] and {row["case"] for row in results["rows"]} == {"small"}
    assert run.cases(OPERATIONS["rms_norm"], ["large*"]) == ()
    with pytest.raises(SystemExit, match="2"):
        bench.main(["rms_norm", "--case", "sm*", "--case", "large", "--out", str(tmp_path)])
    assert "--case large: no case has such a name; there are small" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_memory_is_left_to_peers(tmp_path):
    """JAX's memory options are set before its first use of a device."""
    code = (
        "import os, jax; devices = jax.devices\n"
        "def asked(*a): assert os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] == 'false'; return devices(*a)\n"
        "jax.devices = asked\n"
        "from kernels_pallas.bench.__main__ import main\n"
        f"main(['rms_norm', '--rounds', '1', '--out', {str(tmp_path)!r}])"
    )
    environment = {key: x for key, x in os.environ.items() if key != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert (tmp_path / "cpu" / "kernels.json").exists()


def test_peers_stand_in_the_same_rows_and_what_fails_is_said(monkeypatch, capsys):
    """A peer is compared with the same reference; one that refuses or fails does not affect the other rows."""

    def measured(peer, case, training, rounds):
        if training:
            raise RuntimeError("No available kernel.\nAborting.")
        return KernelTime(1e-3, 1e-3, 1e-3, "device"), 64

    monkeypatch.setattr(run, "peers_of", lambda operation: (run.peers.Peer("other", print),))
    monkeypatch.setattr(run.peers, "measure", measured)
    monkeypatch.setattr(run.peers, "give_back", lambda: None)
    heard = []
    results = run.benchmark(["softmax"], 1, lambda row: (heard.append(row), show_row(row)))
    forward, other, _ = results["rows"]
    assert other.keys() == forward.keys() and other["implementation"] == "other" and other["temporary_bytes"] == 64
    assert other["speedup"] == pytest.approx(forward["seconds"] / 1e-3)
    (left_out,) = results["left_out"]
    assert left_out["reason"] == "No available kernel." and left_out["direction"] == "training"
    assert heard == [forward, other, results["rows"][2], left_out]
    said = capsys.readouterr().out
    assert "other\n  left out: No available kernel." in said and max(map(len, said.splitlines())) <= 80


def test_an_implementation_that_does_not_fit_is_left_out(monkeypatch):
    def program(operation, case, implementation, training):
        if implementation == "reference":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
        return made(operation, case, implementation, training)

    made = run.program
    monkeypatch.setattr(run, "program", program)
    results = run.benchmark(["linear_cross_entropy"], 1)
    assert {row["implementation"] for row in results["rows"]} == {"chunked", "xla"}
    assert {row["speedup"] for row in results["rows"]} == {None}
    assert {(row["implementation"], row["reason"][:18]) for row in results["left_out"]} == {
        ("reference", "RESOURCE_EXHAUSTED")
    }


class Died(BaseException):
    """A simulated death of the process."""


@pytest.mark.parametrize("end", [Died, KeyboardInterrupt])
def test_another_process_goes_on_where_one_ended(tmp_path, monkeypatch, end):
    """Measured rows stay. The row in which the process died is skipped, but not one that was running when it was
    stopped.
    """
    file, measured, calls = tmp_path / "cpu" / "kernels.json", run.measure, []

    def measure(call, rounds):
        calls.append(call)
        if len(calls) == 4:
            raise end
        return measured(call, rounds)

    monkeypatch.setattr(run, "measure", measure)
    with pytest.raises(end):
        run.benchmark(["softmax", "linear_cross_entropy"], 1, file=file)
    assert not file.exists()
    part = file.with_name("kernels.json.part")
    earlier = json.loads(part.read_text())["rows"]
    assert [row["operation"] for row in earlier] == ["softmax"] * 2
    monkeypatch.setattr(run, "ceilings", lambda: pytest.fail("measured again"))
    heard = []
    results = run.benchmark(["softmax", "linear_cross_entropy"], 1, heard.append, file)
    assert results["rows"][:2] == earlier and {row["operation"] for row in heard} == {"linear_cross_entropy"}
    assert results == json.loads(file.read_text()) and not part.exists()
    lost = {(row["implementation"], row["direction"], row["reason"]) for row in results["left_out"]}
    ended = ("xla", "forward", "the process ended while it was measured")
    assert lost == ({ended} if end is Died else set())


def test_what_was_measured_otherwise_is_measured_again(tmp_path, monkeypatch):
    file = tmp_path / "cpu" / "kernels.json"

    def stop(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.benchmark(["softmax"], 2, stop, file)
    monkeypatch.setattr(run, "ceilings", lambda: Ceilings(2e10, 2e11, "float32"))
    for rounds, copied in ((2, 1e10), (1, 2e10)):
        with pytest.raises(KeyboardInterrupt):
            run.benchmark(["softmax"], rounds, stop, file)
        assert json.loads(file.with_name("kernels.json.part").read_text())["ceilings"]["copy_bytes_per_s"] == copied


def test_as_a_command(tmp_path, capsys):
    assert cli.main(["bench", "kernels", "rms_norm", "--rounds", "1", "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["direction"] for row in printed["rows"]] == ["forward", "training"]
    assert printed == json.loads((tmp_path / "cpu" / "kernels.json").read_text())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["rms"], "there is no operation 'rms'; there are rms_norm"),
        (["rms_nor"], "there is no operation 'rms_nor'; did you mean rms_norm?"),
        (["--rounds", "0"], "it must be at least 1"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert cli.main(["bench", "kernels", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_median_and_quartiles():
    assert KernelTime.of([3.0, 1.0, 2.0], "host") == (2.0, 1.0, 3.0, "host")
    assert KernelTime.of([5.0], "host") == (5.0, 5.0, 5.0, "host")


@pytest.mark.parametrize("out", ["file", "/proc/nothing"])
def test_a_folder_that_takes_no_results_is_refused_before_they_are_measured(tmp_path, capsys, monkeypatch, out):
    (tmp_path / "file").touch()
    monkeypatch.setattr(run, "ceilings", lambda: pytest.fail("measured"))
    with pytest.raises(SystemExit) as refused:
        bench.main(["rms_norm", "--out", str(tmp_path / out)])
    assert refused.value.code == 2
    assert cli.main(["bench", "kernels", "rms_norm", "--out", str(tmp_path / out)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "it must be a folder" in said[-1] and said[-1].startswith("jaxlm: --out ")


def test_bad_input_makes_no_folder(tmp_path):
    for wrong in (["norm"], ["rms_norm", "--rounds", "0"]):
        with pytest.raises(SystemExit):
            bench.main([*wrong, "--out", str(tmp_path / "results")])
    assert not (tmp_path / "results").exists()
