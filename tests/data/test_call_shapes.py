"""Messages with calls, in the shape in which each template shows them."""

import json

import pytest
import tokenizer_fixtures

from jaxlm.data.chat_template import ChatTemplate
from jaxlm.data.conversations import Conversation, encode

ARGUMENTS = {"tz": "UTC"}
CALL = "CALL {{ c.function.name }} "
TABLE, TEXT = "{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"
# What a template shows of a message with calls, what it shows of others, and whether the shown call is JSON as given.
ALWAYS = "{% for c in m.tool_calls or [] %}@{% endfor %}SAID {{ m.content }}"
IF_NONE = "{% if m.content is none %}{% for c in m.tool_calls %}@{% endfor %}{% else %}SAID {{ m.content }}{% endif %}"
BESIDE_NONE = (  # an answer of its own follows where content is a text
    "{% for c in m.tool_calls or [] %}@{% endfor %}{% if m.content is not none %}SAID {{ m.content }}{% endif %}"
)


def template(shows):
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }} " + shows + "<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    return ChatTemplate(source, tokenizer_fixtures.chatml(), {}, "chat_template.jinja")


def messages(arguments=ARGUMENTS, content=""):
    call = {"id": "callnr001", "type": "function", "function": {"name": "now", "arguments": arguments}}
    return [{"role": "user", "content": "time?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("shows", "arguments", "said"),
    [
        (ALWAYS, TABLE, "SAID "),  # not SAID None
        (IF_NONE, TABLE, ""),
        (BESIDE_NONE, TABLE, ""),
        (ALWAYS, TEXT, "SAID "),
        (IF_NONE, TEXT, ""),
        (BESIDE_NONE, TEXT, ""),
        (ALWAYS, "{{ c.function.arguments }}", "SAID "),  # JSON, not as Python writes a table
        (
            ALWAYS,
            "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
            "SAID ",
        ),
    ],
)
@pytest.mark.parametrize("given", [ARGUMENTS, json.dumps(ARGUMENTS)])
@pytest.mark.parametrize("content", ["", None])
def test_a_call_is_shown_with_nothing_beside_it(shows, arguments, said, given, content):
    """However a template asks for it: with content none or empty, and arguments as a table or as JSON."""
    shown = template(shows.replace("@", CALL + arguments)).render(messages(given, content), reply=False)
    assert shown.endswith(f'<|im_start|>assistant CALL now {{"tz": "UTC"}}{said}<|im_end|>')


def test_messages_without_calls_stay_as_they_are():
    shows = template(IF_NONE.replace("@", CALL + TABLE))
    said = [{"role": "user", "content": "time?"}, {"role": "assistant", "content": ""}]
    assert shows.render(said, reply=False).endswith("<|im_start|>assistant SAID <|im_end|>")


def test_what_is_learned_is_what_is_served():
    shows = template(IF_NONE.replace("@", CALL + TEXT))
    for content in ("", None):
        encoded = encode(Conversation.of_record({"messages": messages(content=content)}), shows)
        learned = shows.tokenizer.spelled_out(encoded.tokens[encoded.learned].tolist())
        assert learned == 'CALL now {"tz": "UTC"}<|im_end|>'


def test_half_a_character_in_arguments_stays_its_escape():
    shows = template(ALWAYS.replace("@", CALL + TABLE))
    conversation = messages('{"tz": "\\ud83d"}')
    assert 'CALL now {"tz": "\\ud83d"}' in shows.render(conversation, reply=False)
    assert shows.encode(conversation, reply=False)
