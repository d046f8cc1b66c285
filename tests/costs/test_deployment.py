"""Deployments of a served model: limits, batch, replicas, prices, and the engine's steps that they are counted from."""

import math
from dataclasses import replace

import pytest

from jaxlm import api, config
from jaxlm.core.errors import InputError
from jaxlm.costs.demand import Demand
from jaxlm.costs.deployment import serving_throughput
from jaxlm.costs.engine_steps import decode_steps, mixed_steps, prefill_steps
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import HEADROOM
from jaxlm.costs.replica import Replica
from jaxlm.costs.stack import Stack
from jaxlm.costs.timing.step_time import step_time
from jaxlm.costs.workload import Workload
from jaxlm.inference.step_shapes import StepShapes
from jaxlm.parallel.layout import Layout

LIMITS = {"prompt": 1000, "output": 300, "ttft": 0.5, "tpot": 0.03}


def experiment(name="llama3.1-8b", *settings):
    return config.load(name, list(settings), "decode")


def replica(slots=32, chips="h100-sxm5:2", demand=Demand(1000, 300)):  # noqa: B008, immutable
    return Replica.of(Workload.of(experiment(), kind="decode"), Target.parse(chips), demand), slots


def test_mixed_steps_are_the_prompt_s_steps_in_which_all_slots_decode_too():
    shapes, windows = StepShapes(32, 512, 2), (None, 512)
    mixed = mixed_steps(shapes, 1000, 1150, 128, windows)
    alone = prefill_steps(StepShapes(1, 512, 2), 1000, 128, windows)
    (decode,) = decode_steps(shapes, 1150, 128, windows)
    assert [each.times for each in mixed] == [each.times for each in alone] == [2]
    (both,), (reads,) = mixed, alone
    assert both.shape.decode == 32 and both.shape.tiles == reads.shape.tiles == 16
    assert both.sections[1].pages == reads.sections[1].pages
    # Two steps: twice the pages of one.
    assert both.sections[0].pages == tuple((window, 2 * pages) for window, pages in decode.sections[0].pages)


def test_a_step_s_seconds_are_those_of_a_plan():
    engine, slots = replica()
    load = engine.loads(slots).expected
    step = step_time(engine.with_slots(slots), engine.target).expected
    assert load.decoding_s(slots) == pytest.approx(step)
    assert load.prompt_steps == load.prompt_work == 2
    prompt = replace(engine.base, kind="prefill", batch=1, sequence=1000)
    assert load.mixed_s(0) == pytest.approx(step_time(prompt, engine.target).expected / 2, rel=0.1)


@pytest.mark.parametrize("limits", [LIMITS, {**LIMITS, "tpot": 0.015}, {**LIMITS, "rate": 10.0}], ids=str)
def test_the_best_deployment_keeps_the_limits_and_the_memory(limits):
    best = api.plan_serving(experiment(), "h100-sxm5:8", **limits).best
    assert best.service.ttft_p90 <= 0.5 and best.service.tpot <= limits["tpot"]
    assert best.memory.total <= (1 - HEADROOM) * best.target.chip.device_capacity() and best.chips <= 8
    if rate := limits.get("rate"):
        assert best.replicas * best.service.rate == pytest.approx(rate)
    row = best.row()
    low, high = best.target.chip.usd_per_hour
    usd = math.sqrt(low * high) * best.chips / 3600 / row["output_tokens_per_s"] * 1e6
    assert row["usd_per_million_output_tokens"] == pytest.approx(usd)
    assert row["usd_per_million_tokens"] == pytest.approx(usd * 300 / 1300)
    for name in ("time_to_first_token_s", "time_per_token_s"):
        assert row[name]["low"] <= row[name]["expected"] <= (row[name]["high"] or math.inf)


def test_stricter_limits_cost_more():
    usd = [
        api.plan_serving(experiment(), "h100-sxm5:8", **{**LIMITS, "tpot": tpot}).best.usd_per_million_output_tokens
        for tpot in (0.05, 0.02, 0.008)
    ]
    assert usd == sorted(usd) and usd[-1] > 1.05 * usd[0]


def test_a_rate_takes_as_few_chips_as_keep_the_limits():
    few, many = (api.plan_serving(experiment(), "h100-sxm5:8", **LIMITS, rate=rate).best for rate in (2.0, 60.0))
    assert few.chips == 1 < many.chips
    soonest = api.plan_serving(experiment(), "h100-sxm5:8", **LIMITS, rate=2.0, objective="latency").best
    assert soonest.chips == 8 and soonest.request_s < few.request_s


def test_a_batch_that_is_given_is_kept():
    ranked = api.plan_serving(experiment("llama3.1-8b", "inference.sequences=24"), "h100-sxm5:8", **LIMITS)
    assert {each.slots for each in ranked.deployments} == {24}


def test_chips_without_a_price_are_left_out_of_the_cheapest():
    ranked, refused = api.plan_serving(experiment("qwen3-0.6b"), "all:1", prompt=1000, output=100)
    prices = [each.usd_per_million_output_tokens for each in ranked]
    assert len(prices) > 5 and prices == sorted(prices)
    assert any("no published price" in why for why in refused.values())


@pytest.mark.parametrize(
    "change, said",
    [
        ({"tpot": 1e-4}, "with 1 sequence on h100-sxm5:8, TTFT is"),
        ({"rate": 1e6}, "requests queue without end"),
        ({"prompt": 200_000}, "more than model.context_length = 131072"),
        ({"output": 0}, "--output 0 must be 1 or more"),
        ({"ttft": -1.0}, "--ttft -1 must be above 0"),
        ({"rate": 1.0, "objective": "throughput"}, "--rate states the throughput"),
    ],
)
def test_what_no_deployment_serves_is_refused(change, said):
    with pytest.raises(InputError, match=said):
        api.plan_serving(experiment(), "h100-sxm5:8", **{**LIMITS, **change})


def test_memory_that_holds_no_sequence_is_said():
    with pytest.raises(InputError, match="1 sequences? on a10g:1 need more than 90% of"):
        api.plan_serving(experiment("llama3.1-70b"), "a10g", **LIMITS)


def test_an_engine_at_its_most_clients_draws_as_many_tokens_as_its_steps_allow():
    work = Workload.of(experiment(), Layout(tensor=2), "decode")
    rate = serving_throughput(work, Target.parse("h100-sxm5:2"), 128, 2048)
    assert rate.low < rate.expected < rate.high < rate.bound
    few = serving_throughput(work, Target.parse("h100-sxm5:2"), 128, 2048, clients=8)
    assert few.expected < rate.expected
    narrow = Stack(precision="float8", cache="float8")
    assert serving_throughput(work, Target.parse("h100-sxm5:2"), 128, 2048, stack=narrow).expected > rate.expected
    longer = serving_throughput(work, Target.parse("h100-sxm5:2"), 2048, 2048)
    assert longer.expected < rate.expected
