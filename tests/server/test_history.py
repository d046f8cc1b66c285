"""The history of a conversation: what it holds is shown to the model, or refused in one line."""

import pytest
import tokenizer_fixtures
from call_templates import CALLS, template_of

from jaxlm.data.chat_template import ChatTemplate
from jaxlm.server.messages import MessageBody, encoded
from jaxlm.server.refusals import Refusal

QUESTION = {"role": "user", "content": "time?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"tz": "UTC"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "12:00"}
# Shows calls where content is none alone, as DeepSeek R1.
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}<|im_start|>CALL "
    "{{ c.function.name }} {{ c.function.arguments | tojson }}<|im_end|>{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' and m.content is not none %}<|im_start|>SAID {{ m.content }}<|im_end|>{% endif %}"
    "{% if m.role == 'tool' %}RESULT {{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>SAID {% endif %}"
)


def shown(source, messages):
    template = ChatTemplate(source, tokenizer_fixtures.chatml(), {}, "chat_template.jinja")
    return template.tokenizer.spelled_out(encoded(template, [MessageBody.model_validate(each) for each in messages]))


def refused(source, messages, match):
    with pytest.raises(Refusal, match=match) as refusal:
        shown(source, messages)
    assert "\n" not in refusal.value.message and refusal.value.status == 400
    return refusal.value


@pytest.mark.parametrize("content", [None, ""])
def test_a_call_is_shown_where_content_has_to_be_none(content):
    text = shown(R1, [QUESTION, {**CALLED, "content": content}, RESULT])
    assert text == '<|im_start|>time?<|im_start|>CALL now {"tz": "UTC"}<|im_end|>RESULT 12:00<|im_start|>SAID '


@pytest.mark.parametrize(
    ("source", "messages", "says"),
    [
        (R1, [QUESTION, {**CALLED, "content": "I look."}], "messages.1: .* the call of 'now' .* leave its content out"),
        (
            R1.replace("'tool'", "'tool_result'"),
            [QUESTION, CALLED, RESULT],
            "messages.2: .* a message of the role 'tool'",
        ),
        (
            template_of("") + "{# tool #}",
            [QUESTION, CALLED, RESULT],
            "messages.1: .* the call of 'now' here; leave it out",
        ),
        (
            template_of(CALLS["hermes"]).replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
            [QUESTION, {**CALLED, "tool_calls": [CALL, {**CALL, "function": {**CALL["function"], "name": "later"}}]}],
            "messages.1: .* the call of 'later'",
        ),
        (
            R1,
            [QUESTION, {"role": "observation", "content": "12:00"}],
            "messages.1: .* a message of the role 'observation'",
        ),
    ],
)
def test_what_a_template_drops_is_refused(source, messages, says):
    assert refused(source, messages, says).param == "messages"


def test_what_a_template_complains_of_is_its_complaint():
    source = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}{{ messages[0].tool_calls }}"
    refused(source, [QUESTION, CALLED, RESULT], "cannot show these messages: one message")


ROLES = (
    "{% for m in messages %}{% if m.role in ['user', 'ipython', 'observation'] %}<|im_start|>{{ m.role }} "
    "{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("role", ["ipython", "observation"])
def test_roles_of_the_template_are_shown(role):
    assert shown(ROLES, [QUESTION, {"role": role, "content": "12:00"}]).endswith(f"<|im_start|>{role} 12:00")


def test_a_template_that_writes_any_role_shows_it():
    generic = tokenizer_fixtures.CHATML
    assert "<|im_start|>my-own.role\n12:00<|im_end|>" in shown(generic, [{"role": "my-own.role", "content": "12:00"}])
    assert "<|im_start|>system\nBe brief." in shown(generic, [{"role": "developer", "content": "Be brief."}])
    own = generic + "{# developer #}"
    assert "<|im_start|>developer\nBe brief." in shown(own, [{"role": "developer", "content": "Be brief."}])
    assert "<|im_start|>usr\n12:00" in shown(generic + "{# usr #}", [{"role": "usr", "content": "12:00"}])


@pytest.mark.parametrize(("role", "meant"), [("usr", "user"), ("Assistant", "assistant"), ("sytem", "system")])
def test_a_misspelt_role_is_refused(role, meant):
    messages = [QUESTION, {"role": role, "content": "x"}]
    assert refused(tokenizer_fixtures.CHATML, messages, f"did you mean '{meant}'?").param == "messages.1.role"


@pytest.mark.parametrize("arguments", ["{broken", '{"tz": NaN}', '{"tz": 1e999}', "[Infinity]"])
def test_arguments_that_are_no_json_are_refused(arguments):
    call = {**CALL, "function": {"name": "now", "arguments": arguments}}
    refused(R1, [QUESTION, {**CALLED, "tool_calls": [call]}], "the arguments of a call must be JSON")


def test_half_a_character_that_a_template_writes_bare_is_refused():
    source = template_of("CALL {{ c.name }} {{ c.arguments.tz }}")
    call = {**CALL, "function": {"name": "now", "arguments": '{"tz": "\\ud83d"}'}}
    refused(source, [QUESTION, {**CALLED, "tool_calls": [call]}], "the text is not UTF-8")
