"""Log-probabilities of the tokens of a prompt, by `echo` and `prompt_logprobs`, and their places in the text."""

import json

import httpx
import jax
import meshes
import model_fixtures
import numpy as np
import pytest
import tokenizer_fixtures
import tokenizers

from jaxlm.data.tokenizers import Tokenizer
from jaxlm.models import tree
from jaxlm.server.text_offsets import TextOffsets

pytestmark = pytest.mark.xdist_group("server")

PROMPTS = ["Hello you, this is longer than a tile of a prompt", "Hey"]
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def expected(server):
    """A function that gives ln p [T, V] of the tokens after each one of a prompt, by the model itself."""
    served, _ = server
    model = served.service.engine.model
    parameters, (graph, _) = tree.init(model, 0, meshes.make()), tree.abstract(model)

    def log_softmax(ids):
        logits = np.array(model_fixtures.full_logits(graph, parameters, ids, 64), np.float64)
        whole = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        return np.where(served.tokenizer.valid_token_mask(model.vocab_size), whole, -np.inf)

    return log_softmax


def check(found, ids, expected, count):
    """Assert that log-probabilities of a prompt are those of the model, with ranks and the likeliest tokens."""
    assert len(found) == len(ids) and found[0] is None
    logprobs = expected(ids)
    for place, given, token in zip(found[1:], logprobs, ids[1:], strict=False):
        ranked = np.argsort(-given, kind="stable")
        likeliest = [str(id) for id in ranked[:count]]
        assert {*place} == {str(token), *likeliest}
        for id, shown in place.items():
            assert shown["logprob"] == pytest.approx(given[int(id)], abs=1e-5)
            assert shown["rank"] == 1 + list(ranked).index(int(id))
        assert [*place][0] == str(token)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_prompts_of_completions_have_log_probabilities(count, server, expected):
    """Each prompt and choice has them, in a stream or whole, whatever is in the cache, and without tokens behind it."""
    served, url = server
    body = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 2, "n": 2, "prompt_logprobs": count, "temperature": 0}
    for _ in range(2):
        choices = httpx.post(f"{url}/v1/completions", json=body).json()["choices"]
        for choice in choices:
            ids = served.tokenizer.encode_prompt(PROMPTS[choice["index"] // 2])
            check(choice["prompt_logprobs"], ids, expected, count)
    assert choices[2]["prompt_logprobs"][2][str(ids[2])]["decoded_token"] == "e"
    lines = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    first = {chunk["index"]: chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk}
    assert [first[index] for index in range(4)] == [choice["prompt_logprobs"] for choice in choices]
    assert sum("prompt_logprobs" in chunk for chunk in chunks) == 4
    nothing = httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 0}).json()
    assert [choice["prompt_logprobs"] for choice in nothing["choices"]] == [first[index] for index in range(4)]
    assert nothing["usage"]["completion_tokens"] == 0
    plain = httpx.post(f"{url}/v1/completions", json={**body, "prompt_logprobs": None}).json()["choices"]
    assert [choice["text"] for choice in plain] == [choice["text"] for choice in choices]
    assert {choice["prompt_logprobs"] for choice in plain} == {None}


def test_prompts_of_chats_have_log_probabilities(server, expected):
    served, url = server
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "n": 2, "prompt_logprobs": 3}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body).json()
    check(answer["prompt_logprobs"], served.chat_template.encode(MESSAGES, reply=True), expected, 3)
    lines = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [answer["prompt_logprobs"]]
    del body["prompt_logprobs"]
    assert httpx.post(f"{url}/v1/chat/completions", json=body).json()["prompt_logprobs"] is None


def test_echo_gives_as_many_alternatives_as_are_asked_for(client, server):
    options = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 3, "temperature": 0, "echo": True}
    few, many = (client.completions.create(**options, logprobs=count).choices[0].logprobs for count in (1, 6))
    assert few.tokens == many.tokens and few.text_offset == many.text_offset
    np.testing.assert_allclose(few.token_logprobs[1:], many.token_logprobs[1:], atol=1e-6)
    for one, others, token in zip(few.top_logprobs[1:], many.top_logprobs[1:], many.tokens[1:], strict=True):
        assert 6 <= len(others) <= 7 and token in others and {*one} <= {*others}
        assert max(one.values()) == max(others.values())


@pytest.mark.parametrize("make", [tokenizer_fixtures.chatml, tokenizer_fixtures.llama2], ids=lambda make: make.__name__)
@pytest.mark.parametrize("text", ["Once upon a time", "the model 😀 goes", "é", " two  blanks", ""])
def test_tokens_begin_where_their_text_does(make, text):
    """In a prompt as it was given and in what follows it, whether it begins with a word that loses its blank, or ends
    within a character's bytes."""
    tokenizer = make()
    following = tokenizer.encode("a b 😀")
    for echoes in (True, False):
        begin = [id for id in tokenizer.begin if id in tokenizer.controls.values()]
        ids = [*begin, *(tokenizer.encode(text) if text else [])]
        offsets = TextOffsets(tokenizer, tokenizer.bytes_of, ids)
        found = offsets.echo(text) if echoes else []
        shown = text if echoes else ""
        controls = {*tokenizer.controls.values()}
        own = [(at, id) for at, id in zip(found, ids, strict=False) if id not in controls]
        assert [at for at, _ in own] == sorted(at for at, _ in own) and all(0 <= at <= len(text) for at in found)
        for at, id in own:
            name = tokenizer.bytes_of(id).decode(errors="ignore")
            assert text[at:].startswith((name, name.removeprefix(" ")))
        whole = shown + tokenizer.decode([*ids, *following])[len(tokenizer.decode(ids)) :]
        for id in following:
            at, name = offsets.add(id), tokenizer.bytes_of(id).decode(errors="ignore")
            assert len(shown) <= at and whole[at:].startswith((name, name.removeprefix(" ")))


def test_offsets_are_those_of_the_text_as_it_was_given():
    """Though the tokenizer changes its letters: for it ﬁ is two."""
    backend = tokenizers.Tokenizer.from_str(tokenizer_fixtures.chatml().to_json())
    backend.normalizer = tokenizers.normalizers.NFKC()
    tokenizer = Tokenizer(backend)
    text = "Ａb ﬁn"
    ids = tokenizer.encode_prompt(text)
    assert tokenizer.decode(ids) == "Ab fin"
    assert TextOffsets(tokenizer, tokenizer.bytes_of, ids).echo(text) == [0, 0, 1, 2, 3, 3, 4]
