"""The choice of one of several servers, by what they have read and by their load."""

import json
from contextlib import ExitStack

import pytest

from jaxlm.server.routing import PrefixRouter, prompt_of

pytestmark = pytest.mark.xdist_group("server")


def served(router, prompt):
    with router.routed(prompt) as server:
        return server


def test_prompts_that_begin_alike_meet_at_one_server():
    router = PrefixRouter(3)
    heads = {name: name * 600 for name in "abc"}
    first = {name: served(router, head + "?") for name, head in heads.items()}
    assert sorted(first.values()) == [0, 1, 2]
    for number in range(20):
        assert all(served(router, f"{head}{number}") == first[name] for name, head in heads.items())


def test_the_longest_beginning_counts():
    router = PrefixRouter(2)
    short, long = "a" * 300, "a" * 300 + "b" * 600
    with router.routed(short):
        other = served(router, "z" * 300)
    assert other != served(router, short)
    with ExitStack() as busy:
        for _ in range(5):
            busy.enter_context(router.routed(short))
        assert served(router, long) == other  # the first is busy
    assert served(router, long + "c") == other


def test_a_busy_server_is_left_alone_and_loads_end_even():
    router, prompt = PrefixRouter(4), "a" * 1000
    with ExitStack() as busy:
        for number in range(100):
            busy.enter_context(router.routed(f"{prompt}{number}"))
        assert sum(router.load) == 100 and max(router.load) - min(router.load) <= max(4, max(router.load) // 4)
    assert router.load == [0] * 4


def test_a_server_that_is_another_has_read_nothing():
    router = PrefixRouter(2)
    first = served(router, "a" * 600)
    router.forget(first)
    assert served(router, "b" * 600) == first  # it has read less now


def test_a_server_can_be_left_out():
    router = PrefixRouter(2)
    first = served(router, "a" * 600)
    with router.routed("a" * 600, without=[first]) as other:
        assert other != first and router.load[other] == 1


def test_the_prompt_is_what_is_read():
    message = {"role": "user", "content": "Hi"}
    alike = [json.dumps({"model": "m", "messages": [message], "seed": seed}).encode() for seed in (1, 2)]
    assert prompt_of(alike[0]) == prompt_of(alike[1]) == '{"messages": [{"role": "user", "content": "Hi"}]}'
    assert prompt_of(b"no JSON") == prompt_of(b"[1]") == "" and prompt_of(b'{"prompt": [1, 2]}') == '{"prompt": [1, 2]}'
