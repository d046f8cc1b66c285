"""/v1/responses, by the client of OpenAI: the answer that a chat gives, in the form of responses."""

import pytest
from serving import SEED

pytestmark = pytest.mark.xdist_group("server")

SAID = "Hello"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SAID}]


def create(client, said=SAID, instructions="Be brief.", temperature=0.8, max_output_tokens=20, seed=SEED, **options):
    return client.responses.create(
        model="tiny",
        input=said,
        instructions=instructions,
        temperature=temperature,
        max_output_tokens=max_output_tokens,
        extra_body={"seed": seed},
        **options,
    )


def chat(client, messages=MESSAGES, **options):
    answer = client.chat.completions.create(
        model="tiny", messages=messages, seed=SEED, temperature=0.8, max_tokens=20, **options
    )
    return answer.choices[0], answer.usage


def test_an_answer_is_that_of_a_chat(client):
    choice, usage = chat(client)
    answer = create(client, metadata={"a": "b"})
    assert answer.output_text == choice.message.content and (answer.object, answer.model) == ("response", "tiny")
    assert answer.status == {"stop": "completed", "length": "incomplete"}[choice.finish_reason]
    found = answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens
    assert found == (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    assert answer.metadata == {"a": "b"} and answer.store is False and answer.temperature == 0.8


def test_a_conversation_is_sent_whole_with_the_answers_before(client):
    first = create(client)
    asked = {"role": "user", "content": [{"type": "input_text", "text": SAID}]}
    again = {"role": "user", "content": "And?"}
    said = [asked, *[item.to_dict() for item in first.output], again]
    choice, _ = chat(client, [*MESSAGES, {"role": "assistant", "content": first.output_text}, again])
    assert create(client, said).output_text == choice.message.content


def test_an_answer_that_is_cut_says_so(client):
    answer = create(client, max_output_tokens=1)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert list(create(client, max_output_tokens=1, stream=True))[-1].type == "response.incomplete"


def test_a_stream_has_its_events_in_order(client):
    whole = create(client)
    events = list(create(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-4].text
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage.total_tokens == whole.usage.total_tokens
    assert events[0].response.status == "in_progress" and events[0].response.output == []
