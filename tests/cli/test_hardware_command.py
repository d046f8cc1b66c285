"""`jaxlm hardware`: for a person, as JSON, and refused in one line."""

import contextlib
import io
import json
import subprocess
import sys

import pytest

from jaxlm.cli import main
from jaxlm.costs.hardware import calibration
from jaxlm.costs.hardware.catalog import HOST, catalog, find
from jaxlm.costs.hardware.sustained import sustained_rates


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def quick(monkeypatch):
    whole = calibration.measure
    monkeypatch.setattr(calibration, "measure", lambda say: whole(say, largest=64, copied_bytes=2**16, calls=5))


def rows(capsys, *arguments: str) -> list[dict]:
    assert main(["hardware", *arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said) == ["rows"]
    return said["rows"]


def test_json_holds_every_chip(capsys):
    found = {row["id"]: row for row in rows(capsys)}
    assert list(found) == list(catalog())
    h100 = found["h100-sxm5"]
    assert h100["peak_flops"]["bfloat16"] == 989.4e12 and h100["link"]["bytes_per_s"] == 450e9
    assert h100["intensity"] == pytest.approx(989.4 / 3.35) and found["cerebras-wse3"]["intensity"] is None


def test_json_of_one_chip(capsys):
    (row,) = rows(capsys, "tpu-v7x")
    assert (row["id"], row["devices_per_chip"], row["libtpu_name"]) == ("tpu-v7x", 2, "tpu7x")
    assert "watts" not in row and row["sources"]


def test_a_person_sees_a_table(capsys):
    assert main(["hardware"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["chip", "TFLOP/s", "GB", "TB/s"]
    assert "tpu-v5e 197 17.18 0.819 240.5 200 – 1.20".split() in [line.split() for line in lines]
    assert len(lines) == 2 + len(catalog())


def test_a_person_sees_sources_and_notes(capsys):
    assert main(["hardware", "h100-sxm5"]) == 0
    shown = capsys.readouterr().out
    for part in ("989.4 TFLOP/s", "3.35 TB/s", "52.43 MB", "10 µs", "1.99–5.00", "scaling-book", "sparse", "https:"):
        assert part in shown


def test_a_person_compares_chips_in_eighty_columns(capsys):
    assert main(["hardware", "h100", "mi300x", "tpu-v5p", "h100"]) == 0
    head, rule, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["figure", "h100-sxm5", "mi300x", "tpu-v5p"] and max(map(len, (head, rule, *lines))) <= 80
    values = {line.split()[0]: line.split()[1:] for line in lines}
    assert values["memory_bytes_per_s"] == "3.35 TB/s 5.3 TB/s 2.765 TB/s".split()
    assert values["peak_flops.float16"][-1] == values["on_chip.l3_bytes"][0] == "–"
    assert values["link.kind"] == "NVLink 4 Infinity Fabric ICI".split()


def test_json_of_several_chips_is_a_row_each(capsys):
    assert [row["id"] for row in rows(capsys, "l40s", "tpu-v5e")] == ["l40s", "tpu-v5e"]


def test_a_person_sees_what_programs_sustain(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["hardware", "h200-sxm"]) == 0
    shown = capsys.readouterr().out
    rates = sustained_rates()["h200-sxm"]
    for table in ("products, TFLOP/s by the smallest side", "attention, TFLOP/s", "passes over memory", "collectives"):
        assert f"\n{table}" in shown
    assert "Others are the share of its peak that h100-sxm5 sustains, with a wider spread" in shown
    addresses = [line.split() for line in shown.rpartition("address")[2].splitlines()[2:]]
    assert {address[1] for address in addresses} >= {rates.products[0].source.split()[0]}
    assert main(["hardware", "apple-m1"]) == 0
    assert "Others are the median share of all chips" in capsys.readouterr().out


def test_a_measured_machine_joins_the_catalog(capsys, quick):
    (measured,) = rows(capsys, "--measure")
    assert measured["id"] == "host" and measured["sustained"]["launches"][0]["step_s"] > 0
    assert rows(capsys, "host") == [measured] and rows(capsys)[-1] == measured
    assert main(["hardware", "host", "--measure"]) == 0
    said = capsys.readouterr()
    assert "TFLOP/s" in said.err and said.out.startswith("host: ") and "\nattention, TFLOP/s" in said.out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["h10o"], "there is no chip 'h10o'; did you mean h100-sxm5?"),
        (["host"], "this machine is not calibrated yet; run jaxlm hardware host --measure"),
        (["l40s", "--measure"], "--measure calibrates this machine, not l40s; write host in its place"),
        (["l40s", "a10"], "there is no chip 'a10'; did you mean a10g?"),
        (["host", "l40s", "--measure"], "--measure calibrates this machine, not l40s; write host in its place"),
    ],
)
def test_bad_input_is_one_line(arguments, line, capsys):
    assert main(["hardware", *arguments, "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("jaxlm: ") and said.err.count("\n") == 1
    assert line.partition(" (see")[0] in said.err


@pytest.fixture
def nowhere(monkeypatch):
    """Nothing can be kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")


def test_nothing_is_measured_that_cannot_be_kept(nowhere, capsys, monkeypatch):
    monkeypatch.setattr("jaxlm.costs.hardware.timed.alternate", None)
    assert main(["hardware", "host", "--measure"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "/proc/cache/jaxlm/hardware, which cannot be written to" in said.err.splitlines()[-1]


def test_a_run_keeps_to_itself_what_can_be_kept_nowhere(monkeypatch, quick, nowhere):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(calibration, "_uncached", None)  # restored after this test

    def start(command, env, **_):
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", env["XDG_CACHE_HOME"])
            printed = io.StringIO()
            assert command[:3] == [sys.executable, "-m", "jaxlm"]
            with contextlib.redirect_stdout(printed):
                status = main(command[3:])
            return subprocess.CompletedProcess(command, status, printed.getvalue())

    monkeypatch.setattr(calibration.subprocess, "run", start)
    lines = []
    calibration.ensure(lines.append)
    calibration.ensure(lines.append)
    assert len(lines) == 1 and "for this attempt alone" in lines[0]
    assert find(HOST).notes and find(HOST).sustained.launches


@pytest.mark.exhaustive
def test_a_run_measures_the_whole_machine_in_a_process_of_its_own(monkeypatch):
    """At the sizes and in the time that users have."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    lines = []
    calibration.ensure(lines.append)
    assert lines == ["measuring this machine, once: jaxlm hardware host shows the figures"]
    sustained = find(HOST).sustained
    assert all(rate > 1e6 for kind in (sustained.products, sustained.passes) for each in kind for _, rate in each.rates)
    assert {each.head_dim for each in sustained.attention} == {16, 32, 128}


def test_a_run_measures_once_and_anew_what_is_of_another_version(monkeypatch, quick):
    """In the process of the test: the one that a run starts does the same."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    started = []

    def start(command, **_):
        started.append(command)
        calibration.measure(lambda line: None)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(calibration.subprocess, "run", start)
    lines = []
    calibration.ensure(lines.append)
    calibration.ensure(lines.append)
    assert len(started) == len(lines) == 1 and "--measure" in started[0]
    kept = json.loads(calibration._file().read_text())
    del kept["format"]
    calibration._file().write_text(json.dumps(kept))
    calibration.ensure(lines.append)
    assert len(started) == len(lines) == 2 and json.loads(calibration._file().read_text())["format"]
