"""Embeddings, tokens, models, health and metrics, with the prefix of their paths and without."""

import re
from itertools import pairwise

import httpx
import meshes
import numpy as np
import openai
import pytest
from lm_eval.utils import RemoteTokenizer
from serving import tokens_alone

import jaxlm
from jaxlm.inference.requests import Sampling
from jaxlm.models import tree
from jaxlm.parallel.layout import Layout

pytestmark = pytest.mark.xdist_group("server")

TEXTS = ["Hello", "a longer text that is another", "Hello"]


def test_embeddings_are_the_stream_after_a_text(client, server):
    """In base64, which the client asks for unasked, as in numbers; the same text has the same vector."""
    served, _ = server
    answer = client.embeddings.create(model="tiny", input=TEXTS)
    found = np.array([row.embedding for row in answer.data])
    assert found.shape == (3, served.service.engine.model.d_model)
    assert [row.index for row in answer.data] == [0, 1, 2] and (found[0] == found[2]).all()
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1.0, rtol=1e-6)
    assert abs(found[0] @ found[1]) < 0.99
    plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    np.testing.assert_array_equal(np.float32([row.embedding for row in plain.data]), np.float32(found))
    ids = [served.tokenizer.encode_prompt(text) for text in TEXTS]
    by_ids = client.embeddings.create(model="tiny", input=ids)
    assert [row.embedding for row in by_ids.data] == [row.embedding for row in answer.data]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))


def test_one_text_is_one_embedding(client):
    (row,) = client.embeddings.create(model="tiny", input="Hello").data
    (same,) = client.embeddings.create(model="tiny", input=[256, *b"Hello"]).data
    assert row.embedding != same.embedding  # bytes are no ids of this tokenizer


def test_an_embedding_is_what_the_next_token_is_drawn_from(client, server):
    """The largest product of its vector is with the likeliest token's row of the unembedding."""
    served, _ = server
    vector = np.array(client.embeddings.create(model="tiny", input="Hello").data[0].embedding)
    (token,) = tokens_alone(served, served.tokenizer.encode_prompt("Hello"), 1, Sampling(temperature=0.0))
    weights = np.asarray(tree.init(served.service.engine.model, 0, meshes.make())["unembedding"]).T
    valid_token_mask = served.tokenizer.valid_token_mask(len(weights))
    assert np.where(valid_token_mask, weights @ vector, -np.inf).argmax() == token


def test_the_model_is_listed(client, server):
    served, _ = server
    listed = client.models.list().data[0]
    assert listed == client.models.retrieve("tiny") and listed.id == "tiny"
    assert (listed.owned_by, listed.created, listed.max_model_len) == ("jaxlm", served.created, served.longest)
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        client.models.retrieve("gpt-9")


