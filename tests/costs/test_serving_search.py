"""The search over widths of weights and drafts: its choice, what it prices, and what it refuses."""

import itertools
from dataclasses import replace

import pytest

from jaxlm import api, config
from jaxlm.core.errors import InputError
from jaxlm.costs.demand import Demand
from jaxlm.costs.deployment import WIDTHS, ServingSearch, engines
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan_order import TIE
from jaxlm.costs.queueing import EngineLoad, StepSeconds, at_rate, with_clients
from jaxlm.costs.replica import Replica
from jaxlm.costs.stack import Stack
from jaxlm.costs.timing.step_time import step_time
from jaxlm.costs.workload import Workload

BOTH = ("quantize", "drafts")
EVERY = list(itertools.product(WIDTHS, (0, 2, 4, 8)))


def experiment(*settings, name="llama3.1-8b"):
    return config.load(name, ["inference.speculate=ngram:8", "inference.acceptance=0.8", *settings], "decode")


def chosen(deployment):
    return deployment.work.execution.quantize, deployment.work.drafts


@pytest.mark.parametrize(
    "limits, goal", [({"tpot": 0.002}, "cost"), ({"rate": 1.5, "ttft": 0.5}, "latency")], ids=["cost", "latency"]
)
def test_the_choice_is_the_best_of_all_choices(limits, goal):
    """Each width, number of drafts and batch is tried by itself."""
    demand, target = Demand(300, 100, **limits), Target.parse("h100-sxm5:1")
    best = api.plan_serving(experiment(), "h100-sxm5:1", objective=goal, searched=BOTH, **demand_options(demand)).best
    every = {}
    for quantize, drafts in EVERY:
        work = Workload.of(experiment(f"execution.quantize={quantize}"), kind="decode")
        work = replace(work, drafts=drafts, acceptance=0.8 if drafts else 0.0)
        search = ServingSearch(((work,),), demand, goal, None, None)
        replica = Replica.of(work, target, demand)
        for slots in range(1, 17):
            if not isinstance(deployment := search._with(replica, slots, 1), str):
                every[quantize, drafts, slots] = deployment.value(goal)
    assert len({key[:2] for key in every}) > 3 and (*chosen(best), best.slots) in every
    assert best.value(goal) <= min(every.values()) * (1 + TIE) ** 2  # a tie of batches, and then one of engines
    assert chosen(best) != ("none", 0) and every[*chosen(best), best.slots] == best.value(goal)


def demand_options(demand):
    return {name: value for name, value in demand._asdict().items() if value is not None}


def test_what_is_not_searched_is_as_the_experiment_says():
    sizes = [(each.execution.quantize, each.drafts) for (each,) in engines(experiment("execution.quantize=fp8"))]
    assert sizes == [("fp8", 8)]
    assert [[each.drafts for each in width] for width in engines(experiment(), BOTH)] == len(WIDTHS) * [[0, 2, 4, 8]]
    four = engines(experiment("inference.speculate=ngram:5"), ("drafts",))
    assert [[each.drafts for each in width] for width in four] == [[0, 2, 4]]


def test_a_large_batch_takes_no_drafts_and_a_strict_limit_does():
    """Products of many rows take as long as their rows; few rows wait for weights."""
    wide = {"prompt": 200, "output": 200, "searched": ("drafts",)}
    many = api.plan_serving(experiment(), "h100-sxm5:1", **wide).best
    few = api.plan_serving(experiment(), "h100-sxm5:1", tpot=0.004, **wide).best
    assert many.work.drafts == 0 and many.slots > 64 and few.work.drafts > 0
    row = few.row()
    assert row["speculation"]["drafts"] == few.work.drafts and row["quantize"] == "none"
    assert "speculation" not in many.row()


def test_products_of_integers_are_of_chips_that_have_their_rate():
    served = {"prompt": 300, "output": 100, "searched": ("quantize",), "objective": "latency"}
    small = experiment("inference.speculate=none", "inference.sequences=256", name="qwen3-0.6b")
    assert "int8" not in Target.parse("rtx3090:1").chip.peak_flops
    for chip, width in ("h100-sxm5:1", "w8a8"), ("rtx3090:1", "none"):
        assert chosen(api.plan_serving(small, chip, **served).best)[0] == width


def test_weights_that_fit_in_fewer_bits_alone():
    """70B in bfloat16 needs two of these chips."""
    large = experiment(name="llama3.1-70b")
    best = api.plan_serving(large, "h100-sxm5:1", prompt=200, output=200, searched=BOTH).best
    assert best.work.execution.quantize == "int4"
    with pytest.raises(InputError, match="need more than 90% of"):
        api.plan_serving(large, "h100-sxm5:1", prompt=200, output=200, searched=("drafts",))


@pytest.mark.parametrize("chip", ["h100-sxm5:1", "a100-sxm4-80g:1", "tpu-v6e:1", "mi300x:1"])
@pytest.mark.parametrize("sequences, length", [(1, 128), (8, 2048), (32, 1024)])
def test_fewer_bits_never_raise_the_lower_bound_of_decoding(chip, sequences, length):
    settings = [f"inference.sequences={sequences}", f"inference.length={length}", "inference.speculate=none"]
    target = Target.parse(chip)
    work = Workload.of(experiment(*settings), kind="decode").on(target.chip)
    none, int8, int4 = (step_time(work.with_execution(quantize=width), target) for width in ("none", "int8", "int4"))
    assert none.bound_by == "memory"
    assert int4.lower_bound < int8.lower_bound < none.lower_bound
    assert int4.expected <= int8.expected <= none.expected


def test_more_tokens_a_step_are_fewer_steps_of_a_request():
    """With k tokens a step an engine serves as one whose requests draw so many fewer; each of them takes its share."""
    seconds = StepSeconds(0.01, 0.03, 1e-4)
    several, one = EngineLoad(8, seconds, 2, 2.0, 301, tokens=3.0), EngineLoad(8, seconds, 2, 2.0, 101)
    for served in (lambda load: with_clients(load, 8), lambda load: at_rate(load, 2.0)):
        assert served(several).rate == served(one).rate and served(several).ttft_p90 == served(one).ttft_p90
        assert served(several).tpot == pytest.approx(served(one).tpot / 3)


@pytest.mark.parametrize(
    "settings, more, said",
    [
        (["inference.speculate=none"], {"searched": ("drafts",)}, "needs their source: give --speculate ngram:auto"),
        ([], {"searched": ("remat",)}, "'remat' is not searched for; choose among quantize, drafts"),
        ([], {"searched": ("quantize",), "stack": Stack(precision="float8")}, "are both the width of weights"),
    ],
)
def test_searches_without_meaning_are_refused(settings, more, said):
    with pytest.raises(InputError, match=said):
        api.plan_serving(experiment(*settings), "h100-sxm5:1", prompt=20, output=10, **more)
