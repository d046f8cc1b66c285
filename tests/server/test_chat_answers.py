"""/v1/chat/completions, by the client of OpenAI."""

import httpx
import openai
import pytest
from serving import SEED, tokens_alone
from tokenizer_fixtures import CHATML

from jaxlm.data.chat_template import ChatTemplate

pytestmark = pytest.mark.xdist_group("server")

CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def create(client, messages=CONVERSATION, seed=SEED, temperature=0.8, max_completion_tokens=20, **options):
    return client.chat.completions.create(
        model="tiny",
        messages=messages,
        seed=seed,
        temperature=temperature,
        max_completion_tokens=max_completion_tokens,
        **options,
    )


def answer_alone(served, messages, max_tokens, stream=0):
    """Return the text of an answer: it ends at the template's control token, and is a text of its own."""
    prompt = served.chat_template.encode(messages, reply=True)
    tokens = tokens_alone(served, prompt, max_tokens, stream=stream)
    (end,) = served.chat_template.stop_token_ids
    return served.tokenizer.decode(tokens[: tokens.index(end)] if end in tokens else tokens)


def test_an_answer_is_what_the_engine_draws_alone(client, server):
    served, _ = server
    answer = create(client, n=2)
    expected = [answer_alone(served, CONVERSATION, 20, sample) for sample in range(2)]
    assert [choice.message.content for choice in answer.choices] == expected
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.object == "chat.completion"
    prompt = served.chat_template.encode(CONVERSATION, reply=True)
    assert answer.usage.prompt_tokens == len(prompt) and 0 < answer.usage.completion_tokens <= 40


def test_a_stream_begins_with_the_role_and_ends_with_its_usage(client):
    create(client, n=2)  # so that both find the prompt in the cache
    whole = create(client, n=2)
    chunks = list(create(client, n=2, stream=True, stream_options={"include_usage": True}))
    *chunks, last = chunks
    assert last.choices == [] and last.usage == whole.usage and all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    for index, choice in enumerate(whole.choices):
        deltas = [each for chunk in chunks for each in chunk.choices if each.index == index]
        assert deltas[0].delta.role == "assistant" and all(each.delta.role is None for each in deltas[1:])
        assert "".join(each.delta.content or "" for each in deltas) == choice.message.content
        assert [each.finish_reason for each in deltas if each.finish_reason] == [choice.finish_reason]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_have_the_form_of_chats(stream, client, server):
    options = {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 30}
    (choice,) = create(client, **options).choices
    found = choice.logprobs.content
    if stream:
        chunks = create(client, stream=True, **options)
        streamed = [
            token for chunk in chunks for each in chunk.choices if each.logprobs for token in each.logprobs.content
        ]
        assert streamed == found
    controls = server[0].tokenizer.controls  # are no part of the text
    shown = b"".join(bytes(token.bytes) for token in found if token.token not in controls)
    assert shown.decode(errors="replace") == choice.message.content
    for token in found:
        assert token.token == bytes(token.bytes).decode(errors="replace") and token.logprob < 0.0
        assert len(token.top_logprobs) == 2 and token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    assert create(client).choices[0].logprobs is None
    (bare,) = create(client, logprobs=True).choices
    assert all(token.top_logprobs == [] for token in bare.logprobs.content)


def test_an_answer_ends_where_the_context_does(client, server):
    served, _ = server
    prompt = served.chat_template.encode(CONVERSATION, reply=True)
    answer = create(client, max_completion_tokens=openai.omit, extra_body={"logit_bias": {"258": -100, "256": -100}})
    assert answer.usage.completion_tokens == served.longest - len(prompt) + 1
    assert answer.choices[0].finish_reason == "length"


def test_the_token_behind_an_answer_ends_it(client, server):
    """The template writes it; it is none that ends a text of the tokenizer's."""
    served, _ = server
    (end,) = served.chat_template.stop_token_ids
    assert end not in served.tokenizer.stop_token_ids
    answer = create(client, extra_body={"logit_bias": {str(end): 100}})
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content == ""
    assert answer.usage.completion_tokens == 0


def test_parts_developers_and_answers_before_are_messages(client, server):
    served, _ = server
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    before = create(client).choices[0].message
    said = create(
        client, [{"role": "developer", "content": parts}, CONVERSATION[1], before.model_dump(), CONVERSATION[1]]
    )
    shown = [
        {"role": "system", "content": "Be\nbrief."},
        CONVERSATION[1],
        {"role": "assistant", "content": before.content},
        CONVERSATION[1],
    ]
    assert said.choices[0].message.content == answer_alone(served, shown, 20)


def test_variables_of_the_template_are_those_that_it_reads(client, server, monkeypatch):
    served, url = server
    template = ChatTemplate(CHATML + "{% if short %}Shortly: {% endif %}", served.tokenizer, {}, "its template")
    monkeypatch.setitem(vars(served), "chat_template", template)
    asked = {"model": "tiny", "messages": CONVERSATION}
    plain, short = (
        httpx.post(f"{url}/tokenize", json={**asked, **more}, trust_env=False).json()["tokens"]
        for more in ({}, {"chat_template_kwargs": {"short": True}})
    )
    assert short == [*plain, *served.tokenizer.encode("Shortly: ")]
    answer = create(client, extra_body={"chat_template_kwargs": {"short": True}})
    assert answer.usage.prompt_tokens == len(short)
    with pytest.raises(openai.BadRequestError, match="reads no 'brief'; what it reads is short") as refused:
        create(client, extra_body={"chat_template_kwargs": {"brief": True}})
    assert refused.value.body["param"] == "chat_template_kwargs"


def test_control_tokens_that_a_message_spells_out_stay_text(client, server):
    """Row 32, of messages."""
    served, _ = server
    plain, spelled = ({"role": "user", "content": text} for text in ("x", "<|im_end|>"))
    usage = [create(client, [message], max_completion_tokens=1).usage.prompt_tokens for message in (plain, spelled)]
    assert usage[1] - usage[0] == len("<|im_end|>") - 1
