"""More than the server can do: what it takes it finishes, what it does not take it says, and who leaves frees all."""

import asyncio
import json
import random
import time

import httpx
import pytest
from engine_fixtures import check_pages
from matrices import sampled
from serving import serving, text_alone

from jaxlm.inference.sampling import NotFinite

pytestmark = pytest.mark.xdist_group("server")

BODY = {"model": "tiny", "prompt": "Hello", "temperature": 0.8, "seed": 3}


def unlimited():
    return httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None))


def wait_until(holds, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


REQUESTS = sampled([("requests", 160), ("requests", 720)], ["('requests', 160)"])


@pytest.mark.parametrize("case", REQUESTS, ids=str)
def test_too_many_requests_are_all_answered(case, server):
    """Rows 18 and 19: 72 fit, slots and queue; more are told when to come again. Whatever is taken is finished."""
    served, url = server
    _, count = case
    body = {**BODY, "max_tokens": 60}

    async def run():
        async with unlimited() as http:
            return await asyncio.gather(*[http.post(f"{url}/v1/completions", json=body) for _ in range(count)])

    answers = asyncio.run(run())
    taken = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(taken) + len(refused) == count and len(taken) >= 64 and refused
    expected = text_alone(served, served.tokenizer.encode_prompt("Hello"), 60, seed=3)
    assert {answer.json()["choices"][0]["text"] for answer in taken} == {expected}
    for answer in refused:
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert answer.json()["error"]["code"] == "queue_full"
        assert answer.json()["error"]["type"] == "rate_limit_error"


def test_the_tokens_that_wait_are_bounded_too(engine, tokenizer, monkeypatch):
    scheduler = engine._scheduler
    monkeypatch.setattr(scheduler, "_max_queued_tokens", 500)
    body = {**BODY, "prompt": [1] * 100, "n": 20, "max_tokens": 1}
    with serving(engine, tokenizer) as (_, url):
        answer = httpx.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 429 and "500 tokens" in answer.json()["error"]["message"]


async def leave(http, url, body, after_chunks, after_seconds):
    """Ask, and close the connection after some chunks or seconds."""

    async def read():
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            count = 0
            async for _ in answer.aiter_bytes():
                count += 1
                if count > after_chunks:
                    return

    try:
        await asyncio.wait_for(read(), after_seconds)
    except TimeoutError:
        pass


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(stream, server):
    """Rows 13 and 16: also where the answer is not streamed, and where it has yet to begin."""
    served, url = server
    body = {**BODY, "max_tokens": 240, "n": 64, "stream": stream}

    async def run():
        async with unlimited() as http:
            await leave(http, url, body, 3, 0.3)

    before = served.service.statistics().texts[None].ended
    asyncio.run(run())
    wait_until(lambda: served.service.engine.is_idle)
    after = served.service.statistics()
    assert after.pages_held == 0 and after.texts[None].ended["cancelled"] >= before["cancelled"] + 50
    assert after.texts[None].ended["length"] < before["length"] + 64


COUNTS = sampled([("disconnects", 60), ("disconnects", 1000)], ["('disconnects', 60)"])


@pytest.mark.parametrize("case", COUNTS, ids=str)
def test_random_disconnects_harm_nobody(case, server):
    """Rows 14 to 17: clients leave in the queue and at any token; the others have their texts, and no page is left."""
    served, url = server
    draw = random.Random(0)
    expected = text_alone(served, served.tokenizer.encode_prompt("Hello"), 60, seed=3)

    async def stay(http):
        answer = await http.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 60})
        return answer.json()["choices"][0]["text"]

    async def run(leaving, staying):
        async with unlimited() as http:
            body = {**BODY, "max_tokens": 200}
            going = [
                leave(http, url, {**body, "stream": draw.random() < 0.7}, draw.randrange(40), draw.random())
                for _ in range(leaving)
            ]
            _, *texts = await asyncio.gather(asyncio.gather(*going), *[stay(http) for _ in range(staying)])
            return texts

    _, count = case
    for _ in range(count // 20):
        assert asyncio.run(run(20, 4)) == [expected] * 4
    wait_until(lambda: served.service.engine.is_idle)
    check_pages(served.service.engine)
    assert not served.service.engine.pages_held and not served.service._listeners


def test_readers_that_do_not_read_hold_nobody_up(server):
    """One is sent as much as its connection takes, and the engine draws on for all."""
    served, url = server
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps({**BODY, "max_tokens": 240, "n": 8, "stream": True, "logprobs": 20}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )

    async def run():
        _, silent = await asyncio.open_connection(host, int(port), limit=1 << 10)
        silent.write(f"{head}\r\n\r\n".encode() + content)
        async with unlimited() as http:
            answer = await http.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 20})
        silent.close()
        return answer

    assert asyncio.run(run()).status_code == 200
    wait_until(lambda: served.service.engine.is_idle)


def test_a_failed_engine_is_told_to_everyone(engine, tokenizer, monkeypatch):
    """Row 34: to those who wait, to those who come, and by /health."""
    step = engine.step

    def failing():
        (shard,) = engine._scheduler._shards
        if len(shard.admitted) >= 2 and shard.admitted[0].drawn > 5:
            raise RuntimeError("the device is lost")
        return step()

    async def run(url):
        async with unlimited() as http:
            body = {**BODY, "max_tokens": 240}
            return await asyncio.gather(
                *[http.post(f"{url}/v1/completions", json={**body, "stream": stream}) for stream in (True, False)]
            )

    with serving(engine, tokenizer) as (_, url):
        monkeypatch.setattr(engine, "step", failing)
        streamed, whole = asyncio.run(run(url))
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_failed")
        *_, error, done, _ = streamed.text.split("\n\n")
        assert "the device is lost" in error and done == "data: [DONE]"
        later = httpx.post(f"{url}/v1/completions", json=BODY)
        assert later.status_code == 500
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503 and "the device is lost" in health.json()["status"]
        monkeypatch.undo()
        list(engine.run())


def test_a_failing_request_takes_no_other_with_it(server, monkeypatch):
    served, url = server
    engine = served.service.engine
    expected = text_alone(served, served.tokenizer.encode_prompt("Hello"), 60, seed=3)
    step, failed = engine.step, []

    def one_fails():
        events = step()
        for event in events:
            if event.token is not None and not failed:
                failed.append(event.id)
                engine.cancel(event.id)
        return [
            event._replace(token=None, end="error", error=NotFinite()) if event.id in failed else event
            for event in events
        ]

    async def run():
        async with unlimited() as http:
            return await asyncio.gather(
                *[http.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 60}) for _ in range(4)]
            )

    monkeypatch.setattr(engine, "step", one_fails)
    answers = asyncio.run(run())
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 500]
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == expected
        else:
            assert answer.json()["error"]["code"] == "generation_failed"
