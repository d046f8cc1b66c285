"""Grammars of answers: what they let a model write is read as calls, thoughts and text of the form."""

import json

import jsonschema
import numpy as np
import pytest
import tokenizer_fixtures
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.grammar import Grammar, Grammars, json_rule
from jaxlm.server.answers import harmony
from jaxlm.server.answers.answer_formats import HarmonyForm, PlainForm
from jaxlm.server.answers.call_formats import FORMATS
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
ARGUMENTS = {name: json_rule(schema) for name, schema in SCHEMAS.items()}
HELD = [name for name, form in FORMATS.items() if form.closing is not None]


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


def read(form, text, prompt_end=""):
    reader = form.reader(SCHEMAS, prompt_end)
    parts = [reader.add(text), reader.rest()]
    calls = [call for part in parts for call in part.calls]
    return "".join(part.said for part in parts), "".join(part.thought for part in parts), calls


def check_calls(calls):
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("has_controls", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_what_follows_the_beginning_of_a_call_is_calls(name, has_controls):
    form = PlainForm(FORMATS[name], None)
    tokenizer = tokenizer_of(form.calls.marks if has_controls else ())
    counts = []
    for seed, (chosen, parallel) in enumerate([(None, True), (None, True), (None, False), ("weather", True)]):
        rules = form.grammar_behind_opening(chosen, ARGUMENTS, tokenizer.controls, parallel)
        text, has_ended = written(tokenizer, Grammar("lark", rules), seed)
        said, _, calls = read(form, form.opening(chosen, "") + text)
        if has_ended:
            check_calls(calls)
            assert calls and not said and (chosen is None or calls[0].name == chosen)
            assert len(calls) == 1 or (parallel and chosen is None)
            counts.append(len(calls))
    assert counts


@pytest.mark.parametrize("has_controls", [False, True])
@pytest.mark.parametrize("name", ["hermes", "deepseek", "mistral", "llama3"])
def test_an_answer_thinks_and_says_or_calls(name, has_controls):
    """From any point on: before a thought or within it, with any text or one of a form."""
    thoughts = THOUGHTS["think"]
    form = PlainForm(FORMATS[name], thoughts)
    tokenizer = tokenizer_of({*form.calls.marks, thoughts.start, thoughts.end} if has_controls else ())
    opening = form.calls.opening[0]
    trigger = [mark for mark in (*form.calls.dropped, form.calls.start) if mark and mark in opening] or [opening]
    for prompt_end, said in (("", None), (f"{thoughts.start}\n", None), ("", "@text"), (thoughts.start, "@text")):
        rules = form.grammar(said, ARGUMENTS, tokenizer.controls, prompt_end, True)
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


def test_messages_in_channels_have_a_grammar():
    """Its marks are control tokens: others could stand in a text."""
    tokenizer, form = tokenizer_of(harmony.MARKS), HarmonyForm()
    assert form.grammar(None, ARGUMENTS, {}, "", True) is None
    thinks = ["<|channel|>", "analysis", "<|message|>", "so", "<|end|>", "<|start|>"]
    rules = form.grammar("@text", {}, tokenizer.controls, "", True)
    final = *thinks, "<|channel|>", "final", "<|message|>", "xyzzy"
    text, has_ended = written(tokenizer, Grammar("regex", "[xyz]{5}", rules), 0, final)
    assert has_ended and read(form, text) == ("xyzzy", "so", [])
    rules = form.grammar(None, ARGUMENTS, tokenizer.controls, "", True)
    call = *thinks, "<|channel|>", "commentary to=functions.", "time"
    text, has_ended = written(tokenizer, Grammar("lark", rules), 0, call)
    assert has_ended and [call.name for call in read(form, text)[2]] == ["time"]
    for chosen in (None, "weather"):
        rules = form.grammar_behind_opening(chosen, ARGUMENTS, tokenizer.controls, True)
        text, has_ended = written(tokenizer, Grammar("lark", rules), 1)
        said, _, calls = read(form, form.opening(chosen, "") + text)
        assert has_ended and len(calls) == 1 and not said
        check_calls(calls)
