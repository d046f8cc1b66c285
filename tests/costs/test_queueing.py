"""The queueing estimate against the engine's own scheduler, whose steps take the same seconds."""

import heapq
import itertools
import math
import random
from typing import NamedTuple

import pytest

from jaxlm.costs.queueing import EngineLoad, StepSeconds, at_rate, with_clients
from jaxlm.inference.pages import PageGroup, Pages
from jaxlm.inference.requests import Request
from jaxlm.inference.scheduler import Scheduler
from jaxlm.inference.step_shapes import TILE

PAGE, CHUNK = 128, 512


class Simulated(NamedTuple):
    rate: float
    ttft: float
    ttft_p90: float
    tpot: float


def load(slots, prompt, output):
    seconds = StepSeconds(0.01, 0.03, 1e-4)
    return EngineLoad(slots, seconds, math.ceil(prompt / CHUNK), math.ceil(prompt / TILE) / (CHUNK // TILE), output)


def simulated(load, prompt, requests, rate=None, clients=None):
    """Measurements of requests with outputs of half to one and a half times the mean, without the first fifth."""
    draw, ids = random.Random(0), itertools.count(1)
    most = -(-(prompt + 2 * load.output) // PAGE) + 1
    scheduler = Scheduler(
        [Pages([PageGroup(load.slots * most + 2, None)], PAGE)],
        slots=load.slots,
        chunk_tokens=CHUNK,
        tile=TILE,
        max_queued=1 << 20,
        max_queued_tokens=1 << 40,
        max_context=1 << 20,
    )
    arrivals = [0.0] * (clients or 0)
    while rate and len(arrivals) < requests:
        arrivals.append((arrivals[-1] if arrivals else 0.0) + draw.expovariate(rate))
    clock, sent, first, ended = 0.0, {}, {}, []
    while len(ended) < requests:
        while arrivals and arrivals[0] <= clock:
            at = heapq.heappop(arrivals)
            tokens = draw.randint(load.output - load.output // 2, load.output + load.output // 2)
            sent[scheduler.submit(Request([next(ids)] + [0] * (prompt - 1), tokens)).id] = at
        if (step := scheduler.plan()) is None:
            clock = arrivals[0]
            continue
        decoding = len(step.shards[0].decode)
        clock += load.mixed_s(decoding) if step.chunks else load.decoding_s(decoding)
        scheduler.commit(step, {generation.id: [1] for generation in step.draws})
        for generation in step.draws:
            first.setdefault(generation.id, clock)
            if generation.end:
                began = first[generation.id]
                ended.append((clock, began - sent[generation.id], (clock - began) / max(generation.drawn - 1, 1)))
                if clients:
                    heapq.heappush(arrivals, clock)
    times, ttft, tpot = zip(*ended[requests // 5 :], strict=True)
    mean, p90 = sum(ttft) / len(ttft), sorted(ttft)[int(0.9 * len(ttft))]
    return Simulated((len(times) - 1) / (times[-1] - times[0]), mean, p90, sum(tpot) / len(tpot))


@pytest.mark.parametrize("slots, prompt, output", [(32, 1000, 60), (32, 128, 40), (16, 2000, 20)], ids=str)
@pytest.mark.parametrize("clients", [1, 4, "slots"])
def test_clients_get_what_the_scheduler_gives_them(slots, prompt, output, clients):
    """Throughput within 3 %; waits for a turn among few, which differ most, within 30 %."""
    engine, clients = load(slots, prompt, output), slots if clients == "slots" else clients
    counted, found = with_clients(engine, clients), simulated(engine, prompt, 300, clients=clients)
    assert counted.rate == pytest.approx(found.rate, rel=0.03)
    assert counted.tpot == pytest.approx(found.tpot, rel=0.15)
    assert counted.ttft == pytest.approx(found.ttft, rel=0.3)


@pytest.mark.parametrize("slots, prompt, output", [(32, 1000, 60), (32, 128, 40), (16, 2000, 20)], ids=str)
@pytest.mark.parametrize("load_share", [0.3, 0.75])
def test_requests_at_random_times_wait_as_long_as_the_scheduler_lets_them(slots, prompt, output, load_share):
    """At up to three quarters of the capacity: the mean within 15 %, and the 90th percentile within 25 %."""
    engine = load(slots, prompt, output)
    rate = load_share * with_clients(engine, slots).rate
    counted, found = at_rate(engine, rate), simulated(engine, prompt, 600, rate=rate)
    assert counted.ttft == pytest.approx(found.ttft, rel=0.15)
    assert counted.ttft_p90 == pytest.approx(found.ttft_p90, rel=0.25)
    assert counted.tpot == pytest.approx(found.tpot, rel=0.18)


def test_a_request_alone_waits_for_nobody():
    engine = load(8, 1000, 11)
    alone, rare = with_clients(engine, 1), at_rate(engine, 1e-6)
    assert (alone.ttft, alone.ttft_p90) == pytest.approx((2 * 0.03, 2 * 0.03), rel=1e-2)
    assert alone.tpot == pytest.approx(0.01 + 1e-4)
    assert 1 / alone.rate == pytest.approx(alone.ttft + 10 * alone.tpot, rel=1e-2)
    assert (rare.ttft, rare.tpot) == pytest.approx((alone.ttft, alone.tpot), rel=1e-2)


def test_more_requests_than_an_engine_serves_queue_without_end():
    engine = load(8, 1000, 60)
    most = with_clients(engine, 8).rate
    assert at_rate(engine, 0.8 * most) is not None and at_rate(engine, 1.2 * most) is None
    prompts = load(64, 4000, 2)  # which reading alone fills
    assert at_rate(prompts, 1.1 / (8 * 0.03)) is None


def test_little_s_law_holds_of_clients():
    """All clients are under way: they wait, read or decode."""
    for clients in (1, 5, 32):
        engine = load(32, 1000, 60)
        service = with_clients(engine, clients)
        reading = clients - service.decoding
        step_s = engine.mean_s(service.decoding, service.mixed)
        assert service.rate * step_s * (engine.output - 1) == pytest.approx(service.decoding)
        assert service.ttft == pytest.approx(reading / (service.rate * step_s) * engine.mixed_s(service.decoding))
