"""Requests that are refused: by name, with what would be right, in the form that clients read."""

import json

import httpx
import openai
import pytest
from serving import CONTEXT, serving

from jaxlm.server.served import ServerLimits

pytestmark = pytest.mark.xdist_group("server")

PROMPT = {"model": "tiny", "prompt": "Hello"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}

_BLANKS = "structured_outputs.whitespace_pattern", "is of json and json_object, and regex is given"

COMPLETIONS = [
    ({"promt": "x"}, "promt", "did you mean 'prompt'?"),
    ({"max_token": 3}, "max_token", "did you mean 'max_tokens'?"),
    ({"temperature": -1}, "temperature", "must be 0, or from"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_k": -5}, "top_k", "1 or more"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "1 is none"),
    ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]", "valid integer"),
    ({"logit_bias": {"5": 200}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"100000": 1}}, "logit_bias", "outside the vocabulary"),
    ({"seed": 2**63}, "seed", "less than or equal to 9223372036854775807"),
    ({"stop_token_ids": [264]}, "stop_token_ids", "[264]: this id is outside the vocabulary, 0 to 263"),
    ({"cache_salt": ""}, "cache_salt", "cache_salt must not be empty"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 500}, "n", "less than or equal to 128"),
    ({"n": 65}, None, "more than the queue takes, 64"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
    ({"stop": ""}, "stop", "end every text"),
    ({"stop": 5}, "stop", "a text, or a list of at most 16 texts"),
    ({"stop": ["a"] * 17}, "stop", "a text, or a list of at most 16 texts"),
    ({"suffix": "after"}, "suffix", "fill no gaps"),
    ({"structured_outputs": {}}, "structured_outputs", "has nothing; give only one of json, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "has regex, choice"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "did you mean 'regex'?"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, *_BLANKS),
    ({"guided_json": {}}, "guided_json", 'give structured_outputs = {"json": …}, or response_format'),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "the ( has no )"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", "is not defined"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "is no JSON: expecting property name"),
    ({"guided_json": {}}, "guided_json", "unknown parameter"),
    ({"best_of": 3}, "best_of", "leave it out, or give null or 1"),
    ({"store": True}, "store", "nothing is stored"),
    ({"max_tokens": 0}, "max_tokens", "or echo = true"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 5000}, "max_tokens", f"exceed the {CONTEXT} tokens"),
    ({"prompt": "x" * 500}, "prompt", f"exceeds the {CONTEXT} that a text may have"),
    ({"prompt": []}, "prompt", "nothing to go on with"),
    ({"prompt": [[]]}, "prompt", "the prompt is empty"),
    ({"prompt": [300]}, "prompt", "outside the vocabulary, 0 to 263"),
    ({"prompt": [1, "x"]}, "prompt", "a list of lists of token ids"),
    ({"prompt": None}, "prompt", "a list of lists of token ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "add stream = true"),
    ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages", "'include_usage'"),
]
CHATS = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "shows tools in a form that is known"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"functions": [{"name": "f"}]}, "functions", "tools and tool_choice"),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
        "messages.0.role",
        "shows no calls of tools",
    ),
    ({"response_format": {"type": "json"}}, "response_format.type", "'json_object'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "go together"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
        "schema is missing",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "objekt"}}}},
        "response_format",
        'response_format: the JSON schema cannot be used: "type" is "objekt", and may be',
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "say the same",
    ),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unknown parameter"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "is not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "read and write text"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs = true"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "give one of them"),
    ({"messages": []}, "messages", "messages must not be empty"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "content is missing"),
    ({"messages": [{"role": "usr", "content": "x"}]}, "messages.0.role", "did you mean 'user'?"),
    ({"messages": [{"role": "a robot", "content": "x"}]}, "messages.0.role", "should match pattern"),
    ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages.0.name", "shows no name"),
    ({"messages": [{"role": "user", "contents": "x"}]}, "messages.0.contents", "did you mean 'content'?"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "a list of parts"),
]


