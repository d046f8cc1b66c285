"""Grammars of answers: what they let a model write is read as calls, thoughts and text of the form."""

import json
from collections import defaultdict

import jsonschema
import numpy as np
import pytest
import tokenizer_fixtures
from matrices import sampled
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.grammar import Grammar, GrammarError, Grammars
from jaxlm.server.answers import harmony
from jaxlm.server.answers.answer_formats import HarmonyForm, PlainForm
from jaxlm.server.answers.call_formats import FORMATS
from jaxlm.server.answers.call_syntax import types_of
from jaxlm.server.answers.reasoning import THOUGHTS

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "time": {"type": "object", "additionalProperties": False},
}
TAGGED = ("qwen3-coder", "seed-oss", "glm")
TYPES = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 4},
        "count": {"type": "integer", "minimum": 1, "maximum": 31},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
        "is_on": {"type": "boolean"},
        "unit": {"enum": ["C", "F", "</parameter>", "</arg_value>", "\n"]},
        "maybe": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 3}, {"type": "null"}]},
        "either": {"type": ["integer", "boolean", "string"], "maxLength": 4, "minimum": 3},
        "code": {"type": "string", "pattern": "^([A-C]{2}/|-)[0-9]$"},
        "found": {"type": "string", "pattern": "(a|b)c", "maxLength": 4},
        "mixed": {"$ref": "#/$defs/mixed"},
        "list": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "object": {"type": "object", "properties": {"a": {"$ref": "#/$defs/mixed"}}, "additionalProperties": False},
    },
    "required": ["text", "object"],
    "additionalProperties": False,
    "$defs": {"mixed": {"enum": [1, "1", True, None, "x"]}},
}


def tokenizer_of(marks):
    """Return a tokenizer in which these are control tokens."""
    backend = Backend.from_str(tokenizer_fixtures.chatml().to_json())
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(marks)])
    return Tokenizer(backend)


def written(tokenizer, grammar, seed, likely=(), most=300):
    """Return a text that is drawn from a grammar, with the names of control tokens, and whether it may end there.
    `likely` texts are drawn where they may be."""
    (end,) = tokenizer.stop_token_ids
    draw, tokens = np.random.default_rng(seed), []
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    matcher = grammars.matcher(grammars.compile(grammar), [end])
    controls, encode = tokenizer.controls, tokenizer.encode
    likely = [id for text in likely for id in ([controls[text]] if text in controls else encode(text))]
    while not matcher.has_ended and len(tokens) < most:
        bits = np.unpackbits(matcher.allowed_W.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: tokenizer.vocab_size])
        if end in allowed and draw.random() < 0.3 and not likely:
            return tokenizer.spelled_out(tokens), True
        texts = {int(id): tokenizer.bytes_of(id) for id in allowed if id != end}
        shown = {id: text for id, text in texts.items() if all(32 < byte < 127 for byte in text)} or texts
        closing = [id for id, text in shown.items() if text in (b'"', b"}", b"]", b",")]
        token = int(draw.choice(closing if closing and draw.random() < 0.5 else [*shown]))
        if likely and likely[0] in texts:
            token = likely.pop(0)
        tokens.append(token)
        matcher.accept(token)
        assert not matcher.error, tokenizer.spelled_out(tokens)
    return tokenizer.spelled_out(tokens), matcher.has_ended


def read(form, text, prompt_end="", schemas=SCHEMAS):
    reader = form.reader(schemas, prompt_end)
    parts = [reader.add(text), reader.rest()]
    calls = [call for part in parts for call in part.calls]
    return "".join(part.said for part in parts), "".join(part.thought for part in parts), calls


