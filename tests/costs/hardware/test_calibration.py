"""Calibration of this machine: measured, cached, and refused on another machine."""

import json

import pytest

from jaxlm import config as configuration
from jaxlm.core.errors import InputError
from jaxlm.costs.counted import operations
from jaxlm.costs.hardware import calibration
from jaxlm.costs.hardware.catalog import HOST, find
from jaxlm.costs.hardware.rates import sustained
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.hardware.timed import Microbenchmark, alternate, curve
from jaxlm.costs.plan import step_time
from jaxlm.costs.stack import JAXLM
from jaxlm.costs.timing.computation import _Clock
from jaxlm.costs.workload import Workload

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
    assert chip.memory_bytes > 2**28 and chip.memory_bytes_per_s > 1e6
    assert chip.peak("float32") > 1e5 and chip.peak("bf16") > 1e5 and chip.intensity("float32") > 0
    assert chip.source("peak_flops.bfloat16") == "measured on this machine" and len(lines) == 5
    rates = sustained(chip)
    assert 0 <= rates.kernel_s < rates.step_s < 0.1 and rates.has_xla_attention
    for batch in (1, 8):
        assert 1e5 < rates.product("float32", 64, batch)[0] <= 10 * chip.peak("float32")
    for kind in ("pass", "optimizer", "weights"):
        assert rates.moving(kind, 1e5)[0] > 1e4
    assert rates.attention("xla", "training", True, 32, 64, "float32")[0] > 1e4
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


def test_a_rate_is_of_calls_that_are_not_disturbed_and_its_spread_of_all():
    program = Microbenchmark(lambda: None, 12.0, 5.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0])
    assert program.best == 12.0 and program.undisturbed == 1.0 and program.spread == (6.0 - 2.0) / 2 / 4.0
    program.seconds = [100.0] * 8 + [2.0, 1.0]
    assert program.undisturbed == 2.0


def test_a_curve_has_programs_together_without_their_dispatch():
    def program(work, size, seconds):
        return Microbenchmark(lambda: None, work, size, [seconds])

    small, large = [program(4.0, 1.0, 3.0), program(8.0, 3.0, 5.0)], [program(80.0, 10.0, 9.0)]
    assert curve([large, small], 1.0) == ((2.0, 12.0 / 6.0), (10.0, 10.0))


def test_attention_by_xla_takes_the_time_that_was_measured_with_its_softmax(calibrated):
    """Its passes over scores are in the rate of its products."""
    chip = find(HOST)
    work = Workload.of(configuration.load("configs/quickstart.toml", [])).on(chip)
    parts = step_time(work, Target(chip, (1, 1))).parts
    products = [op for op in operations.step(work) if op.visible is not None]
    rate, _ = sustained(chip).attention("xla", "training", True, 24, 128, "float32")
    assert parts["attention"].seconds == pytest.approx(sum(op.times * op.flops for op in products) / rate)
    clock = _Clock(work, chip, sustained(chip), JAXLM)
    scores = [op for op in operations.step(work) if op.kind == "scores"]
    assert scores and all(clock.once(op, op.least_flops)[0] == 0.0 for op in scores)


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