def refused(url, path, body, status=400):
    answer = httpx.post(f"{url}/v1{path}", json=body)
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert error.keys() == {"message", "type", "param", "code"} and "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "changes", "param", "says"),
    [
        *[("/completions", *case) for case in COMPLETIONS],
        *[("/chat/completions", *case) for case in CHATS],
        ("/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ("/responses", {"input": "x", "store": True}, "store", "nothing is stored"),
        ("/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools", "is not supported"),
        ("/responses", {"input": []}, "input", "say something"),
        ("/responses", {"input": [{"role": "user", "content": 5}]}, "input.0.content", "a list of parts"),
        (
            "/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}},
            "text.format",
            'cannot be held to "not"',
        ),
        ("/embeddings", {"input": "x", "dimensions": 8}, "dimensions", "the width of the model"),
        ("/embeddings", {"input": []}, "input", "give from 1"),
        ("/embeddings", {"input": [""] * 65}, "input", "give from 1 to 64"),
        ("/embeddings", {"input": "x" * 300}, "input", "shorten it"),
        ("/embeddings", {"input": [[]]}, "input", "is empty"),
        ("/tokenize", {}, "prompt", "give one of prompt and messages"),
        ("/detokenize", {"tokens": [264]}, "tokens", "outside the vocabulary"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(path, changes, param, says, server):
    """Rows 12, 20, 29 and 32."""
    _, url = server
    base = {"/completions": PROMPT, "/chat/completions": CHAT}.get(path, {"model": "tiny"})
    error = refused(url, path, {**base, **changes})
    assert says in error["message"] and error["param"] == param and error["type"] == "invalid_request_error"


def test_what_is_missing_is_named(server):
    _, url = server
    assert refused(url, "/completions", {"prompt": "x"})["message"] == "model is missing"
    assert refused(url, "/chat/completions", {"model": "tiny"})["code"] == "missing_parameter"
    error = refused(url, "/completions", {**PROMPT, "model": "gpt-9"}, 404)
    assert error["code"] == "model_not_found" and "'tiny'" in error["message"]


NEUTRAL = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "seed": None,
    "stop": None,
    "stream": False,
    "stream_options": None,
    "user": "somebody",
    "metadata": {"a": "b"},
    "store": False,
}
NEUTRAL_COMPLETIONS = {"suffix": None, "best_of": 1, "echo": False, "logprobs": None}
NEUTRAL_CHATS = {
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "functions": None,
    "modalities": ["text"],
    "service_tier": "auto",
    "logprobs": False,
    "top_logprobs": 0,
    "prompt_cache_key": "x",
    "safety_identifier": "y",
}


def test_neutral_values_are_accepted(server):
    _, url = server
    for path, body in (
        ("/completions", PROMPT | NEUTRAL | NEUTRAL_COMPLETIONS | {"max_tokens": 2}),
        ("/chat/completions", CHAT | NEUTRAL | NEUTRAL_CHATS | {"max_tokens": 2}),
    ):
        assert httpx.post(url + path, json=body).status_code == 200


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_the_longest_text_is_served_and_one_token_more_is_refused(length, server):
    """Rows 20 and 21: the last token of a text is drawn and never read."""
    _, url = server
    prompt = [1] * (length - 10)
    for extra, status in ((0, 200), (1, 400)):
        body = {**PROMPT, "prompt": prompt, "max_tokens": CONTEXT - len(prompt) + 1 + extra}
        answer = httpx.post(f"{url}/completions", json=body)
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 100_000, b'{"a": 1' * 100_000]
)
def test_what_is_no_json_is_refused(content, server):
    _, url = server
    answer = httpx.post(f"{url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_another_kind_of_body_is_refused(server):
    """A page of another site could send it from a browser on this machine."""
    _, url = server
    answer = httpx.post(f"{url}/v1/completions", content=json.dumps(PROMPT), headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]


def test_paths_and_methods_that_there_are_not(server):
    _, url = server
    for answer, status in (
        (httpx.get(f"{url}/v1/nothing"), 404),
        (httpx.get(f"{url}/v1/completions"), 405),
        (httpx.post(f"{url}/v1/models", json={}), 405),
        (httpx.get(f"{url}/v1/models/../../etc/passwd"), 404),
    ):
        assert answer.status_code == status and answer.json()["error"]["code"] == "not_found"


def test_keys_and_limits(engine, tokenizer):
    """Row 31: what one key has said is not found by another. A body that is too large is not read to its end."""
    prompt = "a secret that is longer than a page of the cache, all of it"
    with serving(engine, tokenizer, keys=["one", "two"], limits=ServerLimits(body_bytes=1000)) as (_, url):

        def cached(key):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
            return answer.usage.prompt_tokens_details.cached_tokens

        assert [cached(key) for key in ("one", "one", "two", "two")] == [0, 32, 0, 32]
        for shown in ("Bearer three", "Bearer on", "Bearer onë", "Basic one", "one", "Bearer"):
            headers = {"Authorization": shown.encode()}
            for answer in (
                httpx.post(f"{url}/v1/completions", json=PROMPT, headers=headers),
                httpx.get(f"{url}/models", headers=headers),
                httpx.get(f"{url}/metrics", headers=headers),
            ):
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.post(f"{url}/v1/completions", json=PROMPT).status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        headers = {"Authorization": "Bearer one"}
        large = {**PROMPT, "prompt": "x" * 2000}
        assert httpx.post(f"{url}/v1/completions", json=large, headers=headers).status_code == 413

        def pieces():
            for _ in range(100):
                yield b" " * 100

        headers["Content-Type"] = "application/json"
        answer = httpx.post(f"{url}/v1/completions", content=pieces(), headers=headers)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"


def test_a_request_that_takes_too_long_ends(engine, tokenizer):
    """With a status, or in a stream with an event; its pages are free."""
    body = {**PROMPT, "max_tokens": 250, "n": 60}
    with serving(engine, tokenizer, limits=ServerLimits(seconds=0.2)) as (_, url):
        answer = httpx.post(f"{url}/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        streamed = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}).text.split("\n\n")
        assert json.loads(streamed[-3].removeprefix("data: "))["error"]["code"] == "timeout"
        assert streamed[-2:] == ["data: [DONE]", ""]


def test_a_model_without_a_template_answers_no_messages(engine, tokenizer):
    with serving(engine, tokenizer, chat_template=None) as (_, url):
        assert refused(url, "/chat/completions", CHAT)["code"] == "no_chat_template"
        assert httpx.post(f"{url}/v1/completions", json={**PROMPT, "max_tokens": 1}).status_code == 200
