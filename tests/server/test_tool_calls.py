"""Calls of tools and thoughts: each form is read as the templates of its family write it, however it is cut."""

import json
import random
from contextlib import contextmanager
from functools import partial

import pytest
import tokenizer_fixtures
from call_templates import CALLS, HARMONY, template_of
from openai import BadRequestError, OpenAI
from serving import serving
from tokenizers import AddedToken

from jaxlm.core.json_text import json_value
from jaxlm.data.chat_template import ChatTemplate
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.generation import Token
from jaxlm.inference.requests import Request
from jaxlm.server.answers.answer_formats import HarmonyForm, PlainForm, form_of
from jaxlm.server.answers.call_formats import FORMATS
from jaxlm.server.answers.call_syntax import typed
from jaxlm.server.answers.reasoning import THOUGHTS
from jaxlm.server.answers.text import AnswerText, with_controls

pytestmark = pytest.mark.xdist_group("server")

CITY = '{"city": "Zürich {1}"}'
WRITTEN = {
    "hermes": [
        (f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>', "", 1),
        ("I look.\n\n" + f'<tool_call>{{"name": "weather", "arguments": {CITY}}}</tool_call>\n' * 2, "I look.", 2),
    ],
    "mistral-list": [
        (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {CITY}}}, {{"name": "time", "arguments": {{}}}}]', "", 2),
    ],
    "mistral": [
        (f"I look. [TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]time[ARGS]{{}}", "I look.", 2),
        (f"[TOOL_CALLS]weather[CALL_ID]abc123DEF[ARGS]{CITY}", "", 1),
    ],
    "deepseek-v3": [
        (
            "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            f"{CITY}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{{}}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "I look.",
            2,
        ),
    ],
    "deepseek": [
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
HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions."
WRITTEN_IN_CHANNELS = [
    (f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{CITY}<|call|>", "", "", 1),
    (f"<|channel|>analysis<|message|>I look.<|end|>{HARMONY_CALL}weather json<|message|>{CITY}", "", "I look.", 1),
    (
        f"<|channel|>commentary<|message|>I look.<|end|>{HARMONY_CALL}weather<|message|>{CITY}<|call|>"
        f"{HARMONY_CALL}time<|message|>{{}}",
        *("I look.", "", 2),
    ),
    (f" to=functions.weather<|channel|>commentary json<|message|>{CITY}<|call|>", "", "", 1),
    (
        "<|channel|>analysis<|message|>I know.<|end|><|start|>assistant<|channel|>final<|message|>7 °C",
        "7 °C",
        "I know.",
        0,
    ),
    ("<|channel|>analysis<|message|>It breaks", "", "It breaks", 0),
    (f"{HARMONY_CALL}other<|message|>{CITY}<|call|>", CITY, "", 0),
    (f"{HARMONY_CALL}weather<|message|>{{broken<|call|>", "{broken", "", 0),
    ("no channel", "no channel", "", 0),
]
HERMES = PlainForm(FORMATS["hermes"], THOUGHTS["think"])
CASES = [
    *[(PlainForm(FORMATS[form], None), text, said, "", n) for form, each in WRITTEN.items() for text, said, n in each],
    *[(HarmonyForm(), *case) for case in WRITTEN_IN_CHANNELS],
    (HERMES, f"<think>\nA <b>?\n</think>\n\n{WRITTEN['hermes'][0][0]}", "", "A <b>?", 1),
    (HERMES, "\n<think>\nA\n\nB\n</think>\n\nIt is <think> 7 °C.\n", "It is <think> 7 °C.\n", "A\n\nB", 0),
    (HERMES, "<think>A\n", "", "A\n", 0),
    (HERMES, "<th is no mark", "<th is no mark", "", 0),
    (HERMES, "<thin", "<thin", "", 0),
]
SCHEMAS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}, "time": None}


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


def read(form, text, sizes, prompt_end=""):
    """Return what is said and thought, and the calls, of a text in pieces of these sizes."""
    reader, parts = form.reader(SCHEMAS, prompt_end), []
    while text:
        size = next(sizes)
        parts.append(reader.add(text[:size]))
        text = text[size:]
    parts.append(reader.rest())
    said, thought, calls = zip(*parts, strict=True)
    return "".join(said), "".join(thought), [call for each in calls for call in each]


