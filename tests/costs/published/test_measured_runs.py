"""Measured runs: what rules make of them, and the command over another file of them."""

import json
import math
import re
from pathlib import Path

import pytest

from jaxlm.cli import main
from jaxlm.core.errors import InputError
from jaxlm.costs import local_shapes
from jaxlm.costs.counted.traffic import collectives
from jaxlm.costs.published.accuracy import Accuracy, by, is_judged, large_misses
from jaxlm.costs.published.cases import (
    CountedCase,
    PublishedCase,
    check_runs,
    median_errors,
    misses,
)
from jaxlm.costs.published.figures import Range, megatron_flops
from jaxlm.costs.published.runs import MeasuredRun, NotExpressed, express, read_runs, rule_of, rules
from jaxlm.parallel.layout import Layout

pytestmark = pytest.mark.xdist_group("published")  # with test_cases.py: counted once

RUNS = read_runs()


def expressed(id: str):
    (run,) = (run for run in RUNS if run.id == id)
    return express(run, rule_of(run))


def a_run(**changes):
    dims = {"L": 2, "d": 256, "H": 2, "Hkv": 2, "Dh": 128, "F": 512, "V": 1024, "gated": True}
    values = {
        "id": "a",
        "kind": "train",
        "group": "a group without rules",
        "model": "small",
        "dims": dims,
        "chip": "h100-sxm5",
        "chips": 8,
        "parallel": {"fsdp": 8},
        "seq": 128,
        "global_batch": 32,
        "micro_batch": 2,
        "precision": "bf16",
        "remat": "none",
        "framework": "jax",
        "measured": {"step_s": 0.25},
        "source": "a",
    }
    return MeasuredRun.model_validate(values | changes)


def express_one(**changes):
    run = a_run(**changes)
    return express(run, rule_of(run))


def test_every_run_is_named_once_and_has_a_source_and_a_licence():
    assert len({run.id for run in RUNS}) == len(RUNS) >= 350
    assert all(re.match("github:|https://|arXiv:", run.source) and run.licence for run in RUNS)


def test_every_rule_is_of_a_run_and_has_a_source():
    for rule in rules():
        assert any(rule.applies(run) for run in RUNS), rule
        assert rule.source or not rule.group, rule


def test_more_than_two_hundred_runs_are_expressed_and_the_others_say_why_not():
    reasons = []
    for run in RUNS:
        try:
            express(run, rule_of(run))
        except NotExpressed as reason:
            reasons.append(str(reason))
    assert len(RUNS) - len(reasons) > 200 and all(reasons)


def test_sharded_replicas_are_data_times_fsdp():
    hsdp = expressed("fms-fsdp/a_llama2-7b_a100-sxm4-80g_128_HSDP_none_bs2")
    assert hsdp.work.layout == Layout(data=16, fsdp=8)
    assert hsdp.target.chip.scale_out_bytes_per_s == 6.25e9


def test_context_parallelism_that_shards_parameters_is_an_axis_of_the_mesh():
    assert express_one(parallel={"fsdp": 2, "cp": 2}).work.layout == Layout(data=2, fsdp=2, context=2)


def test_context_parallelism_that_copies_parameters_sums_their_gradients_once_a_step():
    sharded, copied = (
        express_one(parallel={"cp": 4, "dp": 2, **zero}, global_batch=16).work for zero in ({}, {"zero": 1})
    )
    assert sharded.layout == copied.layout == Layout(data=2, context=4) and copied.microbatches == 4
    numbers = sum(local_shapes.stored(copied, d.axes, d.shape) for d in copied.parameters.values())
    assert numbers == copied.trainable_numbers > sharded.trainable_numbers / 3
    (gradients,) = (each for each in collectives(copied) if each.axes == ("data", "context"))
    assert (gradients.kind, gradients.times, gradients.bytes) == ("all-reduce", 1, 4 * numbers)
    of = {each.of for each in collectives(copied) if each.axes == ("context",)}
    assert of and not of & {"layers", "vectors", "adapters", "gradients"}


def test_devices_are_those_of_a_chip():
    v7x = expressed("tpu-recipes/llama3.1-405b_chips256_gbs1536_seq8192_fp8_full")
    assert v7x.work.layout["fsdp"] == v7x.target.devices == 512 and v7x.work.remat == "full"
    cores = expressed("neuron-trn1/llama3-8b_32_nodes_bf16_autocast,_fp32_optimizer_seq8192")
    assert cores.target.devices == 1024 and cores.work.layout["tensor"] == 32


