"""Parameters beyond those of OpenAI's API, with the meaning that they have for vLLM's server: each streamed and whole,
for several choices, and without an effect on what is served beside them."""

import httpx
import openai
import pytest
from serving import CONTEXT, SEED, tokens_alone

from jaxlm.inference.requests import Sampling
from jaxlm.server.served import ServedModel

pytestmark = pytest.mark.xdist_group("server")

SEP = "<|im_start|>"  # a control token that ends nothing by itself
OFTEN = {"257": 2.5}  # its id, drawn now and then
HOW = Sampling(0.8, logit_bias={257: 2.5})
MESSAGES = [{"role": "user", "content": "Hello"}]


def create(client, stream=False, prompt="Hello", max_tokens=30, n=2, **extra):
    """Return the texts and the reasons of their ends, and the tokens that were drawn."""
    named = {"temperature": 0.8, "seed": SEED, **extra}
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, n=n, stream=stream, extra_body=named
    )
    if not stream:
        return [choice.text for choice in answer.choices], [choice.finish_reason for choice in answer.choices]
    texts, reasons = [""] * n, [None] * n
    for chunk in answer:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    return texts, reasons


def drawn(served: ServedModel, how=HOW, count=30, seed=SEED, prompt="Hello", n=2):
    ids = served.tokenizer.encode_prompt(prompt)
    return [tokens_alone(served, ids, count, how, seed, stream) for stream in range(n)]


@pytest.fixture(scope="module")
def seed(server):
    """A seed with which two texts go on for three tokens at least before the control token is drawn."""
    return next(
        seed
        for seed in range(100)
        if all(257 in ids and 3 <= ids.index(257) < 20 for ids in drawn(server[0], seed=seed))
    )


@pytest.mark.parametrize("stream", [False, True])
def test_the_name_of_a_control_token_ends_a_text_there(stream, seed, client, server):
    served, _ = server
    texts = [served.tokenizer.decode(ids[: ids.index(257)]) for ids in drawn(served, seed=seed)]
    assert create(client, stream, seed=seed, logit_bias=OFTEN, stop=SEP) == (texts, ["stop", "stop"])
    options = {"seed": seed, "logit_bias": OFTEN, "stop": ["never there", SEP], "include_stop_str_in_output": True}
    assert create(client, stream, **options)[0] == [text + SEP for text in texts]


@pytest.mark.parametrize("stream", [False, True])
def test_no_text_ends_before_its_min_tokens(stream, seed, client, server):
    """The ids that end it are not drawn before, and what is drawn in their place is what the model would draw if they
    did not exist; a request beside it, and what comes after, are as ever."""
    served, url = server
    ends = {"seed": seed, "logit_bias": OFTEN, "stop_token_ids": [257]}
    plain = create(client, stream, **ends)
    texts, _ = create(client, stream, **ends, min_tokens=25)
    without = drawn(served, Sampling(0.8, logit_bias={257: -100.0}), 25, seed)
    for text, ids, before in zip(texts, without, plain[0], strict=True):
        assert text.startswith(served.tokenizer.decode(ids).rstrip("\ufffd")) and text != before
    assert create(client, stream, **ends) == plain
    assert create(client, stream, **ends, min_tokens=0) == plain
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 30, "temperature": 0.8, "n": 2, **ends}
    used = [httpx.post(f"{url}/v1/completions", json={**body, "min_tokens": least}).json() for least in (1, 25)]
    assert [answer["usage"]["completion_tokens"] >= 2 * 25 for answer in used] == [False, True]