@pytest.mark.parametrize("as_controls", [False, True])
@pytest.mark.parametrize(("form", "text", "said", "thought", "count"), CASES)
def test_answers_are_read_as_they_are_written(form, text, said, thought, count, as_controls):
    """Row 36: each call once and whole, whether marks are control tokens or text."""
    with_marks = tokenizer(sorted(form.marks(SCHEMAS)) if as_controls else [])
    answer = AnswerText(with_marks, Request([1], 9), form, SCHEMAS)
    pieces = [answer.add(token) for token in encoded(text, with_marks)]
    pieces.append(answer.rest())
    thoughts, calls = answer.taken()
    assert ("".join(pieces), thoughts, len(calls)) == (said, thought, count) and answer.taken() == ("", ())
    if calls:
        assert (calls[0].name, json.loads(calls[0].arguments)) == ("weather", json.loads(CITY))
    assert len({call.id for call in calls}) == count


@pytest.mark.parametrize(("form", "text", "said", "thought", "count"), CASES)
def test_an_answer_goes_on_with_what_was_given(form, text, said, thought, count):
    """From any place on: what was given is in no text, and a call or a thought that it began is whole or goes on."""
    bare = tokenizer([])
    for cut in range(len(text) + 1):
        answer = AnswerText(bare, Request([1], 9), form, SCHEMAS, continued=text[:cut])
        rest = "".join(answer.add(token) for token in encoded(text[cut:], bare)) + answer.rest()
        thoughts, calls = answer.taken()
        assert said.endswith(rest) and thought.endswith(thoughts) and len(calls) <= count
        if not cut:
            assert (rest, thoughts, len(calls)) == (said, thought, count)
    assert (rest, thoughts) == ("", "")


@pytest.mark.parametrize(("form", "text", "said", "thought", "count"), CASES)
def test_pieces_do_not_matter(form, text, said, thought, count):
    draw = random.Random(0)
    for _ in range(20):
        found = read(form, text, iter(lambda: draw.randint(1, 9), None))
        assert (*found[:2], len(found[2])) == (said, thought, count)


@pytest.mark.parametrize("form", [PlainForm(form, None) for form in FORMATS.values()], ids=list(FORMATS))
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
def test_what_is_no_call_is_said(form, text):
    """Also a call of a function that there is not, and one that breaks off."""
    assert read(form, text, iter(lambda: 1, None)) == (text, "", [])


# What ends a call behind its arguments.
CLOSINGS = {
    "deepseek-v3": "\n```<｜tool▁call▁end｜>",
    "deepseek": "<｜tool▁call▁end｜>",
    "mistral": "",
    "mistral-list": "}]",
    "hermes": "}</tool_call>",
    "llama3": "}",
    "gpt-oss": "",
}


@pytest.mark.parametrize("name", CLOSINGS)
@pytest.mark.parametrize("prompt_end", ["assistant\n", "assistant\n<think>\n"])
def test_an_answer_that_begins_as_a_call_is_one(name, prompt_end):
    """Its function may be chosen or not; thoughts end before."""
    form = HarmonyForm() if name == "gpt-oss" else PlainForm(FORMATS[name], THOUGHTS["think"])
    chosen, any_of = form.opening("weather", prompt_end), form.opening(None, prompt_end)
    assert chosen.startswith(any_of) and any_of and "weather" in chosen
    said, _, (call,) = read(form, chosen + CITY + CLOSINGS[name], iter(lambda: 3, None), prompt_end)
    assert said == "" and (call.name, json.loads(call.arguments)) == ("weather", json.loads(CITY))


def test_thoughts_that_the_prompt_begins_are_read_to_their_end():
    form = PlainForm(None, THOUGHTS["think"])
    assert read(form, "A?\n</think>\n\nB", iter(lambda: 2, None), "<think>\n") == ("B", "A?", [])
    assert read(form, "B", iter(lambda: 2, None), "<think>\n\n</think>\n\n") == ("B", "", [])