def test_slices_are_joined_over_the_network():
    run = expressed("maxtext-v5e/128b_4x_v5e-256")
    assert (run.target.slices, run.target.chips, run.work.batch) == (4, 1024, 1024)
    assert run.work.layout == Layout(data=4, fsdp=16, tensor=16)
    assert run.work.remat == ("query", "key", "value")


def test_a_domain_holds_as_many_chips_as_divide_the_job():
    (id,) = (run.id for run in RUNS if "26.06_LLAMA3.1_405B_DGX-GB200" in run.id)
    run = expressed(id)
    assert run.target.topology == (4, 64) and run.work.layout.size * 16 == 256
    assert (run.stack.pipeline.stages, run.stack.pipeline.chunks) == (16, 4)
    assert run.stack.state_bytes == 6 + 12 / 4  # optimizer state over 4 replicas
    assert run.stack.precision == "float8" and run.work.microbatches == 384


def test_microbatches_follow_from_their_size():
    assert express_one().work.microbatches == 2
    assert express_one(grad_accum=4).work.microbatches == 4
    assert express_one(micro_batch=None).work.microbatches == 1


def test_an_era_of_a_framework_is_a_rule():
    by = {run.id: rule_of(run).stack for run in RUNS if run.group == "llm-foundry"}
    pure = next(stack for id, stack in by.items() if "A100_40GB" in id)
    default = next(stack for id, stack in by.items() if "A100_80GB" in id and "13b" in id)
    assert pure["attention"] == default["attention"] == "flash-1-triton"
    assert pure["like"] == "jaxlm" and default["like"] == "torch-fsdp"
    large = {id: stack["attention"] for id, stack in by.items() if "Large" in id}
    assert {large[id] for id in large if "|_7b" in id} == {"flash-2"}
    assert {large[id] for id in large if "|_30b" in id} == {"flash-1-triton"}


def test_a_power_cap_and_a_slower_memory_are_those_of_the_part():
    run = expressed("torchtitan/8b_bf16_async")
    assert run.target.chip.id == "h100-sxm5" and run.target.chip.memory_bytes_per_s == 2.4e12
    assert run.stack.watts == 500 and run.work.remat == ("query", "value", "attention", "gate")


def test_half_of_the_layers_recompute_between_none_and_all():
    half = a_run(group="torchtitan", remat="selective (every second layer)")
    none, full = (a_run(group="torchtitan", remat=remat) for remat in ("none", "full"))
    counted = [row.counted for row in check_runs([none, half, full])]
    for less, between, more in zip(*counted, strict=True):
        assert between == pytest.approx((less + more) / 2) and less <= more


def test_windows_are_a_pattern_of_layers():
    dims = a_run().dims | {"L": 12, "window": "64 on 5 of 6 layers"}
    local, everywhere = express_one(dims=dims).work.model.pattern
    assert (local.layers, local.patch["attention"]["window"], everywhere.layers) == (5, 64, 1)
    dims["window"] = "32 on alternate layers"
    assert [entry.layers for entry in express_one(dims=dims).work.model.pattern] == [1, 1]


MIXTURE = {"experts": 8, "top_k": 2, "moe_ff": 64, "shared_experts": 2, "dense_layers": 1, "dense_ff": 512}
LATENT = {"attention": "MLA (q_lora 96, kv_lora 64, nope 32, rope 16, v 32)"}


def test_experts_and_latents_are_those_of_the_dims():
    """Runs say no key/value heads of latent attention, and no feed-forward width of a mixture alone."""
    dims = {name: size for name, size in a_run().dims.items() if name not in ("Hkv", "Dh", "F")}
    model = express_one(dims=dims | MIXTURE | LATENT).work.model
    dense, mixture = (model.pattern[i].patch.get("feed_forward", {}) for i in (0, 1))
    assert (dense["d_ff"], model.pattern[0].layers, model.pattern[1].layers, mixture) == (512, 1, "rest", {})
    experts, latent = model.feed_forward, model.attention
    assert (experts.num_experts, experts.experts_per_token, experts.d_ff, experts.shared.d_ff) == (8, 2, 64, 128)
    assert (latent.query_rank, latent.latent_rank, latent.nope_dim, latent.rope_dim, latent.value_dim) == (
        *(96, 64, 32, 16, 32),
    )


def test_expert_parallelism_leaves_all_but_the_experts_whole():
    """Megatron's shards experts over replicas, whose other parameters are copies."""
    parallel = {"dp": 8, "ep": 4, "zero": 1}
    work = express_one(dims=a_run().dims | MIXTURE, parallel=parallel).work
    assert work.layout == Layout(data=2, expert=4) and work.microbatches == 2
    of_experts = {path for path, each in work.parameters.items() if "experts" in each.axes}
    assert of_experts and all(
        local_shapes.stored(work, each.axes, each.shape) * (4 if path in of_experts else 1) == math.prod(each.shape)
        for path, each in work.parameters.items()
    )
    (row,) = check_runs([a_run(dims=a_run().dims | MIXTURE, parallel=parallel, precision="fp8")])
    assert row.case.reported == "a mixture of experts, products in 8 bits" and row.predicted > 0


