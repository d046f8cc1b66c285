"""The order of plans: ties, head-room of memory, layers over a network, budgets and deadlines; and known practice."""

from dataclasses import replace

import meshes
import pytest
from model_fixtures import model
from workload_fixtures import changed, workload

from jaxlm import api, config
from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import plan
from jaxlm.costs.plan_order import TIE, PlanOrder
from jaxlm.costs.search import search, smallest

NODES = Target.parse("h100-sxm5:2x8")


def planned(expected, upper=None, microbatches=1, remat="none", target=NODES, **layout):
    """A plan on two nodes of eight whose step takes other times."""
    work = workload("train", model(), 64, 32, layout=meshes.layout(**layout), remat=remat, microbatches=microbatches)
    base = plan(replace(work, steps=1000), target)
    return replace(base, time=replace(base.time, expected=expected, upper_bound=upper or 2 * expected))


@pytest.mark.parametrize(
    "simple, other",
    [
        ({"fsdp": 16}, {"fsdp": 8, "data": 2}),
        ({"fsdp": 16}, {"fsdp": 16, "microbatches": 2}),
        ({"fsdp": 16}, {"fsdp": 16, "remat": "full"}),
        ({"fsdp": 16, "remat": ("query",)}, {"fsdp": 16, "remat": "full"}),
        ({"fsdp": 8, "tensor": 2}, {"fsdp": 4, "tensor": 4}),
        ({"fsdp": 16, "remat": "full"}, {"fsdp": 8, "tensor": 2}),
    ],
)
def test_the_simplest_of_a_tie_is_first_and_no_other(simple, other):
    slower, faster = planned(1 + 0.9 * TIE, **simple), planned(1.0, **other)
    assert PlanOrder().ordered([faster, slower]) == [slower, faster]
    slower = planned(1 + 1.1 * TIE, **simple)
    assert PlanOrder().ordered([slower, faster]) == [faster, slower]


def test_a_gain_of_layers_over_the_network_must_hold_without_overlap():
    within = planned(1.0, 2.0, fsdp=2, tensor=8)
    hidden, real = (planned(0.9, upper, tensor=16) for upper in (2.2, 1.8))
    assert PlanOrder().ordered([hidden, within])[0] is within
    assert PlanOrder().ordered([real, within])[0] is real
    # Within one domain the expected time alone decides.
    one = Target.parse("gb200-nvl72:16")
    within, hidden = planned(1.0, 2.0, fsdp=2, tensor=8, target=one), planned(0.9, 2.2, tensor=16, target=one)
    assert PlanOrder().ordered([within, hidden])[0] is hidden


def test_a_search_leaves_memory_free_unless_nothing_does():
    target = Target.parse("h200-sxm:8")
    work = workload("train", config.load("llama3.1-8b").model, 16, 4096, kernels="xla")
    assert all(p.leaves_headroom for p in search(work, target))
    least = smallest(work, target).total

    def on(capacity):
        chip = target.chip.model_copy(update={"device_memory_bytes": capacity})
        return search(work, replace(target, chip=chip))

    assert all(p.leaves_headroom for p in on(int(least * 1.2)))
    tight = on(int(least * 1.05))
    assert tight and all(p.fits and not p.leaves_headroom for p in tight)


def test_a_deadline_asks_for_the_cheapest_and_a_budget_for_the_fastest():
    assert PlanOrder.of(None, None, 60.0, "train").goal == "cost"
    assert PlanOrder.of(None, 1e3, None, "train").goal == "throughput"
    assert PlanOrder.of("throughput", 1e3, 60.0, "train") == ("throughput", 1e3, 60.0)
    slow = planned(1.0, fsdp=16)
    assert PlanOrder(deadline=1001.0).refusal(slow) is None
    assert "takes 16.7 min on h100-sxm5:16" in PlanOrder(deadline=999.0).refusal(slow)
    assert "and costs $14, beyond the budget of $7" in PlanOrder(budget=slow.usd_per_run / 2).refusal(slow)
    assert "training.steps=N" in PlanOrder(deadline=1.0).refusal(replace(slow, work=changed(slow.work, steps=None)))


@pytest.mark.parametrize(
    "goal, budget, deadline, kind, said",
    [
        ("latency", None, None, "train", "no latency"),
        ("speed", None, None, "train", "choose one of throughput, latency, cost"),
        (None, 1.0, None, "decode", "--budget is of a training run"),
        (None, None, 1.0, "prefill", "--deadline is of a training run"),
        (None, -1.0, None, "train", "--budget -1 must be above 0"),
    ],
)
def test_objectives_without_sense_are_refused(goal, budget, deadline, kind, said):
    with pytest.raises(InputError, match=said):
        PlanOrder.of(goal, budget, deadline, kind)


def test_a_deadline_leaves_the_chips_that_keep_it_cheapest_first():
    experiment = config.load("llama3.2-1b", ["training.batch=16", "training.steps=100000", "training.sequence=2048"])
    every = api.plan(experiment, "all:8").plans
    priced = [p for p in every if p.usd_per_run is not None and p.leaves_headroom]
    limit = sorted(p.run_s for p in priced)[len(priced) // 2]
    kept, refused = api.plan(experiment, "all:8", deadline=limit)
    assert {str(p.target) for p in kept} == {str(p.target) for p in priced if p.run_s <= limit}
    prices = [p.usd_per_run for p in kept]
    assert prices == sorted(prices) and any("beyond the deadline" in why for why in refused.values())
    assert any("no published price" in why for why in refused.values())


# What practitioners run, as far as published configurations and guides agree.
PRACTICE = {
    "8B on a node": ("llama3.1-8b", "h100-sxm5:8", ["training.batch=64", "training.sequence=8192"], {"fsdp": 8}),
    "124M on one": ("gpt2-124m", "rtx4090", ["training.batch=16", "training.sequence=1024"], {}),
    # Each layer within a node: one all-reduce over the network takes longer than reading half of the weights.
    "70B decoded": ("llama3.1-70b", "h100-sxm5:16", ["inference.sequences=1"], {"data": 2, "tensor": 8}),
}


@pytest.mark.parametrize("name", PRACTICE)
def test_the_best_mesh_is_that_of_practice(name):
    model, on, settings, layout = PRACTICE[name]
    kind = "decode" if name.endswith("decoded") else "train"
    best = api.plan(config.load(model, settings, kind), on, mesh="auto", workload=kind).best
    assert {axis: size for axis, size in best.work.layout.items() if size > 1} == layout
    assert best.leaves_headroom and (layout or best.work.microbatches == 1)


def test_layers_of_70b_stay_within_a_node():
    experiment = config.load("llama3.1-70b", ["training.batch=128", "training.sequence=8192"])
    best = api.plan(experiment, "h100-sxm5:64", mesh="auto").best
    assert best.work.layout["tensor"] <= 8 and best.work.layout["fsdp"] >= 8 and best.leaves_headroom
