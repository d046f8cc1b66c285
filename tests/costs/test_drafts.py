"""Drafts in plans of decoding: rows that are paid, and tokens that are expected."""

import itertools
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxlm import api
from jaxlm.core.bundled import configurations
from jaxlm.core.errors import InputError
from jaxlm.costs.counted import operations
from jaxlm.costs.counted.cache import kv_cache
from jaxlm.costs.counted.flops import Flops, flops
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import plan
from jaxlm.costs.serving import token_cost
from jaxlm.costs.stack import JAXLM
from jaxlm.costs.stack_memory import stack_memory
from jaxlm.costs.timing.step_time import step_time
from jaxlm.costs.workload import Workload

STORIES = Path(__file__).parents[1] / "families" / "stories260K"
SIZES = ["inference.sequences=4", "inference.length=64", "model.num_layers=1", "execution.dtype=bfloat16"]

MORE_ROWS = "inference.sequences=20"


def planned(*overrides):
    experiment = api.configure(configurations()["quickstart"], [*SIZES, *overrides])
    (plan, *_), _ = api.plan(experiment, "h100-sxm5:1", workload="decode")
    return plan


def test_a_draft_is_a_row_and_a_token_with_the_probability_of_those_before():
    plain, four = planned(), planned("inference.speculate=ngram:4", "inference.acceptance=0.5")
    rows, half = planned(MORE_ROWS), 1 + 0.5 + 0.25 + 0.125 + 0.0625
    assert four.flops == rows.flops and four.work.batch == 4
    by_xla = [planned("execution.kernels=xla", *each) for each in (["inference.speculate=ngram:4"], [MORE_ROWS])]
    assert by_xla[0].time == by_xla[1].time and four.time.expected < rows.time.expected  # a kernel reads a run's once
    assert four.memory.kv_cache == plain.memory.kv_cache and four.memory.logits == rows.memory.logits
    # An id of four drafts, and of each token of the sequence, in four slots and that for padding.
    assert four.memory.slots - plain.memory.slots == 5 * 4 * (4 + 64)
    assert four.tokens_per_s == pytest.approx(4 * half / four.time.expected)
    row = four.row()
    assert row["time_per_token_s"] == pytest.approx(four.time.expected / half)
    assert row["speculation"] == {"drafts": 4, "acceptance": 0.5, "tokens_per_sequence": half}
    assert row["engine"]["steps"] == [{"rows": 20, "draws": 20, "times": 1}] and "speculation" not in plain.row()
    assert planned("inference.speculate=ngram:4", "inference.acceptance=0").tokens_per_s < plain.tokens_per_s


@pytest.mark.parametrize("chip", ["h100-sxm5:1", "tpu-v6e:1", "a100-sxm4-80g:1"])
@pytest.mark.parametrize("sequences, length", [(1, 512), (8, 8192), (128, 1024)])
def test_drafts_that_are_never_right_make_no_step_shorter(chip, sequences, length):
    settings = [f"inference.sequences={sequences}", f"inference.length={length}", "inference.acceptance=0"]
    experiment = api.configure(configurations()["llama3.1-8b"], settings)
    work = Workload.of(experiment, kind="decode").on((target := Target.parse(chip)).chip)
    # A step of one sequence has two rows anyway: padding is counted as a reader of pages, and a draft is none.
    numbers = (0, 1, 2, 4, 8) if sequences > 1 else (1, 2, 4, 8)
    times = [step_time(replace(work, drafts=drafts), target) for drafts in numbers]
    for fewer, more in itertools.pairwise(times):
        assert fewer.lower_bound <= more.lower_bound
        assert fewer.expected <= 1.001 * more.expected  # longer kernels hide more of the launches
    assert times[0].lower_bound < times[-1].lower_bound
    assert all(replace(work, drafts=drafts).tokens_per_sequence == 1 for drafts in (0, 8))