SERVED = {
    "kind": "serve",
    "global_batch": None,
    "measured": {"output_tokens_per_s": 500.0},
    "parallel": {"tp": 8},
    "isl": 64,
    "osl": 64,
}


def test_a_serving_table_is_of_an_engine_with_as_many_clients_as_fit_or_are_said():
    most, few = (a_run().model_copy(update={**SERVED, "global_batch": batch}) for batch in (None, 4))
    assert express(most, rule_of(most)).served == (64, 64, None) and express(few, rule_of(few)).served.clients == 4
    rows = check_runs([most, few])
    assert [row.case.quantity for row in rows] == ["output token"] * 2 and all(row.case.reported for row in rows)
    assert rows[0].counted.expected < rows[1].counted.expected and rows[0].counted.bound < rows[0].counted.fast


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"measured": {"step_s": 0.25, "tokens_per_s_per_chip": 1.0}}, 0.25),
        ({"measured": {"tokens_per_s_per_chip": 1024.0}}, 32 * 128 / (8 * 1024)),
        ({"kind": "serve", "measured": {"tpot_s": 0.02}, "parallel": {"tp": 2, "dp": 4}, "isl": 64, "osl": 64}, 0.02),
        (SERVED, 1 / 500),
    ],
)
def test_seconds_of_what_was_measured(changes, seconds):
    assert express_one(**changes).seconds == pytest.approx(seconds)


def test_seconds_of_a_rate_of_flops_follow_the_group():
    run = express_one(group="papers", remat="full", measured={"tflops_per_chip": 150.0})
    assert run.seconds == pytest.approx(megatron_flops(run.work) / (150e12 * 8))
    run = express_one(group="maxtext-v5e", remat="full", measured={"tflops_per_chip": 150.0})
    parameters = 2 * (4 * 256 * 256 + 3 * 256 * 512) + 256 * 1024
    attention = 2 * 2 * 2 * 128 * 256  # of a token, over 2 layers: products of scores and of values, unmasked
    assert run.seconds == pytest.approx(32 * 128 * 3 * (2 * parameters + attention) / (150e12 * 8))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dims": a_run().dims | {"experts": 8, "dense_layers": 1}}, "dims lack top_k, moe_ff, dense_ff"),
        ({"dims": a_run().dims | {"attention": "MLA"}}, "attention: MLA"),
        ({**SERVED, "parallel": {"cp": 2, "dp": 4}}, "context parallelism in inference"),
        ({"parallel": {"note": "unknown"}}, "layout is not published"),
        ({"kind": "serve", "global_batch": None}, "no batch"),
        ({"kind": "serve", "measured": {"output_tokens_per_s": 1.0}, "parallel": {"tp": 2}}, "time of a token"),
        ({**SERVED, "parallel": {"tp": 4, "dp": 2}}, "replicas in one table"),
        ({"chip": "abacus"}, "the catalog has no abacus"),
        ({"remat": "some"}, "rematerialisation: some"),
        ({"global_batch": 12}, "microbatches"),
        ({"parallel": {"fsdp": 3}}, "tp = 1, fsdp = 3 and cp = 1 on 8 devices"),
        ({"measured": {"tflops_per_chip": 1.0}}, "no rate whose FLOPs are said"),
        ({"measured": {"step_s": 0.0}}, "above 0, not step_s = 0.0"),
        ({"parallel": {"fsdp": 8, "tp": 0}}, "at least 1, not tp = 0"),
        ({"parallel": {"fsdp": "8"}}, "at least 1, not fsdp = '8'"),
        ({"dims": {"L": 2, "d": 256}}, "dims lack H, Hkv, Dh, F, V, gated"),
        ({"dims": a_run().dims | {"H": -1}}, "no model has these dims: attention.num_heads"),
        ({"dims": a_run().dims | {"window": "some"}}, "a window of some"),
    ],
)
def test_what_cannot_be_expressed_says_what_is_lacking(changes, says):
    with pytest.raises(NotExpressed, match=says):
        express_one(**changes)


@pytest.fixture(scope="module")
def rows():
    """The runs without mixtures and serving tables, of which no accuracy is asked and which take long to count."""
    return check_runs([run for run in read_runs() if run.kind != "serve" and not run.is_mixture])


