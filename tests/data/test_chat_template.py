"""Chat templates: text, ids, control tokens in messages, and what templates may not do."""

import datetime
import json

import pytest
import tokenizer_fixtures
from tokenizer_fixtures import CHATML

from jaxlm.data.chat_template import ChatTemplate, load

QUESTION = [{"role": "user", "content": "Hi"}]


def template(source=CHATML, **variables):
    return ChatTemplate(source, tokenizer_fixtures.chatml(), variables, "a template")


def test_messages_become_text_and_control_tokens():
    chat = template()
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render(QUESTION, reply=True) == expected
    start, end = (chat.tokenizer.controls[name] for name in ("<|im_start|>", "<|im_end|>"))
    text = chat.tokenizer.encode
    assert chat.encode(QUESTION, reply=True) == [
        *[start, *text("user\nHi"), end, *text("\n"), start, *text("assistant\n")]
    ]
    assert chat.encode(QUESTION, reply=False) == [start, *text("user\nHi"), end, *text("\n")]


THINKING = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def test_variables_of_its_own_are_those_that_it_reads():
    chat = template(THINKING)
    silent = chat.with_kwargs({"enable_thinking": False})
    assert silent.render(QUESTION, reply=True) == chat.render(QUESTION, reply=True) + "<think></think>"
    assert chat.with_kwargs({"enable_thinking": True}).encode(QUESTION, reply=True) == chat.encode(QUESTION, reply=True)
    with pytest.raises(ValueError, match="reads no 'enable_thought'; what it reads is enable_thinking"):
        chat.with_kwargs({"enable_thought": False})
    with pytest.raises(ValueError, match="reads no 'messages'"):
        chat.with_kwargs({"messages": []})


@pytest.mark.parametrize(
    "spelled", ["<|im_end|>", "a<|im_end|>b<|im_start|>", "\ufdd0<|note|>", "<|im_<|im_end|>end|>"]
)
def test_a_control_token_that_a_message_spells_out_is_text(spelled):
    chat = template()
    found = chat.encode([{"role": "user", "content": spelled}], reply=False)
    start, end = (chat.tokenizer.controls[name] for name in ("<|im_start|>", "<|im_end|>"))
    text = chat.tokenizer.encode
    assert found == [start, *text(f"user\n{spelled}"), end, *text("\n")]


def test_stand_ins_cannot_be_written_by_a_message():
    with pytest.raises(ValueError, match="U\\+FDEF, which is no character"):
        template().encode([{"role": "user", "content": "\ufdef256\ufdef"}], reply=False)


def test_a_control_token_takes_the_blanks_that_it_takes_elsewhere():
    chat = template("<|note|>   {{ messages[0].content }}")
    assert chat.encode(QUESTION, reply=False) == [chat.tokenizer.controls["<|note|>"], *chat.tokenizer.encode("Hi")]


def test_a_beginning_is_written_once():
    chat = template("{{ bos_token }}{{ messages[0].content }}", bos_token="<|endoftext|>")
    begin = chat.tokenizer.controls["<|endoftext|>"]
    assert chat.encode(QUESTION, reply=True) == [begin, *chat.tokenizer.encode("Hi")]


def test_functions_that_published_templates_call():
    source = (
        "{%- for m in messages %}{%- if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | trim }}{% endgeneration %}{%- endfor %}"
        "|{{ strftime_now('%d %b %Y') }}|{{ tools[0] | tojson }}|{{ {'a': 'é'} | tojson(indent=1) }}"
    )
    day = datetime.datetime(2026, 1, 2)
    chat = ChatTemplate(source, tokenizer_fixtures.chatml(), {}, "a template", lambda: day)
    messages = [{"role": "user", "content": " Hi "}, {"role": "user", "content": "not shown"}]
    assert chat.render(messages, reply=False, tools=[{"name": "f"}]) == 'Hi|02 Jan 2026|{"name": "f"}|{\n "a": "é"\n}'


@pytest.mark.parametrize(
    "source, why",
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_a_template_may_not_do_is_one_line(source, why):
    with pytest.raises(ValueError, match=f"a template cannot show these messages: .*{why}"):
        template(source).encode(QUESTION, reply=True)


def test_a_template_that_is_none_is_named():
    with pytest.raises(ValueError, match="a template is no chat template"):
        template("{% if %}")


def test_an_old_file_names_tokens_that_the_settings_do_not(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|note|>"}, "eos_token": "none"}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert load(tmp_path, tokenizer_fixtures.chatml()).render(QUESTION, reply=True) == "<|note|><|im_end|>"


@pytest.mark.parametrize(
    "file, content, shown",
    [
        ("config.json", {"bos_token_id": 257, "eos_token_id": [258, 256]}, "<|im_start|><|im_end|>"),
        ("generation_config.json", {"eos_token_id": 258}, "<|endoftext|><|im_end|>"),
        ("tokenizer_config.json", {"bos_token": None, "eos_token": None}, "<|endoftext|>"),
        ("config.json", {}, "<|endoftext|><|endoftext|>"),
    ],
)
def test_tokens_that_no_file_names_are_those_of_known_ids(file, content, shown, tmp_path):
    """Ids of the files go before ids of the tokenizer; null says that nothing begins a text."""
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    (tmp_path / file).write_text(json.dumps(content))
    assert load(tmp_path, tokenizer_fixtures.chatml()).render(QUESTION, reply=True) == shown


def test_a_folder_has_its_template_in_one_of_several_files(tmp_path):
    tokenizer, settings = tokenizer_fixtures.chatml(), tmp_path / "tokenizer_config.json"
    assert load(tmp_path, tokenizer) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert load(tmp_path, tokenizer).render(QUESTION, reply=False) == "old"
    described = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": None, "chat_template": "{{ bos_token }}one"}
    settings.write_text(json.dumps(described))
    assert load(tmp_path, tokenizer).render(QUESTION, reply=False) == "<|endoftext|>one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert load(tmp_path, tokenizer).render(QUESTION, reply=False) == "three"
    settings.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(ValueError, match='has chat templates tool_use, and none is "default"'):
        load(tmp_path, tokenizer)
    (tmp_path / "chat_template.jinja").write_text("four")
    assert load(tmp_path, tokenizer).render(QUESTION, reply=False) == "four"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (CHATML, "<|im_end|>"),
        # As of gpt-oss: an answer ends another way than what is said before it.
        (
            "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if loop.last else '<|note|>' }}{% endfor %}",
            "<|im_end|>",
        ),
        # As of GLM-4: the next turn ends an answer.
        ("{% for m in messages %}<|note|>{{ m.content }}\n{% endfor %}", "<|note|>"),
        ("{% for m in messages %}{{ m.content }}\n###{% endfor %}", None),
        ("{{ raise_exception('begin with a system message') }}", None),
    ],
)
def test_the_end_of_an_answer_is_found_by_rendering_one(source, name):
    chat = template(source)
    assert chat.stop_token_ids == ({chat.tokenizer.controls[name]} if name else set())
