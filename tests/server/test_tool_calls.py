"""Calls of tools: each form is read as the templates of its family write it, however it is cut into pieces."""

import json
import random
from contextlib import contextmanager

import pytest
import tokenizer_fixtures
from openai import OpenAI
from serving import serving
from tokenizers import AddedToken

from jaxlm.data.chat_template import ChatTemplate
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.requests import Request
from jaxlm.server.tools import FORMATS, CallReader, CallsText, format_of

CITY = '{"city": "Zürich {1}"}'
WRITTEN = {
    "hermes": [
        (f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>', "", 1),
        ("I look.\n\n" + f'<tool_call>{{"name": "weather", "arguments": {CITY}}}</tool_call>\n' * 2, "I look.", 2),
    ],
    "mistral": [
        (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {CITY}}}, {{"name": "time", "arguments": {{}}}}]', "", 2),
        (f"I look. [TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]time[ARGS]{{}}", "I look.", 2),
        (f"[TOOL_CALLS]weather[CALL_ID]abc123DEF[ARGS]{CITY}", "", 1),
    ],
    "deepseek": [
        (
            "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            f"{CITY}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{{}}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "I look.",
            2,
        ),
        (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            1,
        ),
    ],
    "llama3": [
        (f'{{"name": "weather", "parameters": {CITY}}}', "", 1),
        (f' <|python_tag|>{{"name": "weather", "parameters": {CITY}}}; {{"name": "time", "parameters": {{}}}}', "", 2),
    ],
}
CASES = [(form, *case) for form, cases in WRITTEN.items() for case in cases]


def tokenizer(controls):
    """Make a tokenizer of bytes that has the marks of a form as control tokens, or as text."""
    base = tokenizer_fixtures.chatml()
    if controls:
        base._backend.add_special_tokens([AddedToken(name, special=True) for name in controls])
    return Tokenizer(base._backend)


def encoded(text, tokenizer):
    """Return the ids of a text in which names of control tokens are these tokens."""
    ids = []
    while text:
        name = next((name for name in tokenizer.controls if text.startswith(name)), None)
        ids += [tokenizer.controls[name]] if name else tokenizer.encode(text[0])
        text = text[len(name or text[0]) :]
    return ids


@pytest.mark.parametrize("as_controls", [False, True])
@pytest.mark.parametrize(("name", "text", "said", "count"), CASES)
def test_calls_are_read_as_they_are_written(name, text, said, count, as_controls):
    """Row 36: each once and whole, whether its marks are control tokens or text."""
    form = FORMATS[name]
    marks = [mark for mark in (form.start, form.end, *form.controls, *form.dropped) if mark]
    with_marks = tokenizer(marks if as_controls else [])
    answer = CallsText(with_marks, Request([1], 9), form, ("weather", "time"))
    pieces = [answer.add(token) for token in encoded(text, with_marks)]
    pieces.append(answer.rest())
    calls = answer.taken()
    assert "".join(pieces) == said and len(calls) == count and answer.taken() == ()
    assert (calls[0].name, json.loads(calls[0].arguments)) == ("weather", json.loads(CITY))
    assert len({call.id for call in calls}) == count


@pytest.mark.parametrize(("name", "text", "said", "count"), CASES)
def test_pieces_do_not_matter(name, text, said, count):
    draw = random.Random(0)
    for _ in range(20):
        reader, calls, spoken, rest = CallReader(FORMATS[name], ("weather", "time")), [], "", text
        while rest:
            size = draw.randint(1, 9)
            more, found = reader.add(rest[:size])
            spoken, calls, rest = spoken + more, calls + found, rest[size:]
        more, found = reader.rest()
        assert spoken + more == said and len(calls + found) == count


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "An answer, <b>{plain}</b> [1]. ",
        '{"name": "other", "parameters": {}}',
        '<tool_call>{"name": "weather", "arguments"',
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        "<tool_call>{broken}</tool_call> and on",
        '[TOOL_CALLS][{"name": "weather", "arguments": "no JSON"}]',
        "[TOOL_CALLS]weather[ARGS]{broken",
        "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{broken}<｜tool▁call▁end｜>",
        "{ is a brace",
        " \n ",
    ],
)
def test_what_is_no_call_is_said(name, text):
    """Also a call of a function that there is not, and one that breaks off."""
    reader = CallReader(FORMATS[name], ("weather",))
    pieces, calls = zip(*[reader.add(letter) for letter in text], reader.rest(), strict=True)
    assert "".join(pieces) == text and not any(calls)