def test_ours_becomes_control_tokens():
    with_marks = tokenizer(["<|channel|>"])
    expected = [with_marks.controls["<|channel|>"], *with_marks.encode("final")]
    assert with_controls(with_marks, "<|channel|>final") == expected


def chat_template(source, tokenizer=None):
    return ChatTemplate(source, tokenizer or tokenizer_fixtures.chatml(), {}, "chat_template.jinja")


@pytest.mark.parametrize("name", CALLS)
def test_a_template_says_its_form_by_the_call_that_it_shows(name):
    """Whatever it says of other forms."""
    source = "{% if false %}<tool_call></tool_call>[TOOL_CALLS][ARGS]{% endif %}" + template_of(CALLS[name])
    assert form_of(chat_template(source)) == PlainForm(FORMATS[name], None)


def test_a_template_in_no_known_form_shows_no_tools():
    assert form_of(chat_template("{{ messages }}")) is None
    unknown = template_of("<tool_call>{{ c.name }}: {{ c.arguments | tojson }}</tool_call>")
    assert form_of(chat_template(unknown)) is None
    assert form_of(chat_template(unknown + "<think></think>")) == PlainForm(None, THOUGHTS["think"])
    no_tools = template_of(CALLS["hermes"]).partition("{% endfor %}")[2]
    assert form_of(chat_template(no_tools)) is None
    assert form_of(chat_template(template_of(""))) is None
    hermes = template_of(CALLS["hermes"])
    assert form_of(chat_template(hermes + "<think></think>")) == HERMES
    assert form_of(chat_template(HARMONY)) == HarmonyForm()
    assert form_of(chat_template("{{ messages }}<|channel|>final<|message|>")) == HarmonyForm(shows_tools=False)


@pytest.mark.parametrize("before", ["", "<think>\n"])
def test_a_prompt_may_begin_a_thought_that_calls_of_the_history_do_not_have(before):
    source = template_of(CALLS["hermes"]).replace("assistant\n{% endif %}", f"assistant\n{before}{{% endif %}}")
    assert form_of(chat_template(source + "{% if false %}<think></think>{% endif %}")) == HERMES


