"""Drafts in plans of decoding: rows that are paid, and tokens that are expected."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from jaxlm import api
from jaxlm.core.bundled import configurations
from jaxlm.core.errors import InputError
from jaxlm.costs.counted.cache import kv_cache
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.timing.step_time import step_time
from jaxlm.costs.workload import Workload

STORIES = Path(__file__).parents[1] / "families" / "stories260K"
SIZES = ["inference.sequences=4", "inference.length=64", "model.num_layers=1", "execution.dtype=bfloat16"]


def planned(*overrides):
    experiment = api.configure(configurations()["quickstart"], [*SIZES, *overrides])
    (plan, *_), _ = api.plan(experiment, "h100-sxm5:1", workload="decode")
    return plan


def test_a_draft_is_a_row_and_a_token_with_the_probability_of_those_before():
    plain, four = planned(), planned("inference.speculate=ngram:4", "inference.acceptance=0.5")
    rows, half = planned("inference.sequences=20"), 1 + 0.5 + 0.25 + 0.125 + 0.0625
    assert four.flops == rows.flops and four.time == rows.time and four.work.batch == 4
    assert four.memory.kv_cache == plain.memory.kv_cache and four.memory.logits == rows.memory.logits
    # An id of four drafts, and of each token of the sequence, in four slots and that for padding.
    assert four.memory.slots - plain.memory.slots == 5 * 4 * (4 + 64)
    assert four.tokens_per_s == pytest.approx(4 * half / four.time.expected)
    row = four.row()
    assert row["time_per_token_s"] == pytest.approx(four.time.expected / half)
    assert row["speculation"] == {"drafts": 4, "acceptance": 0.5, "tokens_per_sequence": half}
    assert row["engine"]["steps"] == [{"rows": 20, "draws": 20, "times": 1}] and "speculation" not in plain.row()
    assert planned("inference.speculate=ngram:4", "inference.acceptance=0").tokens_per_s < plain.tokens_per_s


def test_drafts_that_are_not_counted_are_refused():
    with pytest.raises(InputError, match="does not count the steps of a draft model; give inference.speculate=ngram:3"):
        planned("inference.speculate=runs/small:3")


@pytest.mark.parametrize("chip", ["h100-sxm5:1", "tpu-v6e:1", "a100-sxm4-80g:1"])
@pytest.mark.parametrize("sequences, length", [(1, 512), (8, 8192), (128, 1024)])
def test_drafts_that_are_never_right_make_no_step_shorter(chip, sequences, length):
    settings = [f"inference.sequences={sequences}", f"inference.length={length}", "inference.acceptance=0"]
    experiment = api.configure(configurations()["llama3.1-8b"], settings)
    work = Workload.of(experiment, kind="decode").on((target := Target.parse(chip)).chip)
    times = [step_time(replace(work, drafts=drafts), target) for drafts in (0, 1, 2, 4, 8)]
    for fewer, more in itertools.pairwise(times):  # a step of one sequence has two rows anyway
        assert fewer.lower_bound <= more.lower_bound and fewer.expected <= more.expected
    assert times[0].lower_bound < times[-1].lower_bound
    assert all(replace(work, drafts=drafts).tokens_per_sequence == 1 for drafts in (0, 8))


def test_each_row_of_a_run_reads_the_pages_of_its_sequence():
    """Whatever computes attention: drafts at long contexts cost as many sequences."""
    settings = ["inference.sequences=8", "inference.length=8192"]
    work = Workload.of(api.configure(configurations()["llama3.1-8b"], settings), kind="decode")
    for chip, kernels in itertools.product(("h100-sxm5:1", "tpu-v6e:1", "mi300x:1"), ("auto", "xla")):
        target = Target.parse(chip)
        plain = work.with_execution(kernels=kernels).on(target.chip)
        read = kv_cache(plain) / target.chip.memory_bytes_per_s
        four = step_time(replace(plain, drafts=4), target)
        more = four.memory - step_time(plain, target).memory
        assert 4 * read <= more <= 1.06 * 4 * read  # and logits of more rows


@pytest.mark.parametrize("speculate", ["ngram:2", f"{STORIES}:2"], ids=["ngram", "model"])
def test_a_loaded_model_has_the_cost_of_a_step_whatever_draws_its_drafts(speculate):
    """As `bench decode` and a server ask for it."""
    model = api.load(STORIES, [f"inference.speculate={speculate}", "inference.sequences=1"], dtype="float32")
    assert model.decode_work(64, 3).drafts == 0 and model.engine().settings.drafts == 2
    measured = api.bench_decode(model, 1, 16, steps=2, blocks=2)
    assert 1 <= measured.tokens_per_step <= measured.rows_per_step <= 3


def test_the_compiled_step_has_the_rows_and_flops_that_are_counted():
    experiment = api.configure(configurations()["quickstart"], [*SIZES, "inference.speculate=ngram:2"])
    report = api.compile(experiment, "h100-sxm5:1", workload="decode").report
    assert report.flops == report.counted_flops and report.counted_flops > 0
    assert report.work.draws() == 12 and report.plan.work.batch == 4
