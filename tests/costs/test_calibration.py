"""This machine as a chip: measured, kept, and refused elsewhere."""

import json

import pytest

from jaxlm.costs import calibration
from jaxlm.costs.hardware import HOST, Target, find
from jaxlm.errors import InputError

TINY = {"largest": 64, "copied_bytes": 2**16, "calls": 5}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


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
    assert chip.elementwise_flops > 1e4
    sides, rates = zip(*chip.product_rates["float32"], strict=True)
    assert list(sides) == sorted(sides) and chip.peak("float32") == max(rates)
    assert chip.product_rate("float32", 1.0) == rates[0] and chip.product_rate("float32", 1e9) == rates[-1]
    target = Target.parse(HOST)
    assert (target.chip, target.chips, target.devices, str(target)) == (chip, 1, 1, "host:1")


def test_a_machine_that_is_not_calibrated_says_how():
    assert refusal() == "this machine is not calibrated yet; run jaxlm hardware host --measure"


@pytest.mark.parametrize(
    ("fact", "value"), [("cpu", "Abacus"), ("cores", 3), ("jax", "0.0.1"), ("accelerators", ["/dev/x"])]
)
def test_the_calibration_of_another_machine_is_refused(fact, value):
    calibration.measure(**TINY)
    kept = json.loads(calibration._file().read_text())
    kept["machine"][fact] = value
    calibration._file().write_text(json.dumps(kept))
    said = refusal()
    assert f"of another machine ({fact} " in said and said.endswith("run jaxlm hardware host --measure")


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not JSON", '{"machine": 1}'])
def test_a_broken_calibration_is_refused(text):
    calibration._file().parent.mkdir(parents=True)
    calibration._file().write_text(text)
    assert refusal().endswith("run jaxlm hardware host --measure")


def test_another_platform_is_another_machine(monkeypatch):
    calibration.measure(**TINY)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert "platforms 'cpu', here 'cuda'" in refusal()


def test_there_is_but_one_of_it():
    calibration.measure(**TINY)
    with pytest.raises(InputError, match="write host for one"):
        Target.parse("host:8")