def test_tokens_and_texts(server):
    served, url = server
    ids = served.tokenizer.encode("Hello 😀")
    for prefix in ("", "/v1"):
        answer = httpx.post(f"{url}{prefix}/tokenize", json={"prompt": "Hello 😀"}).json()
        assert answer == {
            "tokens": [256, *ids],
            "count": len(ids) + 1,
            "max_model_len": served.longest,
            "token_strs": None,
        }
        bare = {"model": "tiny", "prompt": "Hello 😀", "add_special_tokens": False}
        assert httpx.post(f"{url}{prefix}/tokenize", json=bare).json()["tokens"] == ids
        back = httpx.post(f"{url}{prefix}/detokenize", json={"tokens": [256, *ids]}).json()
        assert back == {"prompt": "<|endoftext|>Hello 😀"}
    messages = [{"role": "user", "content": "Hi"}]
    answer = httpx.post(f"{url}/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == served.chat_template.encode(messages, reply=True)


def test_tokens_are_asked_for_as_of_vllm(server):
    """Each by its name, and conversations that end in another way, behind the ids that begin a document."""
    served, url = server

    def asked(**body):
        answer = httpx.post(f"{url}/tokenize", json=body).json()
        assert answer["count"] == len(answer["tokens"])
        return answer

    named = asked(prompt="Hé", return_token_strs=True)
    assert named["token_strs"] == ["<|endoftext|>", "H", "Ã", "©"]  # as the vocabulary spells bytes
    assert asked(prompt="Hé", return_token_strs=False)["token_strs"] is None
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure,"}]
    template = served.chat_template
    for begins in (False, True):
        begin = [*served.tokenizer.begin] * begins
        bare = asked(messages=messages, add_generation_prompt=False, add_special_tokens=begins)
        assert bare["tokens"] == [*begin, *template.encode(messages, reply=False)]
        opened = asked(
            messages=messages, add_generation_prompt=False, continue_final_message=True, add_special_tokens=begins
        )
        assert opened["tokens"] == [*begin, *template.encode(messages, reply=False, continues=True)]
        assert served.tokenizer.spelled_out(opened["tokens"]).endswith("<|im_start|>assistant\nSure,")
    for path, body, status in (
        ("tokenize", {"prompt": "x", "model": "gpt-9"}, 404),
        ("tokenize", {"prompt": "x", "messages": messages}, 400),
        ("tokenize", {"prompt": "x", "tools": []}, 400),
        ("tokenize", {"messages": []}, 400),
        ("detokenize", {"tokens": [0], "model": "gpt-9"}, 404),
        ("detokenize", {"tokens": [-1]}, 400),
        ("detokenize", {"tokens": "x"}, 400),
        ("detokenize", {}, 400),
    ):
        assert httpx.post(f"{url}/{path}", json=body).status_code == status
    assert httpx.post(f"{url}/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_the_harness_finds_the_tokenizer(server):
    """lm-evaluation-harness encodes and decodes by the server, as its `local-completions` does."""
    served, url = server
    tokenizer = RemoteTokenizer(f"{url}/v1/completions")
    ids = served.tokenizer.encode("Hello 😀")
    assert tokenizer.encode("Hello 😀") == ids and tokenizer.decode(ids) == "Hello 😀"
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == served.tokenizer.controls["<|endoftext|>"]
    assert len(tokenizer.encode(" <|endoftext|>")) == len(" <|endoftext|>")
    assert tokenizer.tokenizer_info["chat_template"] == served.chat_template.source


def test_it_says_that_it_is_well(server):
    _, url = server
    for prefix in ("", "/v1"):
        answer = httpx.get(f"{url}{prefix}/health")
        assert (answer.status_code, answer.json()) == (
            200,
            {
                "status": "ok",
                "model": "tiny",
                "chat": True,
                "exact": False,
                "dtype": "float32",
                "quantize": None,
                "cache_dtype": None,
                "speculate": None,
                "mesh": dict(Layout()),
            },
        )


def test_it_tells_its_version(server):
    _, url = server
    for prefix in ("", "/v1"):
        assert httpx.get(f"{url}{prefix}/version").json() == {"version": jaxlm.__version__}


def metric(text, name):
    """Return the value of a metric without labels, or of the model without an adapter."""
    return float(re.search(rf"^jaxlm_{name}(?:{{adapter=\"\"}})? (\S+)$", text, re.M)[1])


def test_metrics_count_what_is_served(client, server):
    _, url = server
    names = ("generated_tokens_total", "prompt_tokens_total", "cached_prompt_tokens_total", "steps_total")
    names += ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count")
    prompt = "a text of its own, longer than a page of the cache"
    said = [httpx.get(f"{url}/metrics").text]
    for _ in range(2):
        client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0)
        said.append(httpx.get(f"{url}/v1/metrics").text)
    before, between, after = ([metric(text, name) for name in names] for text in said)
    (tokens, read, cached, steps, first, later) = np.subtract(after, before)
    assert (tokens, read, cached, first, later) == (18, 2 * (len(prompt) + 1), 32, 2, 16) and steps >= 18
    assert between != before
    text = said[-1]
    of_group = r'^jaxlm_group_{}_prompt_tokens_total\{{group="attention"\}} (\S+)$'
    assert float(re.search(of_group.format("found"), text, re.M)[1]) >= cached
    assert float(re.search(of_group.format("lacked"), text, re.M)[1]) == 0
    assert metric(text, "requests_running") == metric(text, "requests_waiting") == metric(text, "pages_held") == 0
    assert 0 < metric(text, "pages_cached") <= metric(text, "pages")
    assert re.search(r'^jaxlm_texts_total\{adapter="",finish_reason="length"\} \d', text, re.M)
    answers = [
        float(re.search(r'requests_total\{route="/completions",status="200"\} (\S+)', each)[1]) for each in said[1:]
    ]
    assert [after - before for before, after in pairwise(answers)] == [1.0]