def check_calls(calls):
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("has_controls", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_follows_the_beginning_of_a_call_is_calls(name, has_controls):
    form = PlainForm(FORMATS[name], None)
    tokenizer = tokenizer_of(form.calls.marks if has_controls else ())
    counts = []
    for seed, (chosen, parallel) in enumerate([(None, True), (None, True), (None, False), ("weather", True)]):
        arguments = form.arguments(SCHEMAS, ())
        rules = form.grammar_behind_opening(chosen, arguments, tokenizer.controls, parallel)
        text, has_ended = written(tokenizer, Grammar("lark", rules), seed)
        said, _, calls = read(form, form.opening(chosen, "") + text)
        if has_ended:
            check_calls(calls)
            assert calls and not said and (chosen is None or calls[0].name == chosen)
            assert len(calls) == 1 or (parallel and chosen is None)
            counts.append(len(calls))
    assert counts


@pytest.mark.parametrize("has_controls", [False, True])
@pytest.mark.parametrize("name", ["hermes", "deepseek", "mistral", "llama3", "glm"])
def test_an_answer_thinks_and_says_or_calls(name, has_controls):
    """From any point on: before a thought or within it, with any text or one of a form."""
    thoughts = THOUGHTS["think"]
    form = PlainForm(FORMATS[name], thoughts)
    tokenizer = tokenizer_of({*form.calls.marks, thoughts.start, thoughts.end} if has_controls else ())
    opening = form.calls.opening[0]
    trigger = [mark for mark in (*form.calls.dropped, form.calls.start) if mark and mark in opening] or [opening]
    for prompt_end, said in (("", None), (f"{thoughts.start}\n", None), ("", "@text"), (thoughts.start, "@text")):
        rules = form.grammar(said, form.arguments(SCHEMAS, ()), tokenizer.controls, prompt_end, True)
        grammar = Grammar("lark", rules) if said is None else Grammar("regex", "[xyz]{5}", rules)
        thinks = [thoughts.start] * (not prompt_end) + ["so", thoughts.end]
        text, has_ended = written(tokenizer, grammar, 0, [*thinks, *trigger])
        answer, thought, calls = read(form, text, prompt_end)
        assert thought.startswith("so")
        if has_ended:
            check_calls(calls)
            assert calls and not answer
        text, has_ended = written(tokenizer, grammar, 1, [*thinks, "xyzzy"])
        answer, thought, calls = read(form, text, prompt_end)
        assert thought.startswith("so") and answer.startswith("xyzzy")
        assert said is None or (has_ended and answer == "xyzzy")
    rules = form.grammar("@text", {}, tokenizer.controls, "", True)
    text, has_ended = written(tokenizer, Grammar("regex", "[xyz]{5}", rules), 2, ["xyzzy"])
    assert (text, has_ended) == ("xyzzy", True)


def uniform(tokenizer, grammar, seed):
    """Yield 100 texts whose tokens are drawn uniformly from those that may come next."""
    grammars, draw = Grammars(tokenizer, tokenizer.vocab_size), np.random.default_rng(seed)
    compiled = grammars.compile(grammar)
    for _ in range(100):
        matcher, tokens = grammars.matcher(compiled), []
        while not matcher.has_ended:
            bits = np.unpackbits(matcher.allowed_W.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            tokens.append(int(allowed[draw.integers(len(allowed))]))
            matcher.accept(tokens[-1])
            assert not matcher.error
        yield tokenizer.spelled_out(tokens)


@pytest.mark.parametrize("name", sampled(TAGGED, ["glm"]))
def test_values_between_tags_are_those_of_their_types(name):
    """Each of 100 texts is read as a call with arguments of the schema, and each kind of value comes."""
    form, schemas = PlainForm(FORMATS[name], None), {"typed": TYPES, "bare": {"type": "object"}}
    tokenizer, values = tokenizer_fixtures.chatml(), defaultdict(set)
    rules = form.grammar_behind_opening("typed", form.arguments(schemas, ()), {}, False)
    for text in uniform(tokenizer, Grammar("lark", rules), 0):
        said, _, (call,) = read(form, form.opening("typed", "") + text, schemas=schemas)
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, TYPES)
        assert not said and call.name == "typed"
        for key, value in arguments.items():
            values[key].add(type(value).__name__)
    assert values.keys() == TYPES["properties"].keys()
    assert values["maybe"] == {"str"} | values["maybe"] & {"NoneType"}
    assert values["either"] == {"int", "str"} | values["either"] & {"bool"}
    assert values["mixed"] == {"int", "str", "NoneType"}


@pytest.mark.parametrize("name", TAGGED)
def test_tags_in_json_between_tags_end_nothing(name):
    """Nor does the mark behind a call in it."""
    form, schemas = PlainForm(FORMATS[name], None), {"f": {"type": "object", "properties": {"a": {"type": "array"}}}}
    tags, (opening, before, after) = form.calls.tags, form.calls.opening
    value = [f"{tags.behind_value}{form.calls.closing}{opening}", "'"]
    call = f"{before}f{after}{tags.before_key}a{tags.before_value}{json.dumps(value)}{tags.behind_value}"
    text = f"{opening}{call}{form.calls.closing} and more"
    reader = form.reader(schemas, "")
    parts = [*map(reader.add, text), reader.rest()]
    assert [json.loads(call.arguments) for part in parts for call in part.calls] == [{"a": value}]
    assert "".join(part.said for part in parts).strip() == "and more"


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"a": {"type": "string", "format": "date"}}, "'a': a text between tags cannot be held to 'format'"),
        ({"a\n": {}}, r"'a\\n' cannot stand in a tag"),
        ({"a": {"enum": ["</parameter>"]}}, "'a': no text between tags is read as one of its values"),
        ({"a": {"type": "string", "pattern": "^a|b$"}}, r"write the pattern '\^a\|b\$' as \^"),
    ],
)
def test_what_no_text_between_tags_can_be_is_refused(schema, says):
    """Unless the function is not strict: then its values are any texts."""
    form, schemas = PlainForm(FORMATS["qwen3-coder"], None), {"f": {"type": "object", "properties": schema}}
    with pytest.raises(GrammarError, match=says):
        form.arguments(schemas, ())
    tokenizer = tokenizer_fixtures.chatml()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    grammars.compile(Grammar("lark", form.grammar_behind_opening("f", form.arguments(schemas, ["f"]), {}, False)))


