"""Search for a variant that fits, with a simulated compiler, and suggestions if none does."""

import shlex
import tomllib
from pathlib import Path

import pytest
from workload_fixtures import changed, workload

from jaxlm.config import load
from jaxlm.costs.counted.memory import memory
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import plan
from jaxlm.costs.search import variants
from jaxlm.lowering.fit import fit
from jaxlm.lowering.suggestions import suggest
from jaxlm.models.config import ModelConfig
from jaxlm.parallel.layout import Layout

MODELS = Path(__file__).parents[2] / "configs/models"
MODEL = ModelConfig(**tomllib.loads((MODELS / "llama3.1-8b.toml").read_text())["model"])
TARGET = Target.parse("h200-sxm:8")
WORK = workload("train", MODEL, batch=32, sequence=4096, layout=Layout(fsdp=8), kernels="xla").on(TARGET.chip)


@pytest.mark.parametrize("truth", [0.5, 0.8, 1.0, 1.3, 2.0])
def test_the_fastest_that_fits_is_found_however_far_the_count_is_off(truth):
    """The simulated compiler needs `truth` times the counted memory."""
    capacity = TARGET.chip.device_capacity()
    tried = []

    def needed(work):
        tried.append(work)
        return int(truth * memory(work).total)

    best, all_tried = fit(WORK, TARGET, needed, lambda line: None)
    fitting = [w for w in variants(WORK) if truth * memory(w).total <= capacity]
    assert best == min(fitting, key=lambda w: plan(w, TARGET).time.expected)
    assert [t.work for t in all_tried] == tried and len(set(tried)) == len(tried) <= 6


def test_none_fits():
    best, tried = fit(WORK, TARGET, lambda work: 10**13, lambda line: None)
    assert best is None and tried


def test_fixed_settings_do_not_vary():
    work = changed(WORK, microbatches=2, remat="full")
    best, tried = fit(work, TARGET, lambda work: 1, lambda line: None, fixed=("microbatches", "remat"))
    assert best == work and [t.work for t in tried] == [work]
    assert {w.remat for w in variants(work, ["remat"])} == {"full"} and len(list(variants(work, ["remat"]))) > 1
    assert not list(variants(changed(work, microbatches=3), ["microbatches"]))


def test_each_compilation_is_printed_as_overrides():
    lines = []
    fit(changed(WORK, batch=24), TARGET, lambda work: 10**13, lines.append)
    lists = [line for line in lines if "[" in line]
    assert lists
    for line in lists:
        *_, microbatches, remat = shlex.split(line)
        execution = load(MODELS / "llama3.1-8b.toml", [microbatches, remat, "training.batch=24"]).execution
        assert execution.remat == ("query", "key", "value", "up", "gate")


def test_a_single_change_comes_before_combinations():
    needed = plan(WORK, TARGET).memory.total
    work = changed(WORK, batch=64)
    lines = suggest(plan(work, TARGET), 3 * needed)
    assert lines and all(line.startswith(("training.", "execution.", "2 times", "8 times")) for line in lines)
    single = [line for line in lines if " and " not in line]
    assert single in ([], lines)


def test_suggestions_state_a_size_that_fits():
    planned = plan(WORK, TARGET)
    lines = suggest(planned, 2 * planned.capacity)
    assert lines
    for line in lines:
        assert float(line.rpartition("(")[2].removesuffix(" GiB)")) * 2**30 <= planned.capacity * 1.01


def test_nothing_is_suggested_that_does_not_fit():
    assert suggest(plan(WORK, TARGET), 10**16) == []