def test_measured_runs_are_near_their_estimate(rows):
    kinds = by(lambda row: row.case.of, [row for row in rows if is_judged(row)])
    training = kinds["training"]
    assert training.count > 170 and training.median <= 0.08 and training.ninetieth <= 0.25
    assert training.inside >= 0.9 and training.width <= 1.6
    assert kinds["decode"].median <= 0.15
    assert all(each.impossible == 0 for each in kinds.values())


def test_each_large_miss_has_one_explanation_and_no_other_run_has(rows):
    missed = {row.case.id for row in large_misses(rows)}
    assert {row.case.id for row in rows if row.case.why and is_judged(row)} == missed
    assert len(misses()) == len(missed)


def test_the_page_has_the_figures_that_are_counted(cases, rows):
    """A change of any figure shows in docs/ladder.md, and in README where it is of a kind."""
    root = Path(__file__).parents[3]
    page, readme = (root / "docs" / "ladder.md").read_text(), (root / "README.md").read_text()
    closed = [row for row in cases if row.counted is not None and not row.measured]
    for kind, median in median_errors(closed).items():
        counted = [row for row in closed if row.case.of == kind]
        assert f"| {kind} | {len(counted)} | {sum(not row.off for row in counted)} | {median:.1%} |" in page
    judged = [row for row in [*cases, *rows] if is_judged(row)]
    for key in (lambda row: row.case.of, lambda row: f"{row.case.of}, {row.chip}"):
        for name, each in by(key, judged).items():
            errors = f"{each.median:.0%} | {each.ninetieth:.0%}"
            line = f"| {name} | {each.count} | {errors} | {each.inside:.0%} | {each.width:.1f} |"
            assert line in page and (", " in name or line in readme)


@pytest.mark.exhaustive
def test_the_page_has_the_figures_of_mixtures():
    page = " ".join((Path(__file__).parents[3] / "docs" / "ladder.md").read_text().split())
    mixtures = check_runs([run for run in read_runs() if run.is_mixture and run.kind == "train"])
    of = by(lambda row: row.case.reported, [row for row in mixtures if row.counted is not None])
    wide, narrow = of["a mixture of experts"], of["a mixture of experts, products in 8 bits"]
    said = f"{wide.count} training runs in 16 bits are {wide.median:.0%} off (median), most of them slower than counted"
    said += f", and {narrow.count} in 8 bits {narrow.median:.0%}"
    assert said.replace("%", " %") in page and narrow.impossible == 2 and "which two runs beat" in page


def test_accuracy_is_of_errors_and_brackets():
    def row(published: float, *range_: float) -> CountedCase:
        words = {"id": "a", "of": "training", "quantity": "step", "unit": "s", "source": "a", "checked": "read"}
        return CountedCase(PublishedCase(**words, published=published, figure="a"), Range(*range_))

    rows = [row(1.0, 0.5, 0.9, 1.1, 1.3), row(1.0, 0.5, 1.1, 1.2, 1.4), row(1.0, 1.01, 1.02, 1.4, 1.5)]
    accuracy = Accuracy.of(rows)
    assert accuracy.count == 3 and accuracy.median == pytest.approx(0.2) and accuracy.ninetieth == pytest.approx(0.4)
    assert accuracy.inside == pytest.approx(1 / 3) and accuracy.impossible == 1
    assert accuracy.width == pytest.approx(1.3 / 0.9)


def test_another_file_of_runs_is_checked_by_the_same_rules(tmp_path, capsys):
    runs = [a_run(id="one"), a_run(id="two", precision="fp8"), a_run(id="three", remat="some")]
    path = tmp_path / "others.json"
    path.write_text(json.dumps({"runs": [run.model_dump() for run in runs]}))
    assert main(["plan", "--check", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    one, two, three = printed["rows"]
    assert one["verdict"] in ("inside", "faster", "slower") and one["chip"] == "h100-sxm5"
    assert two["reported"] == "products in 8 bits" and three["not_expressed"] == "rematerialisation: some"
    assert printed["by_kind"]["training"]["count"] == 1 and list(printed["by_chip"]) == ["training, h100-sxm5"]
    assert printed["reported"]["training, products in 8 bits"]["count"] == 1
    assert main(["plan", "--check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80 and "1 cases are beyond the cost model" in printed


def test_a_file_that_is_not_there_or_not_one_of_runs(tmp_path):
    with pytest.raises(InputError, match="there is no file .* of measured runs"):
        read_runs(tmp_path / "none.json")
    wrong = {"": "JSONDecodeError", "{}": "KeyError", '{"runs": [{"id": "a"}]}': "kind: field required"}
    for text, says in wrong.items():
        (tmp_path / "runs.json").write_text(text)
        with pytest.raises(InputError, match=says):
            read_runs(tmp_path / "runs.json")