def test_a_kernel_reads_the_pages_of_a_run_once_and_xla_for_each_row():
    """Without a kernel drafts at long contexts cost as many sequences."""
    settings = ["inference.sequences=8", "inference.length=8192"]
    work = Workload.of(api.configure(configurations()["llama3.1-8b"], settings), kind="decode")
    for chip, kernels in itertools.product(("h100-sxm5:1", "tpu-v6e:1", "mi300x:1"), ("auto", "xla")):
        target = Target.parse(chip)
        plain = work.with_execution(kernels=kernels).on(target.chip)
        read = kv_cache(plain) / target.chip.memory_bytes_per_s
        four = step_time(replace(plain, drafts=4), target)
        more = four.memory - step_time(plain, target).memory
        if kernels == "auto" and chip != "mi300x:1":
            assert 0 < more <= 0.25 * read  # logits of more rows, and queries
        else:
            assert 4 * read <= more <= 1.06 * 4 * read


def test_a_run_that_the_engine_cuts_is_counted_as_often_as_it_is_read():
    """A kernel takes up to 8 rows of a sequence: nine read its pages twice, and seventeen three times."""
    experiment = api.configure(configurations()["llama3.1-8b"], ["inference.sequences=8", "inference.length=8192"])
    target = Target.parse("h100-sxm5:1")
    plain = Workload.of(experiment, kind="decode").on(target.chip)
    read = kv_cache(plain) / target.chip.memory_bytes_per_s
    for drafts, times in ((7, 1), (8, 2), (16, 3)):
        more = step_time(replace(plain, drafts=drafts), target).memory - step_time(plain, target).memory
        assert (times - 1) * read <= more < times * read  # and logits of more rows, queries, and sums of the lanes


@pytest.mark.parametrize("speculate", ["ngram:2", f"{STORIES}:2"], ids=["ngram", "model"])
def test_a_loaded_model_has_the_cost_of_a_step_whatever_draws_its_drafts(speculate):
    """As `bench decode` and a server ask for it."""
    sizes = "inference.sequences=1", "inference.context=128", "inference.length=128"
    model = api.load(STORIES, [f"inference.speculate={speculate}", *sizes], dtype="float32")
    assert model.decode_work(64, 3).drafts == 0 and model.engine().settings.drafts == 2
    runner, work = model.engine().runner, Workload.of(model.experiment, kind="decode").on_cpu()
    pages = runner._pages, runner._drafter._pages if runner._drafter else {}
    kept = sum(array.nbytes for array in jax.tree.leaves(pages)) // model.mesh.size  # all devices have as many
    assert kept == kv_cache(work.with_execution(dtype="float32"))
    measured = api.bench_decode(model, 1, 16, steps=2, blocks=2)
    assert 1 <= measured.tokens_per_step <= measured.rows_per_step <= 3
    reads = token_cost(model.decode_work(16 + 3, round(measured.rows_per_step)), None).read_bytes // model.mesh.size
    if speculate.startswith("ngram"):
        assert measured.read_bytes == reads and model.drafting_work(19, 1).draft_model is None
    else:  # which reads its own weights, and those of all steps that draw drafts
        assert 3 * reads < measured.read_bytes < 4.5 * reads


LLAMA = ["inference.sequences=8", "inference.length=2048", "inference.acceptance=0.8"]


def of_llama(name="llama3.1-8b", *overrides):
    return Workload.of(api.configure(configurations()[name], [*LLAMA, *overrides]), kind="decode")