# Values that hold marks, quotes, braces, and what else ends something somewhere.
VALUES = [
    *("</tool_call>", 'a "quoted" </tool_call> <tool_call>', "```\n", "[TOOL_CALLS]x[ARGS]{}", "<｜tool▁call▁end｜>"),
    *(
        "<|call|>",
        "</seed:tool_call>",
        "</TOOLCALL>]",
        "\\",
        '\\"',
        "{",
        "]};",
        "</think><think>",
        "\n two\nlines ",
        "",
    ),
    *("Zürich 🦩", "7", "true", "null", " indented ", "it's"),
]
TYPED = {
    **{"text": "string", "days": "integer", "degrees": "number", "is_warm": "boolean", "place": "object"},
    **{"hours": "array", "none": ["string", "null"]},
}
ARGUMENTS = {"days": 7, "degrees": 2.5, "is_warm": True, "place": {"a": ["</tool_call>", None]}, "hours": [1, "2"]}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", [*CALLS, "harmony"])
def test_a_call_is_read_as_the_template_shows_it(name, value):
    """Marks inside the strings of its arguments are parts of them; what is written bare gets its type by the schema."""
    template = chat_template(HARMONY if name == "harmony" else template_of(CALLS[name]))
    form, arguments = form_of(template), {"text": value, **ARGUMENTS, "none": None}
    call = {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    asked = template.render([QUESTION], reply=True)
    shown = template.render([QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}], reply=False)
    text = shown.removeprefix(asked).removesuffix("<|im_end|>\n")
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPED.items()}}
    for size in (1, 7, len(text)):
        reader = form.reader({"weather": schema}, asked)
        parts = [reader.add(text[at : at + size]) for at in range(0, len(text), size)] + [reader.rest()]
        (found,) = [call for each in parts for call in each.calls]
        assert "".join(each.said for each in parts) == ""
        assert (found.name, json.loads(found.arguments)) == ("weather", arguments)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "string"}, "7"),
        ("null", {"type": "string"}, "null"),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ("7", {"type": "integer"}, 7),
        ("7.0", {"type": "integer"}, 7),
        ("seven", {"type": "integer"}, "seven"),
        ("7.5", {"type": "integer"}, "7.5"),
        ("7", {"type": "number"}, 7),
        ("NaN", {"type": "number"}, "NaN"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("true", {"type": "number"}, "true"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{broken", {"type": "object"}, "{broken"),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("null", {"type": ["integer", "null"]}, None),
        ("None", {"type": "null"}, None),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "None"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5"),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"$ref": "#/$defs/Count"}, 2),
        ("2", {"$ref": "#/$defs/Loop"}, 2),
        ("2", {"type": "str"}, "2"),
        ("7", None, 7),
        ("seven", {}, "seven"),
        ("7", {"type": 5}, 7),
    ],
)
def test_a_bare_text_gets_the_type_of_its_schema(text, schema, value):
    root = {"$defs": {"Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}}
    found = typed(text, schema, root)
    assert (found, type(found)) == (value, type(value))


CODER = PlainForm(FORMATS["qwen3-coder"], None)
GLM = PlainForm(FORMATS["glm"], None)


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        (CODER, "<tool_call>\n<function=time>\n</function>\n</tool_call>", {}),
        (CODER, "<tool_call><function=time></function></tool_call>", {}),
        (CODER, "<tool_call>\n<function=time>\n<parameter=a>\n1\n</parameter>\n</function>", {"a": 1}),  # no end mark
        (
            CODER,
            "<tool_call>\n<function=time>\n<parameter=a>\nx\n<parameter=b>\n2\n</parameter>\n</function></tool_call>",
            {"a": "x", "b": 2},
        ),
        (
            CODER,
            "<tool_call><function=time><parameter=a></parameter>.</parameter></function></tool_call>",
            {"a": "</parameter>."},
        ),
        (GLM, "<tool_call>time\n</tool_call>", {}),
        (GLM, "<tool_call>time</tool_call>", {}),
        (GLM, "<tool_call>time<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", {"a": 1}),
        (GLM, "<tool_call>time\n<arg_key>a</arg_key>\n<arg_value>  x  </arg_value>\n</tool_call>", {"a": "  x  "}),
        (
            GLM,
            "<tool_call>time<arg_key>a</arg_key><arg_value></arg_value>.</arg_value></tool_call>",
            {"a": "</arg_value>."},
        ),
        (HERMES, '<tool_call>{"name": "time", "arguments": {"a": 1}}', {"a": 1}),
        (HERMES, '<tool_call>{"name": "time", "arguments": {"a": 1}}\n</tool', {"a": 1}),
        (HERMES, '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
    ],
)
def test_forms_are_read_as_models_vary_them(form, text, arguments):
    for size in (1, 5, len(text)):
        said, _, (call,) = read(form, text, iter(lambda size=size: size, None))
        assert (said, call.name, json.loads(call.arguments)) == ("", "time", arguments)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (CODER, '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'),
        (CODER, "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
        (CODER, "<tool_call>\n<function=time>\n<parameter=a>\n1\n</parameter>\n</tool_call>"),
        (CODER, "<tool_call>\n<function=time>\n<parameter=a>\n1\n</param"),
        (GLM, "<tool_call>time\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>"),  # others might have followed
        (GLM, "<tool_call>time\n<arg_key>a\n<arg_value>1</arg_value>\n</tool_call>"),
        (GLM, "<tool_call></tool_call>"),
        (GLM, "<tool_call> "),
        (HERMES, "<tool_call>\n<function=time>\n</function>\n</tool_call>"),
        (HERMES, '<tool_call>{"name": "time", "arguments": {"a": "it\'s 5" tall"}}</tool_call> and on'),
        (HERMES, '<tool_call>{"name": "time", "arguments": {"a": "b</tool_call> and on'),
    ],
)
def test_what_breaks_the_form_is_said(form, text):
    assert read(form, text, iter(lambda: 1, None)) == (text, "", [])


def test_broken_json_hides_no_call_behind_it():
    broken = '<tool_call>{"name": "time", "arguments": {"a": "it is 5" tall"}}</tool_call>'
    said, _, (call,) = read(HERMES, broken + WRITTEN["hermes"][0][0], iter(lambda: 3, None))
    assert said == broken and call.name == "weather"


NUMBERS = "NaN", "Infinity", "-Infinity", "1e999", "[-1e999]"


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_that_json_has_not_makes_no_call(number):
    """The text of what would be a call is said, for clients that read arguments as JSON."""
    text = f'<tool_call>{{"name": "time", "arguments": {{"a": {number}}}}}</tool_call>'
    assert read(HERMES, text, iter(lambda: 3, None)) == (text, "", [])
    in_channels = f'{HARMONY_CALL}time<|message|>{{"a": {number}}}<|call|>'
    assert read(HarmonyForm(), in_channels, iter(lambda: 3, None)) == (f'{{"a": {number}}}', "", [])
    written_bare = f"<tool_call>time<arg_key>a</arg_key><arg_value>{number}</arg_value></tool_call>"
    _, _, (call,) = read(GLM, written_bare, iter(lambda: 3, None))
    assert json_value(call.arguments) == {"a": number}


TEMPLATE = template_of(CALLS["hermes"])
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")
]
QUESTION = {"role": "user", "content": "Is it warm?"}
ANSWER = "I look. " + "".join(
    f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
    for name, arguments in (("weather", CITY), ("time", "{}"))
)


@contextmanager
def written(engine, tokenizer, monkeypatch, text, template=TEMPLATE):
    """Serve an engine whose answers are this text; what the engine itself draws is held to no grammar."""
    tokens, step, submit, places = tokenizer.encode(text), engine.step, engine.submit, {}

    def writes():
        events = []
        for event in step():
            at = places[event.id] = places.get(event.id, -1) + 1
            if at < len(tokens):
                events.append(event._replace(token=Token(tokens[at]), end="length" if event.end == "length" else None))
            elif at == len(tokens):
                engine.cancel(event.id)
                events.append(event._replace(token=None, end="stop"))
        return events

    monkeypatch.setattr(engine, "step", writes)
    monkeypatch.setattr(engine, "submit", lambda request, **options: submit(request._replace(grammar=None), **options))
    template = ChatTemplate(template, tokenizer, {}, "chat_template.jinja")
    with (
        serving(engine, tokenizer, chat_template=template) as (_, url),
        OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client,
    ):

        def create(messages=(QUESTION,), **options):
            # What the engine itself draws ends no text.
            asked = {"tools": TOOLS, "logit_bias": {str(id): -100 for id in tokenizer.controls.values()}, **options}
            return client.chat.completions.create(model="tiny", messages=messages, **asked)

        create.client = client
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


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_in_a_call_stays_its_escape(stream, engine, tokenizer, monkeypatch):
    """A text of UTF-8 cannot hold it; the client reads from the JSON what the model wrote. So do keys."""
    text = '<tool_call>{"name": "time", "arguments": {"hi \\ud83d": ["\\udc00", "\\ud83d\\ude00"]}}</tool_call>'
    with written(engine, tokenizer, monkeypatch, text) as (create, _):
        if stream:
            deltas = [each.delta for chunk in create(stream=True) for each in chunk.choices]
            (call,) = [call for delta in deltas for call in delta.tool_calls or []]
        else:
            (call,) = create().choices[0].message.tool_calls
    assert call.function.arguments == '{"hi \\ud83d": ["\\udc00", "😀"]}'


def test_calls_between_tags_are_asked_for_and_given(engine, tokenizer, monkeypatch):
    """Not as JSON, which stands between the same marks in another form."""
    text = "\n<function=weather>\n<parameter=days>\n7\n</parameter>\n</function>\n</tool_call>"
    parameters = {"type": "object", "properties": {"days": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    source = template_of(CALLS["qwen3-coder"])
    with written(engine, tokenizer, monkeypatch, text, source) as (create, template):
        answer = create(tools=tools, tool_choice="required")
        prompt = template.encode([QUESTION], reply=True, tools=tools)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"days": 7}')
    assert answer.usage.prompt_tokens == len(prompt) + len(tokenizer.encode("<tool_call>"))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_can_be_asked_for(choice, engine, tokenizer, monkeypatch):
    """The answer begins with one; which function it calls is drawn unless one is named."""
    start, before, after = FORMATS["hermes"].opening
    named = f"{before}weather{after}" if choice == "required" else ""
    with written(engine, tokenizer, monkeypatch, f"{named}{CITY}}}</tool_call>") as (create, template):
        whole = create(tool_choice=choice)
        chunks = [each for chunk in create(tool_choice=choice, stream=True) for each in chunk.choices]
        with pytest.raises(BadRequestError, match="no function 'other' is in tools"):
            create(tool_choice={"type": "function", "function": {"name": "other"}})
        with pytest.raises(BadRequestError, match="needs tools"):
            create(tool_choice="required", tools=[])
    (called,) = whole.choices[0].message.tool_calls
    assert (called.function.name, json.loads(called.function.arguments)) == ("weather", json.loads(CITY))
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (None, "tool_calls")
    (streamed,) = [call for each in chunks for call in each.delta.tool_calls or []]
    assert streamed.function.arguments == called.function.arguments
    begun = start if choice == "required" else f"{start}{before}weather{after}"
    prompt = template.encode([QUESTION], reply=True, tools=TOOLS)
    assert whole.usage.prompt_tokens == len(prompt) + len(tokenizer.encode(begun))


TEXTS_OF_RESPONSES = "reasoning_text", "output_text"
THINKING = "{% if false %}<think></think>{% endif %}" + TEMPLATE.replace(
    "{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}"
)


def test_what_is_thought_is_no_part_of_the_answer(engine, tokenizer, monkeypatch):
    """Chats and responses give it by itself, whole and as streams."""
    text = "<think>\nA warm day?\n</think>\n\nIt is."
    with written(engine, tokenizer, monkeypatch, text, THINKING) as (create, template):
        whole = create(tools=None)
        message = whole.choices[0].message
        chunks = [each for chunk in create(tools=None, stream=True) for each in chunk.choices]
        before = {"role": "assistant", "content": "It is.", "reasoning_content": "A warm day?"}
        later = create([QUESTION, message.model_dump(), QUESTION], tools=None, max_tokens=1)
        respond = partial(create.client.responses.create, model="tiny", input="Is it warm?", temperature=0)
        answer, events = respond(), list(respond(stream=True))
    assert (message.content, message.reasoning_content) == ("It is.", "A warm day?")
    drawn = len(tokenizer.encode(text)), len(tokenizer.encode("<think>\nA warm day?\n</think")) - len("<think")
    assert (whole.usage.completion_tokens, whole.usage.completion_tokens_details.reasoning_tokens) == drawn
    assert "".join(each.delta.content or "" for each in chunks) == "It is."
    assert "".join(getattr(each.delta, "reasoning_content", "") for each in chunks) == "A warm day?"
    assert later.usage.prompt_tokens == len(template.encode([QUESTION, before, QUESTION], reply=True))
    thought, said = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "A warm day?")
    assert (said.type, said.content[0].text) == ("message", "It is.")
    texts = {
        kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta") for kind in TEXTS_OF_RESPONSES
    }
    assert texts == {"reasoning_text": "A warm day?", "output_text": "It is."}
    assert [e.output_index for e in events if e.type == "response.output_item.done"] == [0, 1]
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]


def test_a_dial_of_thought_is_of_templates_that_read_it(engine, tokenizer, monkeypatch):
    template = THINKING + "{{ reasoning_effort }}"
    with written(engine, tokenizer, monkeypatch, "It is.", template) as (create, shown):
        low, high = (create(tools=None, reasoning_effort=effort).usage.prompt_tokens for effort in ("low", "minimal"))
    assert high - low == len("minimal") - len("low")
    with written(engine, tokenizer, monkeypatch, "It is.") as (create, _):
        with pytest.raises(BadRequestError, match="chat template does not read it"):
            create(tools=None, reasoning_effort="low")
        with pytest.raises(BadRequestError, match="shows no reasoning_content"):
            create([QUESTION, {"role": "assistant", "content": "It is.", "reasoning_content": "A warm day?"}])
