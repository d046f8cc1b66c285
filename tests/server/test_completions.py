"""/v1/completions, by the client of OpenAI: every answer is what the engine draws for the request alone."""

import asyncio

import httpx
import openai
import pytest
from matrices import sampled
from serving import SEED, text_alone, tokens_alone

from jaxlm.inference.requests import Sampling

pytestmark = pytest.mark.xdist_group("server")

LONG = "a prompt of more than one page of the cache, whose keys are found there again, " * 2


def create(client, prompt="Hello", max_tokens=20, temperature=0.8, seed=SEED, **options):
    return client.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, **options
    )


def test_a_text_is_what_the_engine_draws_alone(client, server):
    served, _ = server
    answer = create(client)
    (choice,) = answer.choices
    prompt = served.tokenizer.encode_prompt("Hello")
    assert choice.text == text_alone(served, prompt, 20)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (answer.model, answer.object) == ("tiny", "text_completion")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 20, 26)


@pytest.mark.parametrize("prompt", ["Hello", ["Hello", "You"], [72, 101], [[72, 101], [89]]], ids=str)
def test_prompts_are_texts_or_ids_and_each_has_what_it_has_alone(prompt, client, server):
    served, _ = server
    given = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    encoded = [served.tokenizer.encode_prompt(each) if isinstance(each, str) else each for each in given]
    answer = create(client, prompt, n=2)
    expected = [text_alone(served, ids, 20, stream=sample) for ids in encoded for sample in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert answer.usage.prompt_tokens == sum(map(len, encoded))
    assert answer.usage.completion_tokens == 20 * len(expected)


def test_four_choices_are_four_requests(client, server):
    """Row 27: none is missing, nor under another's index; also in a stream."""
    served, _ = server
    prompt = served.tokenizer.encode_prompt("Hello")
    expected = [text_alone(served, prompt, 20, stream=sample) for sample in range(4)]
    assert [choice.text for choice in create(client, n=4).choices] == expected
    texts, reasons = [""] * 4, {}
    for chunk in create(client, n=4, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            assert choice.index not in reasons
            reasons[choice.index] = choice.finish_reason
    assert texts == expected and reasons == dict.fromkeys(range(4), "length")


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_whole_text_with_its_usage(n, client):
    """Rows 24 and 28: characters over several tokens come whole, once."""
    options = {"n": n, "max_tokens": 60, "logprobs": 1}
    whole = create(client, **options)
    texts, names, ends = [""] * n, [[] for _ in range(n)], []
    for chunk in create(client, stream=True, stream_options={"include_usage": True}, **options):
        if not chunk.choices:
            usage = chunk.usage
            continue
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        names[choice.index] += choice.logprobs.tokens
        if choice.finish_reason:
            ends.append(choice.index)
    assert texts == [choice.text for choice in whole.choices] and sorted(ends) == list(range(n))
    assert names == [choice.logprobs.tokens for choice in whole.choices]
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, 60 * n)


def test_without_a_seed_texts_differ(client):
    texts = [choice.text for choice in create(client, ["Hello", "Hello"], seed=openai.omit, n=2).choices]
    assert len(set(texts)) == 4


def test_a_prefix_that_is_found_again_changes_nothing(client):
    """Rows 8 and 35: neither the text, nor the log-probabilities of the prompt, which are read anew."""
    options = {"prompt": LONG, "temperature": 0, "logprobs": 1, "extra_body": {"cache_salt": "of this test"}}
    texts = [create(client, **options) for _ in range(2)]
    assert [text.usage.prompt_tokens_details.cached_tokens for text in texts] == [0, len(LONG) // 32 * 32]
    assert texts[0].choices == texts[1].choices
    echoed = [create(client, echo=True, **options) for _ in range(2)]
    assert echoed[0].choices == echoed[1].choices
    assert echoed[0].usage.prompt_tokens_details.cached_tokens == 0


def test_echo_gives_the_prompt_with_what_its_tokens_cost(client, server):
    """As lm-evaluation-harness asks: the sum over a continuation, and whether each token is the likeliest."""
    served, _ = server
    ids = served.tokenizer.encode("Hello you")
    continued = tokens_alone(served, ids, 4, sampling=Sampling(temperature=0.0))
    answer = create(client, [*ids, *continued], max_tokens=1, temperature=0, logprobs=1, echo=True)
    (choice,) = answer.choices
    found = choice.logprobs
    assert choice.text.startswith("Hello you")
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(ids) + 4 + 1
    assert found.tokens[:9] == list("Hello you") and found.text_offset[:9] == list(range(9))
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    # What was drawn greedily is the likeliest, and has the log-probability that its draw was given.
    drawn = create(client, ids, max_tokens=4, temperature=0, logprobs=1).choices[0].logprobs
    for at in range(len(ids), len(ids) + 4):
        assert found.token_logprobs[at] == max(found.top_logprobs[at].values())
    assert found.token_logprobs[len(ids) : -1] == pytest.approx(drawn.token_logprobs, abs=2e-6)  # in float32
    greedy = [lp == max(top.values()) for lp, top in zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True)]
    assert not all(greedy)


def test_echo_alone_draws_nothing(client):
    answer = create(client, ["Hello", "You"], max_tokens=0, echo=True, logprobs=0)
    assert [choice.text for choice in answer.choices] == ["Hello", "You"]
    assert [choice.logprobs.tokens for choice in answer.choices] == [
        ["<|endoftext|>", *"Hello"],
        ["<|endoftext|>", *"You"],
    ]
    assert answer.usage.completion_tokens == 0
    found = answer.choices[0].logprobs  # the log-probability of each token, without alternatives
    assert [None, *found.token_logprobs[1:]] == [top and [*top.values()][0] for top in found.top_logprobs]
    streamed = list(create(client, ["Hello", "You"], max_tokens=0, echo=True, stream=True))
    assert sorted(chunk.choices[0].text for chunk in streamed) == ["Hello", "You"]


@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_have_the_legacy_form(count, client):
    (choice,) = create(client, logprobs=count, max_tokens=30).choices
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 30
    assert all(logprob < 0.0 for logprob in found.token_logprobs)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[offset : offset + len(token)] == token
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert max(count, 1) <= len(top) <= count + 1 and top[token] == logprob


def test_a_stop_string_ends_a_text_before_it(client, server):
    """Row 23: no part of it is streamed, and each choice says why it ended."""
    served, _ = server
    prompt = served.tokenizer.encode_prompt("Hello")
    texts = [text_alone(served, prompt, 60, stream=sample) for sample in range(2)]
    at = next(at for at in range(3, 40) if texts[0][at : at + 2] not in texts[0][:at] + texts[1])
    stop = texts[0][at : at + 2]
    whole = create(client, max_tokens=60, n=2, stop=["never there", stop])
    assert [choice.text for choice in whole.choices] == [texts[0][:at], texts[1]]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "length"]
    assert 60 < whole.usage.completion_tokens < 120
    streamed = ["", ""]
    for chunk in create(client, max_tokens=60, n=2, stop=stop, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [texts[0][:at], texts[1]]


def test_ids_that_end_a_text_are_not_part_of_it(client, server):
    """Row 26: nor of what was drawn."""
    served, _ = server
    prompt = served.tokenizer.encode_prompt("Hello")
    tokens = tokens_alone(served, prompt, 20)
    at = next(at for at in range(4, 20) if tokens[at] not in tokens[:at])
    answer = create(client, extra_body={"stop_token_ids": [tokens[at]]})
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == at


def test_the_model_s_own_ends_can_be_ignored(client, server, monkeypatch):
    served, _ = server
    tokens = tokens_alone(served, served.tokenizer.encode_prompt("Hello"), 20)
    first, second = [at for at in range(4, 20) if tokens[at] not in tokens[:at]][:2]
    monkeypatch.setattr(served.service.engine, "_stop_token_ids", frozenset([tokens[first]]))
    assert create(client).usage.completion_tokens == first
    answer = create(client, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 20)
    answer = create(client, extra_body={"ignore_eos": True, "stop_token_ids": [tokens[second]]})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", second)


def test_a_smaller_priority_is_sooner(client, server, monkeypatch):
    served, _ = server
    given, submit = [], served.service.engine.submit

    def submitted(request, *, priority=0, **options):
        given.append(priority)
        return submit(request, priority=priority, **options)

    monkeypatch.setattr(served.service.engine, "submit", submitted)
    assert create(client, extra_body={"priority": -3}).choices[0].text == create(client).choices[0].text
    assert given == [-3, 0]


OPTIONS = {
    "temperature": 0.3,
    "top_p": 0.3,
    "top_k": 2,
    "min_p": 0.9,
    "repetition_penalty": 1.8,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "logit_bias": {"72": 100},
    "seed": 12,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_has_an_effect(name, client):
    """Row 11. Neutral values of it have none."""
    base = {"temperature": 0.8, "seed": SEED}
    without = create(client, max_tokens=40, **base).choices[0].text

    def text(value):
        own = {"extra_body": {name: value}} if name not in ("temperature", "seed") else {name: value}
        return create(client, max_tokens=40, **{**base, **own}).choices[0].text

    assert text(OPTIONS[name]) != without
    neutral = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "logit_bias": {}}
    assert text({**base, **neutral}.get(name, 0)) == without


CLIENTS = sampled([("clients", 16), ("clients", 64)], ["('clients', 16)"])


@pytest.mark.parametrize("case", CLIENTS, ids=str)
def test_many_clients_at_once_each_have_their_own_text(case, server):
    """Rows 9 and 19: also the seeds are their own, and none is lost."""
    served, url = server
    _, clients = case
    asked = [
        {
            "model": "tiny",
            "prompt": f"{i} asks",
            "max_tokens": 10 + i % 37,
            "seed": i,
            "temperature": 0.8,
            "stream": True,
        }
        for i in range(clients)
    ]

    async def text(http, body):
        found = ""
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    found += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]
        return found

    async def run():
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
            return await asyncio.gather(*[text(http, body) for body in asked])

    found = asyncio.run(run())
    for body, together in zip(asked, found, strict=True):
        prompt = served.tokenizer.encode_prompt(body["prompt"])
        assert together == text_alone(served, prompt, body["max_tokens"], seed=body["seed"])