@pytest.mark.parametrize("chip", ["h100-sxm5:1", "tpu-v6e:1"])
def test_a_draft_model_reads_all_rows_and_then_one_of_each_sequence_for_each_draft(chip):
    """Its steps are those of the model by itself, except that it draws nothing after the rows that it reads."""
    target = Target.parse(chip)
    both, looked_up, small = (
        each.on(target.chip)
        for each in (
            of_llama("llama3.1-8b", "inference.speculate=llama3.2-1b:4"),
            of_llama("llama3.1-8b", "inference.speculate=ngram:4"),
            of_llama("llama3.2-1b"),
        )
    )
    rows = replace(small, batch=40, run=5)
    (draw,) = (op for op in operations.step(rows) if op.kind == "draw")
    alone = [step_time(each, target) for each in (looked_up, rows, small)]
    time, unread = step_time(both, target), draw.least_bytes / target.chip.memory_bytes_per_s
    assert time.memory == pytest.approx(alone[0].memory + alone[1].memory - unread + 4 * alone[2].memory)
    assert time.lower_bound == pytest.approx(sum(each.lower_bound for each in (*alone, *3 * alone[2:])) - unread)
    drafted = time.parts["draft model"]
    of_small = [sum(part.seconds for name, part in each.parts.items() if name != "host") for each in alone[1:]]
    undrawn = of_small[0] - alone[1].parts["draws"].seconds
    assert drafted.seconds == pytest.approx(
        undrawn + 4 * of_small[1], rel=0.01
    )  # launches of the draw are left out too
    assert flops(both) == Flops(*(x + y + 4 * z for x, y, z in zip(*map(flops, (looked_up, rows, small)), strict=True)))
    memory, model, draft = (stack_memory(each, JAXLM) for each in (both, looked_up, small))
    assert memory.parameters == model.parameters + draft.parameters and memory.kv_cache == kv_cache(both)
    assert kv_cache(both) == model.kv_cache + draft.kv_cache
    assert memory.slots == model.slots - 4 * 9 * 2048  # no tokens are kept to look drafts up in
    row = plan(both, target).row()
    assert row["speculation"]["model"] == {"parameters": 1_235_814_400, "quantize": "none"}
    assert row["kv_bytes_per_token"] == 131_072 + 32_768


def test_drafts_of_a_model_that_are_never_right_cost_more_than_those_of_the_text():
    target = Target.parse("h100-sxm5:1")
    for sequences in (1, 8, 64):
        more = f"inference.sequences={sequences}", "inference.acceptance=0"
        times = [
            step_time(of_llama("llama3.1-8b", f"inference.speculate={source}", *more).on(target.chip), target)
            for source in ("none", "ngram:2", "llama3.2-1b:2")
        ]
        plain, looked_up, drawn = times
        for end in ("lower_bound", "expected"):
            of_plain, of_looked_up, of_drawn = (getattr(each, end) for each in (plain, looked_up, drawn))
            # Padding beside a single sequence is counted as a reader of pages, and a draft is none.
            assert of_plain <= of_looked_up or sequences == 1
            assert max(of_plain, of_looked_up) < of_drawn


def test_a_search_leaves_a_draft_model_out_where_it_takes_no_drafts():
    served = {"prompt": 200, "output": 200, "searched": ("drafts",)}
    experiment = api.configure(configurations()["llama3.1-70b"], ["inference.speculate=llama3.2-1b:8"])
    many = api.plan_serving(experiment, "h100-sxm5:4", **served).best
    assert many.work.drafts == 0 and many.work.draft_model is None
    likely = experiment.model_copy(update={"inference": experiment.inference.model_copy(update={"acceptance": 0.95})})
    few = api.plan_serving(likely, "h100-sxm5:4", tpot=0.008, **served).best
    assert few.row()["speculation"]["model"]["parameters"] == 1_235_814_400


@pytest.mark.parametrize(
    "model, more, said",
    [
        (
            "llama3.1-8b",
            ["inference.speculate=gpt2-124m"],
            "not the tokens of a model of 128256: take one of the same",
        ),
        (
            "llama3.1-8b",
            ["inference.speculate=nonsense:2"],
            "nonsense is neither a file nor one of jaxlm's configurations",
        ),
        (
            "gpt2-1.5b",
            ["inference.speculate=gpt2-124m", "model.context_length=2048", "inference.length=2048"],
            "the draft model has a context of 1,024 tokens, and sequences have 2,048",
        ),
    ],
)
def test_a_draft_model_that_does_not_suit_is_refused(model, more, said):
    with pytest.raises(InputError, match=said):
        api.plan(api.configure(configurations()[model], more), "h100-sxm5:1", workload="decode")


def test_the_compiled_step_has_the_rows_and_flops_that_are_counted():
    experiment = api.configure(configurations()["quickstart"], [*SIZES, "inference.speculate=ngram:2"])
    report = api.compile(experiment, "h100-sxm5:1", workload="decode").report
    assert report.flops == report.counted_flops and report.counted_flops > 0
    assert report.work.draws() == 12 and report.plan.work.batch == 4
