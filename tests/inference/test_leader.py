"""Engines that follow the first: each is told what was asked, and does the same steps."""

import itertools
import random
from dataclasses import replace

import meshes
import model_fixtures
import pytest
from engine_fixtures import SMALL, check_pages

from jaxlm.inference import leader
from jaxlm.inference.commands import EngineCommand, decode_commands, encode_commands
from jaxlm.inference.engine import Engine
from jaxlm.inference.grammar import Grammar
from jaxlm.inference.requests import Request, Sampling
from jaxlm.models import tree
from jaxlm.parallel import processes


def test_requests_come_through_as_they_are():
    sampling = Sampling(0.5, 3, 0.9, logit_bias={7: -1.5}, logprobs=2)
    request = Request((1, 2), 9, sampling, ("a", "ö"), 4, frozenset([5, 3]), True, 2, scores_from=0, hidden=True)
    request = request._replace(grammar=Grammar("regex", "a+"))
    submit = EngineCommand("submit", 0, request, -2, 11, b"\xff\0".hex())
    told = [submit, EngineCommand("finish", 0), EngineCommand("cancel", 7)]
    first, *others = decode_commands(encode_commands(told))
    assert others == told[1:] and first._replace(request=None) == told[0]._replace(request=None)
    assert first.request == request._replace(prompt=[1, 2], stop=["a", "ö"], stop_token_ids=[3, 5])


def test_another_engine_does_the_same(monkeypatch):
    """Though requests are cancelled, finished and interrupted for lack of room meanwhile."""
    model = model_fixtures.model(model_fixtures.FAMILIES["llama"], context_length=160)
    parameters = tree.init(model, 0, meshes.make())
    first, second = (
        Engine(model, parameters, meshes.make(), replace(SMALL, slots=4, cache_bytes=1 << 17)) for _ in range(2)
    )
    messages, told, seen = [], [], {first: [], second: []}
    for engine in seen:
        step = engine.step

        def seeing(engine=engine, step=step):
            events = step()
            seen[engine] += [event for event in events if event.token is not None or event.end]
            return events

        monkeypatch.setattr(engine, "step", seeing)
    first.tell(messages.append)
    draw = random.Random(0)
    for _ in range(120):
        if draw.random() < 0.3:
            prompt = [draw.randrange(model.vocab_size) for _ in range(draw.randint(1, 60))]
            request = Request(prompt, draw.randint(1, 40), stream=len(told))
            told.append(first.submit(request, priority=draw.randint(0, 2), seed=3, salt=b"s"))
        if told and draw.random() < 0.2:
            draw.choice([first.cancel, first.finish])(draw.choice(told))
        first.step()
    while not first.is_idle:
        first.step()
    coming = itertools.chain(messages, [leader._END])
    monkeypatch.setattr(processes, "told_by_first", lambda: next(coming))
    leader.follow(second)
    assert second.is_idle and first.preemptions == second.preemptions and len(seen[first]) > 200
    assert [event[:3] for event in seen[second]] == [event[:3] for event in seen[first]]
    check_pages(first)
    check_pages(second)
    assert not first.pages_held and not second.pages_held


@pytest.mark.parametrize("count", [1, 2])
def test_a_process_by_itself_tells_nobody(count, monkeypatch):
    sent = []
    monkeypatch.setattr(processes, "process_count", lambda: count)
    monkeypatch.setattr(processes, "tell_others", sent.append)

    class Led:
        tell = sent.append

    leader.lead(Led())()
    assert sent == ([] if count == 1 else [sent.append, leader._END])
