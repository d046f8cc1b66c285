"""Adapters behind the same server: each under a name of its own, in one batch with the model."""

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from serving import text_alone

from jaxlm.inference.requests import Sampling

pytestmark = pytest.mark.xdist_group("server")

NAMES = ("tiny", "poet", "org/critic")


def test_adapters_are_listed_with_their_base(client):
    listed = client.models.list().data
    assert [(model.id, model.parent) for model in listed] == [("tiny", None), ("poet", "tiny"), ("org/critic", "tiny")]
    assert [model.counted is None for model in listed] == [False, True, True]
    assert client.models.retrieve("org/critic") == listed[2]


def test_the_name_of_a_request_chooses_its_adapter(client, server):
    """Asked for together, each text is that which the adapter draws alone."""
    served, _ = server
    greedy = Sampling(temperature=0.0)
    asked = [name for name in NAMES for _ in range(2)]

    def text(name):
        answer = client.completions.create(model=name, prompt="Hello", max_tokens=12, temperature=0)
        assert answer.model == name
        return answer.choices[0].text

    with ThreadPoolExecutor(len(asked)) as pool:
        texts = [*pool.map(text, asked)]
    prompt = served.tokenizer.encode_prompt("Hello")
    assert texts == [text_alone(served.named(name), prompt, 12, sampling=greedy) for name in asked]
    assert len(set(texts)) == len(NAMES)
    messages = [{"role": "user", "content": "Hello"}]
    answers = [client.chat.completions.create(model=name, messages=messages, max_tokens=8, seed=1) for name in NAMES]
    assert [answer.model for answer in answers] == [*NAMES]
    assert len({answer.choices[0].message.content for answer in answers}) == len(NAMES)
    vectors = [client.embeddings.create(model=name, input="Hello").data[0].embedding for name in NAMES]
    assert vectors[0] != vectors[1] != vectors[2] != vectors[0]


def test_a_prompt_is_found_in_the_cache_under_its_own_name_alone(client):
    def cached(name):
        answer = client.completions.create(model=name, prompt="one prompt for all of them " * 4, max_tokens=1)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(name) for name in NAMES] == [0, 0, 0]
    assert all(cached(name) >= 32 for name in NAMES)


def test_the_counts_of_each_adapter_are_its_own(client, server):
    _, url = server
    counted = "prompt_tokens", "generated_tokens", "texts", "cached_prompt_tokens"

    def counts(adapter):
        text = httpx.get(f"{url}/metrics").text
        found = [re.findall(rf'^jaxlm_{name}_total{{adapter="{adapter}".*}} (\S+)', text, re.M) for name in counted]
        return [sum(map(float, each)) for each in found]

    before = {name: counts(name) for name in ("", "poet", "org/critic")}
    client.completions.create(model="poet", prompt="Hello", max_tokens=5, temperature=0, extra_body={"min_tokens": 5})
    after = {name: counts(name) for name in before}
    assert after["poet"][:3] == [before["poet"][0] + 6, before["poet"][1] + 5, before["poet"][2] + 1]
    assert after[""] == before[""] and after["org/critic"] == before["org/critic"]


def test_a_name_that_is_not_served_is_404(client):
    with pytest.raises(openai.NotFoundError, match="no model 'poem' here; it has 'tiny', 'poet', 'org/critic'"):
        client.completions.create(model="poem", prompt="Hello")