def test_a_stop_string_is_not_sought_in_the_first_tokens(client, server):
    served, _ = server
    ids, decode = drawn(served, Sampling(0.8), n=1)[0], served.tokenizer.decode
    stop = next(letter for letter in decode(ids) if letter.isascii())
    assert create(client, n=1, stop=stop)[0][0] == decode(ids).partition(stop)[0]
    first = next(at for at, token in enumerate(ids) if stop in decode([token]))
    (text,), _ = create(client, n=1, stop=stop, min_tokens=first + 1)
    assert stop in text and decode(ids).startswith(text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_may_be_part_of_the_text(stream, client, server):
    served, _ = server
    ids, decode = drawn(served, Sampling(0.8), n=1)[0], served.tokenizer.decode
    whole = decode(ids)
    letter = next(letter for letter in whole[3:] if letter.isascii())
    before = whole.partition(letter)[0]
    options = {"n": 1, "stop": letter, "include_stop_str_in_output": True}
    assert create(client, stream, **options) == ([before + letter], ["stop"])
    token = served.tokenizer.encode(letter)[0]
    options = {"n": 1, "stop_token_ids": [token], "include_stop_str_in_output": True}
    assert create(client, stream, **options) == ([before + letter], ["stop"])
    assert create(client, stream, n=1, stop_token_ids=[token])[0] == [before]


def test_seeds_of_64_bits_draw_other_texts(client):
    seeds = [0, 2**32, 1, -1, 2**32 - 1, 2**63 - 1, -(2**63)]
    texts = [create(client, seed=seed)[0] for seed in seeds]
    assert len({text for pair in texts for text in pair}) == 2 * len(seeds)
    assert create(client, seed=-1)[0] == texts[3]


def test_a_long_prompt_is_cut_to_its_last_tokens(client, server):
    """Ids to as many as are asked for; a text too, with the ids that begin a document; and a conversation."""
    served, url = server
    ids = served.tokenizer.encode("one two three")
    short = {"truncate_prompt_tokens": 5}
    assert create(client, prompt=ids, **short) == create(client, prompt=ids[-5:])
    assert create(client, prompt="one two three", **short) == create(
        client, prompt=[*served.tokenizer.begin, *ids[-4:]]
    )
    assert create(client, prompt="one", truncate_prompt_tokens=50) == create(client, prompt="one")
    assert create(client, True, prompt=ids, **short) == create(client, prompt=ids[-5:])
    body = {"model": "tiny", "prompt": "x" * 999, "max_tokens": 7, "echo": True, "truncate_prompt_tokens": -1}
    answer = httpx.post(f"{url}/v1/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == CONTEXT - 7 + 1
    assert (
        answer["choices"][0]["text"].startswith("x" * (CONTEXT - 7)) and "x" * 260 not in answer["choices"][0]["text"]
    )
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 999}], "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/chat/completions", json={**chat, "truncate_prompt_tokens": 9}).json()
    assert answer["usage"]["prompt_tokens"] == 9


@pytest.mark.parametrize("stream", [False, True])
def test_the_final_message_can_be_continued(stream, client, server):
    served, _ = server
    said = [*MESSAGES, {"role": "assistant", "content": "I say "}]
    prompt = [*served.chat_template.encode(MESSAGES, reply=True), *served.tokenizer.encode("I say ")]
    assert served.chat_template.encode(said, reply=False, continues=True) == prompt
    ids = tokens_alone(served, prompt, 12)
    (end,) = served.chat_template.stop_token_ids
    expected = served.tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)
    answer = client.chat.completions.create(
        model="tiny", messages=said, max_tokens=12, seed=SEED, temperature=0.8, stream=stream,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )  # fmt: skip
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == expected
        return
    assert answer.choices[0].message.content == expected and answer.choices[0].message.role == "assistant"
    bare = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, extra_body={"add_generation_prompt": False}
    )
    assert bare.usage.prompt_tokens == len(served.chat_template.encode(MESSAGES, reply=False))
    assert bare.choices[0].message.role == "user"


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stop_token_ids": [264]}, r"[264]: this id is outside the vocabulary, 0 to 263"),
        ({"stop_token_ids": [-1]}, "greater than or equal to 0"),
        ({"cache_salt": ""}, "must not be empty"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens = 9 exceeds the 8 tokens"),
        ({"min_tokens": -1}, "greater than or equal to 0"),
        ({"seed": 2**63}, "less than or equal to 9223372036854775807"),
        ({"seed": -(2**63) - 1}, "greater than or equal to -9223372036854775808"),
        ({"truncate_prompt_tokens": 0}, "must be from 1 to 249"),
        ({"truncate_prompt_tokens": 250}, "must be from 1 to 249"),
        ({"truncate_prompt_tokens": -2}, "greater than or equal to -1"),
        ({"min_tokens": 2, "stop_token_ids": [*range(200)], "logit_bias": {str(n): 1 for n in range(101)}}, "be 300"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(path, changes, says, server):
    _, url = server
    asked = {"prompt": "Hello"} if path == "/completions" else {"messages": MESSAGES}
    answer = httpx.post(f"{url}/v1{path}", json={"model": "tiny", "max_tokens": 8, **asked, **changes})
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
        ({"messages": [{**MESSAGES[0], "content": None}], "continue_final_message": True}, "content is missing"),
    ],
)
@pytest.mark.parametrize("path", ["/chat/completions", "/tokenize"])
def test_endings_of_a_conversation_that_mean_nothing_are_refused(path, changes, says, server):
    _, url = server
    answer = httpx.post(f"{url}/v1{path}", json={"model": "tiny", "messages": MESSAGES, **changes})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_an_empty_salt_of_a_response_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="must not be empty"):
        client.responses.create(model="tiny", input="Hello", extra_body={"cache_salt": ""})