def test_a_template_says_the_form():
    assert format_of("{{ messages }} <tool_call></tool_call>") is None  # it shows no tools
    assert format_of("{% if tools %}") is None
    assert format_of("{% if tools %} <tool_call>{{ x }}</tool_call>") is FORMATS["hermes"]


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}{{ call.function.arguments.city }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")
]
QUESTION = {"role": "user", "content": "Is it warm?"}
ANSWER = "I look. " + "".join(
    f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
    for name, arguments in (("weather", CITY), ("time", "{}"))
)


@contextmanager
def written(engine, tokenizer, monkeypatch, text):
    """Serve an engine whose answers are this text."""
    tokens, step, places = tokenizer.encode(text), engine.step, {}

    def writes():
        events = []
        for event in step():
            at = places[event.id] = places.get(event.id, -1) + 1
            if at < len(tokens):
                events.append(event._replace(token=tokens[at], end="length" if event.end == "length" else None))
            elif at == len(tokens):
                engine.cancel(event.id)
                events.append(event._replace(token=None, end="stop"))
        return events

    monkeypatch.setattr(engine, "step", writes)
    template = ChatTemplate(TEMPLATE, tokenizer, {}, "chat_template.jinja")
    with (
        serving(engine, tokenizer, chat_template=template) as (_, url),
        OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client,
    ):

        def create(messages=(QUESTION,), **options):
            # What the engine itself draws ends no text.
            asked = {"tools": TOOLS, "logit_bias": {str(id): -100 for id in tokenizer.controls.values()}, **options}
            return client.chat.completions.create(model="tiny", messages=messages, **asked)

        yield create, template


def test_an_answer_calls(engine, tokenizer, monkeypatch):
    """With its whole text before; the conversation goes on with the calls and what they found."""
    with written(engine, tokenizer, monkeypatch, ANSWER) as (create, template):
        (choice,) = create().choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        calls = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["weather", "time"]
        assert json.loads(calls[0].function.arguments) == json.loads(CITY)
        found = [{"role": "tool", "tool_call_id": call.id, "content": "7 °C"} for call in calls]
        later = create([QUESTION, choice.message.model_dump(), *found], max_tokens=1)
        shown = [
            {
                "type": "function",
                "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments)},
            }
            for call in calls
        ]
        before = {"role": "assistant", "content": "I look.", "tool_calls": shown}
        ids = template.encode([QUESTION, before, *found], reply=True, tools=TOOLS)
        assert later.usage.prompt_tokens == len(ids)
        (one,) = create(parallel_tool_calls=False).choices
        assert [call.function.name for call in one.message.tool_calls] == ["weather"]
        assert one.finish_reason == "tool_calls"
        (plain,) = create(tool_choice="none").choices
        assert (plain.finish_reason, plain.message.content, plain.message.tool_calls) == ("stop", ANSWER, None)


def test_a_stream_has_each_call_once_and_whole(engine, tokenizer, monkeypatch):
    """Row 36."""
    with written(engine, tokenizer, monkeypatch, ANSWER) as (create, _):
        choices = [choice for chunk in create(stream=True, n=2) for choice in chunk.choices]
    for index in range(2):
        own = [choice for choice in choices if choice.index == index]
        calls = [call for choice in own for call in choice.delta.tool_calls or []]
        assert [(call.index, call.function.name) for call in calls] == [(0, "weather"), (1, "time")]
        assert [json.loads(call.function.arguments) for call in calls] == [json.loads(CITY), {}]
        assert "".join(choice.delta.content or "" for choice in own) == "I look."
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["tool_calls"]


def test_an_answer_may_call_nothing(engine, tokenizer, monkeypatch):
    with written(engine, tokenizer, monkeypatch, "It is <b>warm</b>. ") as (create, _):
        (choice,) = create().choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "It is <b>warm</b>. ")
    assert choice.message.tool_calls is None
