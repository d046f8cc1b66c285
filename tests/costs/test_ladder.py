"""The rungs of a run hold together: what was counted before it, what was measured, and the gap between."""

import dataclasses

import meshes
import model_fixtures
import pytest
from workload_fixtures import changed, workload

from jaxlm.cli.ladder import show
from jaxlm.costs.counted import operations
from jaxlm.costs.counted.flops import flops
from jaxlm.costs.counted.memory import memory
from jaxlm.costs.hardware import calibration
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.ladder import Counted, counted, gap, ladder, say_counted, say_replicated
from jaxlm.costs.plan import plan

WORK = workload("train", model_fixtures.model(), 8, 32, "float32", remat="full", kernels="xla")


def metrics(*step_s):
    return [{"step_s": s, "data_wait_s": 1e-4, "peak_memory_bytes": 2**30} for s in step_s]


@pytest.fixture(scope="module")
def on_this_machine(tmp_path_factory):
    """A workload counted on this machine, which is measured quickly and for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        calibration.measure(largest=64, copied_bytes=2**16, calls=3)
        yield counted(WORK, meshes.make())


def test_what_is_counted_is_that_of_the_workload(on_this_machine):
    assert on_this_machine.flops == flops(WORK) and on_this_machine.memory == memory(WORK)
    peak = on_this_machine.target.chip.peak("float32")
    assert on_this_machine.mfu(2.0) == pytest.approx(flops(WORK).model / (2.0 * peak))
    assert on_this_machine.napkin.step_s == pytest.approx(flops(WORK).napkin / peak)


def test_more_memory_than_there_is_is_said_before_the_first_step(on_this_machine):
    """Emulated devices share the memory."""
    chip = on_this_machine.target.chip
    assert on_this_machine.capacity == chip.memory_bytes
    assert counted(WORK, meshes.make(2, 2, 2)).capacity == chip.memory_bytes // 8
    assert "may run out" not in say_counted(on_this_machine)
    small = chip.model_copy(update={"device_memory_bytes": on_this_machine.memory.total - 1})
    too_small = dataclasses.replace(on_this_machine, target=Target(small, (1, 1)))
    assert "may run out of it: lower training.batch" in say_counted(too_small)


def test_the_gap_is_whole(on_this_machine):
    rungs = ladder(on_this_machine, metrics(9.0, 0.3, 0.1, 0.2))
    assert rungs["measured"]["step_s"] == 0.2  # the median, without the first
    assert rungs["napkin"]["step_s"] + sum(rungs["gap"].values()) == pytest.approx(0.2)
    assert rungs["gap"]["recomputation"] > 0 and rungs["gap"]["data_wait"] == 1e-4
    assert rungs["measured"]["mfu"] == on_this_machine.mfu(0.2)


def test_the_gap_at_the_expected_time_is_what_that_time_counts(on_this_machine):
    time = on_this_machine.time
    causes = gap(on_this_machine, metrics(1.0), time.expected + 1e-4)  # of which 1e-4 is waited for data
    assert causes["not_counted"] == pytest.approx(0, abs=1e-9)
    reasons = {reason.name.replace(" ", "_"): reason.seconds for reason in time.reasons}
    assert reasons.items() <= causes.items() and "products_below_peak" in reasons
    assert time.ideal + sum(reasons.values()) == pytest.approx(time.expected)


@pytest.mark.parametrize("kernels", ["xla", "auto"])
@pytest.mark.parametrize("pattern", [(), ({"name": "local", "attention": {"window": 64}}, {"name": "global"})])
def test_attention_is_what_the_lower_bound_counts(pattern, kernels):
    """Kernels skip scores; plain JAX computes those outside a window too."""
    attention = {"num_heads": 4, "head_dim": 64}
    model = model_fixtures.model(
        attention=attention, pattern=pattern, context_length=8192, d_model=1024, vocab_size=8192
    )
    work, target = workload("train", model, 64, 8192, remat="full", kernels=kernels), Target.parse("h200-sxm")
    counts = plan(work, target)
    before = Counted(work, counts.flops, counts.memory, target, counts.time, counts.layers)
    causes = gap(before, metrics(1.0), counts.time.lower_bound * 1.01 + 1e-4)
    again = sum(op.times * op.least_flops for op in operations.step(work) if op.phase == "rematerialised")
    products = counts.napkin.step_s + causes["attention"] + again / target.chip.peak("bfloat16")
    assert products == pytest.approx(counts.time.compute, rel=1e-6)


def test_whether_the_measured_step_lies_in_the_bracket_is_said(on_this_machine):
    time = on_this_machine.time
    assert ladder(on_this_machine, metrics(time.expected))["inside"] is True
    assert ladder(on_this_machine, metrics(2 * time.upper_bound))["inside"] is False


def test_emulated_devices_have_a_peak_and_no_links(on_this_machine, capsys):

    many = counted(changed(WORK, layout=meshes.layout(2, 2, 2)), meshes.make(2, 2, 2))
    assert many.time is None and gap(many, metrics(0.1), 0.1) == {}
    assert many.mfu(1.0) == pytest.approx(on_this_machine.mfu(1.0))
    assert many.napkin.memory_bytes == on_this_machine.napkin.memory_bytes // 4  # data replicates them
    rungs = ladder(many, metrics(0.1))
    show(rungs)
    assert rungs["inside"] is None and "within" not in capsys.readouterr().err


def test_a_machine_that_is_not_known_still_has_flops_and_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unknown = counted(WORK, meshes.make())
    rungs = ladder(unknown, metrics(0.1))
    assert unknown.target is None and unknown.mfu(1.0) is None and rungs["counted"]["flops"] > 0
    assert rungs["napkin"]["step_s"] is None and rungs["gap"] == {}


def test_other_programs_are_named_where_they_explain_a_slow_step(on_this_machine, capsys):
    upper = on_this_machine.time.upper_bound
    for load, said in ((0.4, "; meanwhile other programs used 40% of this machine"), (0.02, ""), (None, "")):
        show(ladder(on_this_machine, metrics(2 * upper), load))
        printed = " ".join(capsys.readouterr().err.split())
        assert printed.endswith(f"a step took 2.00 times the upper end of the counted bracket{said}")
    show(ladder(on_this_machine, metrics(on_this_machine.time.expected)))
    assert "times the" not in capsys.readouterr().err


def test_key_value_heads_on_several_meshes_are_said_in_one_line():
    works = [changed(WORK, layout=meshes.layout(tensor=tensor)) for tensor in (1, 16, 16, 32)]
    (heads,) = {block.attention.num_kv_heads for block in WORK.model.layers}
    assert say_replicated(*works[:1]) is None
    assert say_replicated(*works).startswith(f"mesh.tensor = 16 or 32 do not divide {heads} key/value heads: several")
