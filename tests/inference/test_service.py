"""The service of an engine: streams that are each as if alone, and an end of every one."""

import asyncio
import time
from functools import partial

import meshes
import model_fixtures
import numpy as np
import pytest
from engine_fixtures import check_pages

from jaxlm.core.errors import InputError
from jaxlm.inference.engine import Engine
from jaxlm.inference.requests import Request, Sampling
from jaxlm.inference.scheduler import Full
from jaxlm.inference.service import Draining, EngineFailed, EngineService, ServiceObserver
from jaxlm.inference.settings import EngineSettings
from jaxlm.models import tree

SETTINGS = EngineSettings(slots=8, page=32, chunk_tokens=64, max_queued=6)
CONTEXT = 160


@pytest.fixture(scope="module")
def engine():
    model = model_fixtures.model(context_length=CONTEXT, num_layers=1)
    engine = Engine(model, tree.init(model, 0, meshes.make()), meshes.make(), SETTINGS)
    engine.warm()
    return engine


@pytest.fixture
def service(engine):
    """A service of an engine that all tests share; nothing is left in it."""
    service = EngineService(engine)
    yield service
    asyncio.run(service.drain(0))
    check_pages(engine)
    assert engine.is_idle and not engine.pages_held


def requests(count, max_tokens=12):
    draw = np.random.default_rng(1)
    return [
        Request(draw.integers(0, 32, draw.integers(1, 60)).tolist(), max_tokens, Sampling(temperature=0.8), stream=i)
        for i in range(count)
    ]


async def tokens_of(stream):
    found = {}
    async with stream:
        async for index, event in stream:
            assert event.error is None and event.hidden is None
            found.setdefault(index, []).append(event.token and event.token.id)
    return [found[index] for index in sorted(found)]


def drawn(service, asked):
    async def run():
        return await tokens_of(service.stream(asked, seeds=[7] * len(asked)))

    return asyncio.run(run())


def test_requests_together_have_what_each_has_alone(service):
    asked = requests(6)

    async def run():
        streams = [service.stream([request], seeds=[7]) for request in asked]
        return [tokens for (tokens,) in await asyncio.gather(*map(tokens_of, streams))]

    together = asyncio.run(run())
    assert together == drawn(service, asked) == [drawn(service, [request])[0] for request in asked]
    assert [len(tokens) for tokens in together] == [12] * 6
    said = service.statistics()
    texts = said.texts[None]
    assert (texts.tokens, texts.ended["length"], said.waiting, said.running) == (3 * 72, 18, 0, 0)
    assert texts.prompt_tokens == 3 * sum(len(request.prompt) for request in asked) and texts.cached_tokens > 0
    assert 0 < said.pages_cached <= said.pages and said.steps and said.step_seconds > 0.0


def test_a_reader_that_leaves_frees_its_pages(service):
    """Also in the queue, and also where nobody closes but the reader's task is cancelled."""

    async def run():
        async with service.stream(requests(6, 100), seeds=[0] * 6) as stream:
            await anext(stream)
            held = service.engine.pages_held
        assert held and not service.engine.pages_held
        task = asyncio.create_task(tokens_of(service.stream(requests(2, 100), seeds=[0, 0])))
        while not service.engine.pages_held:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not service.engine.pages_held

    asyncio.run(run())
    assert service.statistics().texts[None].ended["cancelled"] == 8


def test_a_text_that_stops_takes_nobody_with_it(service):
    asked = requests(2, 40)
    alone = drawn(service, asked)

    async def run():
        found = [[], []]
        async with service.stream(asked, seeds=[7, 7]) as stream:
            async for index, event in stream:
                found[index].append(event.token and event.token.id)
                if len(found[0]) == 3 and index == 0:
                    stream.finish(0)
        return found

    assert asyncio.run(run()) == [alone[0][:3], alone[1]]
    assert service.statistics().texts[None].ended["stop"] == 1


def test_all_of_a_request_is_queued_or_nothing(service):
    async def run():
        with pytest.raises(InputError, match="exceed"):
            service.stream([*requests(2), Request([1] * CONTEXT, 2)], seeds=[0, 0, 0])
        streams = []
        with pytest.raises(Full):
            for _ in range(100):
                streams.append(service.stream(requests(6, 100), seeds=[0] * 6))
        assert 1 <= service.retry_after() <= 60
        for stream in streams:
            stream.close()

    asyncio.run(run())


def test_a_slow_reader_holds_nobody_up(service):
    async def run():
        async with service.stream(requests(1, 60), seeds=[0]) as slow:
            begun = time.monotonic()
            await tokens_of(service.stream(requests(2, 60), seeds=[0, 0]))
            took = time.monotonic() - begun
            assert [len(tokens) for tokens in await tokens_of(slow)] == [60]
            return took

    assert asyncio.run(run()) < 30.0


def test_the_times_of_tokens_are_observed(engine):
    class Times(ServiceObserver):
        def __init__(self):
            self.first, self.next = [], []

        def first_token(self, seconds):
            self.first.append(seconds)

        def next_token(self, seconds):
            self.next.append(seconds)

    times = Times()
    service = EngineService(engine, times)
    drawn(service, requests(3))
    asyncio.run(service.drain(1))
    assert len(times.first) == 3 and len(times.next) == 33
    assert min(times.first) > 0.0 and min(times.next) >= 0.0


def test_it_drains(engine):
    async def run():
        service = EngineService(engine)
        streams = [service.stream(requests(1, 20), seeds=[0]) for _ in range(3)]
        readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
        draining = asyncio.create_task(service.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            service.stream(requests(1), seeds=[0])
        assert [len(tokens) for ((tokens),) in await asyncio.gather(*readers)] == [20] * 3
        await draining

    asyncio.run(run())


def test_what_is_left_when_it_has_drained_ends_with_an_error(engine, monkeypatch):
    async def run():
        service = EngineService(engine)
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: time.sleep(0.05) or step())
        stream = service.stream(requests(1, 100), seeds=[0])
        await anext(stream)
        await service.drain(0.1)
        with pytest.raises(Draining):
            await tokens_of(stream)

    asyncio.run(run())
    check_pages(engine)
    assert engine.is_idle and not engine.pages_held


def test_a_failure_of_the_engine_ends_every_stream(engine, monkeypatch):
    told = []

    async def run():
        service = EngineService(engine, on_failure=partial(told.append, True))
        streams = [service.stream(requests(1, 100), seeds=[0]) for _ in range(3)]
        await anext(streams[0])
        monkeypatch.setattr(engine, "step", fail)
        for stream in streams:
            with pytest.raises(EngineFailed, match="no room"):
                await tokens_of(stream)
        with pytest.raises(EngineFailed):
            service.stream(requests(1), seeds=[0])
        await service.drain(1)
        assert service.failure and service.statistics().texts[None].ended["error"] == 3

    def fail():
        raise MemoryError("no room")

    asyncio.run(run())
    assert told == [True]
    monkeypatch.undo()
    assert len(list(engine.run())) > 100  # the engine itself is as it was


def test_a_step_that_hangs_is_seen(engine, monkeypatch):
    async def run():
        service = EngineService(engine)
        assert service.stalled_seconds() == 0.0
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: time.sleep(0.2) or step())
        async with service.stream(requests(1, 100), seeds=[0]):
            await asyncio.sleep(0.15)
            assert service.stalled_seconds() > 0.1
        await service.drain(5)

    asyncio.run(run())
