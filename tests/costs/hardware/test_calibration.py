"""Calibration of this machine: measured, cached, and refused on another machine."""

import json

import pytest

from jaxlm.core.errors import InputError
from jaxlm.costs.hardware import calibration
from jaxlm.costs.hardware.catalog import HOST, find
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.hardware.timed import Microbenchmark, alternate

TINY = {"largest": 64, "copied_bytes": 2**16, "calls": 5}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> str:
    """The cached file of this machine, measured once for these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("measured")))
        calibration.measure(**TINY)
        return calibration._file().read_text()


@pytest.fixture
def calibrated(measured, empty_cache) -> dict:
    """Put a calibration into the cache; return its content."""
    calibration._file().parent.mkdir(parents=True)
    calibration._file().write_text(measured)
    return json.loads(measured)


def refusal() -> str:
    with pytest.raises(InputError) as refused:
        find(HOST)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_is_measured_is_kept():
    lines = []
    chip = calibration.measure(lines.append, **TINY)
    assert find(HOST) == chip and chip.id == HOST and chip.kind == "cpu"
    assert chip.dispatch_s < 0.1 and chip.memory_bytes > 2**28 and chip.memory_bytes_per_s > 1e6
    assert chip.peak("float32") > 1e5 and chip.peak("bf16") > 1e5 and chip.intensity("float32") > 0
    assert chip.source("peak_flops.bfloat16") == "measured on this machine" and len(lines) == 6
    assert chip.elementwise_flops > 1e4 and chip.pass_bytes_per_s > 1e4
    for batch, table in ((1, chip.product_rates), (8, chip.batched_rates)):
        sides, rates = zip(*table["float32"], strict=True)
        assert list(sides) == sorted(sides) and chip.peak("float32") >= max(rates)
        assert chip.product_rate("float32", 1.0, batch) == rates[0]
        assert chip.product_rate("float32", 1e9, batch) == rates[-1]
    target = Target.parse(HOST)
    assert (target.chip, target.chips, target.devices, str(target)) == (chip, 1, 1, "host:1")


def test_a_machine_that_is_not_calibrated_says_how():
    assert refusal() == "this machine is not calibrated yet; run jaxlm hardware host --measure"


@pytest.mark.parametrize(
    ("fact", "value"), [("cpu", "Abacus"), ("cores", 3), ("jax", "0.0.1"), ("accelerators", ["/dev/x"])]
)
def test_the_calibration_of_another_machine_is_refused(fact, value, calibrated):
    calibrated["machine"][fact] = value
    calibration._file().write_text(json.dumps(calibrated))
    said = refusal()
    assert f"of another machine ({fact} " in said and said.endswith("run jaxlm hardware host --measure")


def test_one_call_is_best_and_three_in_four_are_usual():
    program = Microbenchmark(lambda: None, 12.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0])
    assert program.best == 12.0 and program.sustained == 2.0


def test_programs_alternate():
    order = []
    programs = [Microbenchmark(lambda name=name: order.append(name), 1.0) for name in "ab"]
    alternate(programs, rounds=3, max_seconds=60.0)
    assert "".join(order) == "ab" + 3 * "ab" and [len(p.seconds) for p in programs] == [3, 3]
    alternate(programs, rounds=300, max_seconds=0.0)
    assert [len(p.seconds) for p in programs] == [5, 5]  # two more, whatever time is left


def test_a_calibration_of_another_format_is_refused(calibrated):
    for format in (None, calibrated["format"] - 1):
        older = {k: v for k, v in calibrated.items() if k != "format"} | ({"format": format} if format else {})
        calibration._file().write_text(json.dumps(older))
        assert refusal().endswith("is broken or of another version; run jaxlm hardware host --measure")


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not JSON", '{"machine": 1}'])
def test_a_broken_calibration_is_refused(text):
    calibration._file().parent.mkdir(parents=True)
    calibration._file().write_text(text)
    assert refusal().endswith("run jaxlm hardware host --measure")


def test_another_platform_is_another_machine(monkeypatch, calibrated):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert "platforms 'cpu', here 'cuda'" in refusal()


def test_there_is_but_one_of_it(calibrated):
    with pytest.raises(InputError, match="write host for one"):
        Target.parse("host:8")