def test_references_to_each_other_are_followed_once():
    """However many there are, in the time of one."""
    again = [{"$ref": "#/$defs/a"}] * 12
    root = {"type": "object", "properties": {"x": again[0]}, "$defs": {"a": {"anyOf": [*again, {"type": "string"}]}}}
    assert types_of(again[0], root) == ["string"]
    form = PlainForm(FORMATS["glm"], None)
    assert "TEXT_0_0" in form.arguments({"f": root}, ())["f"].expression


def test_messages_in_channels_have_a_grammar():
    """Its marks are control tokens: others could stand in a text."""
    tokenizer, form = tokenizer_of(harmony.MARKS), HarmonyForm()
    arguments = form.arguments(SCHEMAS, ())
    assert form.grammar(None, arguments, {}, "", True) is None
    thinks = ["<|channel|>", "analysis", "<|message|>", "so", "<|end|>", "<|start|>"]
    rules = form.grammar("@text", {}, tokenizer.controls, "", True)
    final = *thinks, "<|channel|>", "final", "<|message|>", "xyzzy"
    text, has_ended = written(tokenizer, Grammar("regex", "[xyz]{5}", rules), 0, final)
    assert has_ended and read(form, text) == ("xyzzy", "so", [])
    rules = form.grammar(None, arguments, tokenizer.controls, "", True)
    call = *thinks, "<|channel|>", "commentary to=functions.", "time"
    text, has_ended = written(tokenizer, Grammar("lark", rules), 0, call)
    assert has_ended and [call.name for call in read(form, text)[2]] == ["time"]
    for chosen in (None, "weather"):
        rules = form.grammar_behind_opening(chosen, arguments, tokenizer.controls, True)
        text, has_ended = written(tokenizer, Grammar("lark", rules), 1)
        said, _, calls = read(form, form.opening(chosen, "") + text)
        assert has_ended and len(calls) == 1 and not said
        check_calls(calls)
