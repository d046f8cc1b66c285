"""Texts that are held to a grammar: they fit it, and are the same alone, beside others and interrupted."""

import json
import re
import sys
from collections import defaultdict
from dataclasses import replace

import jsonschema
import meshes
import model_fixtures
import numpy as np
import pytest
import schemas
import tokenizer_fixtures
from engine_fixtures import SMALL, check_pages
from matrices import sampled

from jaxlm.core.errors import InputError
from jaxlm.inference import grammar as grammars
from jaxlm.inference.acceptance import DraftWorth
from jaxlm.inference.engine import Engine
from jaxlm.inference.grammar import Grammar, GrammarError, Grammars, json_rule
from jaxlm.inference.requests import Request, Sampling
from jaxlm.inference.settings import Speculation
from jaxlm.models import tree
from jaxlm.server.formats import StructuredOutputs

# Tokens across the borders of a grammar's parts, and parts of characters.
MERGES = [("{", '"'), ('"', ":"), ('"', ","), ('"', "}"), ("}", "}"), ("0", "0"), ("t", "r"), ("tr", "u"), ("Ã", "©")]
VOCABULARY = 275  # more ids than tokens
CONTEXT = 352
PAGES = 12  # one more than a sequence of the whole context needs: too few for eight texts
# Texts without a grammar, of five pages each.
WORDY = [Request([9, stream] * 10, 120, stream=stream, ignores_stop_tokens=True) for stream in range(4)]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_fixtures.chatml(*MERGES)


@pytest.fixture(scope="module")
def make(tokenizer):
    model = model_fixtures.model(vocab_size=VOCABULARY, num_layers=1, context_length=CONTEXT)

    def make(sizes=(), **settings):
        mesh = meshes.make(*sizes)
        return Engine(
            model,
            tree.init(model, 0, mesh),
            mesh,
            replace(SMALL, **settings),
            valid_token_mask=tokenizer.valid_token_mask(VOCABULARY),
            stop_token_ids=tokenizer.stop_token_ids,
            grammars=Grammars(tokenizer, VOCABULARY),
        )

    return make


@pytest.fixture(scope="module")
def roomy(make):
    return make()


@pytest.fixture(scope="module")
def narrow(make, roomy):
    """An engine with pages for few texts: it interrupts others."""
    (page,) = roomy.runner.programs.page_bytes
    return make(cache_bytes=PAGES * page)


@pytest.fixture(scope="module")
def biases(tokenizer):
    """Biases to what ends the parts of a text, by which a text of random weights soon ends."""
    return {tokenizer.encode(text)[0]: 4.0 for text in ['"', "}", "]", ",", '",', '"}', "}}"]}


def optional(count):
    """Return the schema of an object with so many optional properties."""
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def regex(pattern, max_tokens=30, sampling=Sampling(), **options):
    return Request([1, 2, 3], max_tokens, sampling, grammar=Grammar("regex", pattern), **options)


def of_schema(seed, biases, temperature=0.7):
    """Return a request for a value of a schema, which takes several pages with its prompt."""
    prompt = np.random.default_rng(seed).integers(0, 256, 10 + seed % 20).tolist()
    grammar = Grammar("json_schema", json.dumps(schemas.make(seed)))
    return Request(prompt, 300, Sampling(temperature, logit_bias=biases), stream=seed, grammar=grammar)


def drawn(engine, asked, seed=5):
    """Return of each request its tokens, the id that ended it, and why it ended."""
    ids = [engine.submit(request, seed=seed) for request in asked]
    tokens, ends = defaultdict(list), {}
    for event in engine.run():
        if event.token is not None:
            tokens[event.id].append(event.token)
        if event.end:
            ends[event.id] = event.ended_by, event.end if event.error is None else str(event.error)
    check_pages(engine)
    assert not engine.pages_held
    return [(tokens[id], *ends[id]) for id in ids]


def text_of(tokenizer, tokens):
    return b"".join(tokenizer.bytes_of(token.id) for token in tokens)


PARTS = [(part, temperature, room) for part in range(10) for temperature in (0.0, 0.7, 1.5) for room in (True, False)]


@pytest.mark.parametrize("case", sampled(PARTS, ["(0, 0.7, True)", "(1, 1.5, False)", "(2, 0.0, False)"]), ids=str)
def test_texts_are_json_of_their_schemas(case, roomy, narrow, tokenizer, biases):
    part, temperature, has_room = case
    engine, seeds = roomy if has_room else narrow, range(10 * part, 10 * part + 10)
    before = engine.preemptions
    found = drawn(engine, [*WORDY, *(of_schema(seed, biases, temperature) for seed in seeds)])[len(WORDY) :]
    assert (engine.preemptions > before) != has_room
    reasons = [end for _, _, end in found]
    assert set(reasons) <= {"stop", "length"} and reasons.count("stop") >= 7  # the likeliest tokens may go round
    for seed, (tokens, _, end) in zip(seeds, found, strict=True):
        if end == "stop":
            value = json.loads(text_of(tokenizer, tokens))
            jsonschema.Draft202012Validator(schemas.make(seed)).validate(value)


def test_a_text_is_the_same_alone_beside_others_and_interrupted(roomy, narrow, biases):
    """As it is beside texts without a grammar, which are as if nothing stood beside them too, to the bit."""
    held = [of_schema(seed, biases) for seed in range(8)]
    free = [request._replace(sampling=Sampling(0.9, logprobs=3)) for request in WORDY]
    held = [request._replace(sampling=request.sampling._replace(logprobs=2)) for request in held]
    alone = [drawn(roomy, [request])[0] for request in (*held, *free)]
    assert drawn(roomy, [*held, *free]) == alone
    before = narrow.preemptions
    assert drawn(narrow, [*free, *held]) == [*alone[8:], *alone[:8]]
    assert narrow.preemptions > before


def test_shards_of_devices_draw_the_same(make, roomy, biases):
    """Each draws for sequences of its own, by masks of these."""
    asked = [*(of_schema(seed, biases) for seed in range(5)), *WORDY[:2]]
    assert drawn(make(sizes=(2,)), asked) == drawn(roomy, asked)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize(
    "pattern", [r"[a-f]{3,9}-[0-9]{2}", "(ja|nein|vielleicht)", "^é{1,5}[^\\x00-\\x7f]{2}$", r"([0-9]\.){0,4}x"]
)
def test_texts_match_their_expression(pattern, temperature, roomy, tokenizer):
    asked = [regex(pattern, 40, Sampling(temperature), stream=stream) for stream in range(6)]
    ended = [text_of(tokenizer, tokens).decode() for tokens, _, end in drawn(roomy, asked) if end == "stop"]
    assert all(re.fullmatch(pattern, text) for text in ended)
    assert ended or temperature == 0.0


def test_texts_are_of_their_lark_grammar(roomy, tokenizer):
    control = tokenizer.controls["<|note|>"]
    rules = f'start: "[" sum "]" <[{control}]> {json_rule({"type": "boolean"})}\nsum: NUMBER ("+" NUMBER)~1..2\n'
    grammar = Grammar("lark", rules + "NUMBER: /[1-9]{1,3}/\n")
    for tokens, _, end in drawn(roomy, [Request([7], 60, stream=s, grammar=grammar) for s in range(6)]):
        assert end == "stop"
        assert re.fullmatch(
            r"\[[1-9]{1,3}(\+[1-9]{1,3}){1,2}\]<\|note\|>(true|false)", text_of(tokenizer, tokens).decode()
        )


def test_any_object_is_json(roomy, tokenizer, biases):
    asked = Request([1], 200, Sampling(logit_bias=biases), grammar=Grammar("json_object"))
    found = drawn(roomy, [asked._replace(stream=stream) for stream in range(6)])
    values = [json.loads(text_of(tokenizer, tokens)) for tokens, _, end in found if end == "stop"]
    assert values and all(isinstance(value, dict) for value in values)


def test_an_id_ends_a_text_only_where_it_fits(roomy, tokenizer):
    """However likely it is. Where nothing else may follow, no id is needed."""
    (end,) = tokenizer.stop_token_ids
    hurried = Sampling(logit_bias={end: 100.0})
    ((tokens, ended_by, reason),) = drawn(roomy, [regex("ab*", sampling=hurried)])
    assert (text_of(tokenizer, tokens), ended_by, reason) == (b"a", end, "stop")
    ((tokens, ended_by, reason),) = drawn(roomy, [regex("ab*", sampling=hurried, ignores_stop_tokens=True)])
    assert (text_of(tokenizer, tokens), ended_by, reason) == (b"a" + 29 * b"b", None, "length")
    ((tokens, ended_by, reason),) = drawn(roomy, [regex("ab{3}", sampling=hurried)])
    assert (text_of(tokenizer, tokens), ended_by, reason) == (b"abbb", None, "stop")
    (c,) = tokenizer.encode("c")
    ((tokens, ended_by, reason),) = drawn(
        roomy, [regex("[ab]c*", sampling=Sampling(logit_bias={c: 100.0}), stop_token_ids=[c])]
    )
    assert len(tokens) == 1 and (ended_by, reason) == (c, "stop")


def test_lengths_keep_their_meaning(roomy, tokenizer):
    ((tokens, _, reason),) = drawn(roomy, [regex("ab{9}", 4)])
    assert (text_of(tokenizer, tokens), reason) == (b"abbb", "length")
    ((tokens, _, reason),) = drawn(roomy, [regex("ab{3}", 4)])
    assert (text_of(tokenizer, tokens), reason) == (b"abbb", "stop")  # whole, though no more could come
    (end,) = tokenizer.stop_token_ids
    hurried = Sampling(logit_bias={end: 100.0})
    ((tokens, ended_by, _),) = drawn(roomy, [regex("ab*", sampling=hurried, min_tokens=5)])
    assert (text_of(tokenizer, tokens), ended_by) == (b"abbbb", end)


def test_a_text_that_cannot_go_on_fails_alone(roomy, tokenizer):
    """A text that has ended too early, and one where all that may follow ends a text."""
    (b,) = tokenizer.encode("b")
    early, stuck, other = regex("ab{3}", min_tokens=6), regex("abc", stop_token_ids=[b]), Request([9], 12, stream=3)
    alone = drawn(roomy, [other])
    *failed, beside = drawn(roomy, [early, stuck, other])
    assert [beside] == alone
    assert [end for _, _, end in failed] == [
        "the grammar cannot be followed: its text has ended after 4 tokens, and min_tokens = 6",
        "the grammar cannot be followed: no token of the model may follow after 1 tokens",
    ]
    with pytest.raises(GrammarError, match="may follow after 0 tokens"):
        roomy.submit(regex("b", stop_token_ids=[b]))
    assert roomy.is_idle


def test_penalties_and_filters_keep_their_meaning(roomy, tokenizer):
    """A token that would be drawn again and again is drawn in turn with the others that may come."""
    penalised = Sampling(0.0, frequency_penalty=2.0)
    ((tokens, _, _),) = drawn(roomy, [regex("[abc]*", 30, penalised, ignores_stop_tokens=True)])
    counts = [text_of(tokenizer, tokens).count(letter) for letter in (b"a", b"b", b"c")]
    assert min(counts) >= 6
    ((likeliest, _, _),) = drawn(roomy, [regex("[abc]*", 30, Sampling(0.0), ignores_stop_tokens=True)])
    ((only, _, _),) = drawn(roomy, [regex("[abc]*", 30, Sampling(1.5, top_k=1), ignores_stop_tokens=True)])
    assert only == likeliest


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("regex", "("), "the ( has no )"),
        (Grammar("regex", "a(?=b)"), "look-around"),
        (Grammar("lark", 'start: ("a"'), "line 1, column 12: ) is missing here"),
        (
            Grammar("json_schema", json.dumps({"items": {"format": "foo"}})),
            'items: "format" is "foo", which is unknown',
        ),
        (Grammar("json_schema", "[]"), "the JSON schema is [], and should be an object such as"),
        (Grammar("json_schema", '{"pattern": "(?=a)b"}'), "at character 1 of '(?=a)b': there is no look-around"),
        (Grammar("regex", ""), "maybe the empty one"),
        (Grammar("regex", r"[^\s\S]"), "no text fits it"),
        (Grammar("lark", "start: x"), 'line 1, column 8: "x" is not defined'),
        (Grammar("json_schema", "{"), "the JSON schema is no JSON: expecting property name"),
        (Grammar("json_schema", '{"type": "objekt"}'), '"type" is "objekt", and may be one of array'),
        (Grammar("json_schema", '{"not": {"type": "null"}}'), 'held to "not"; leave "not" out'),
        (Grammar("json_schema", '{"$ref": "https://example.org/s"}'), "may name parts of the schema itself alone"),
        (
            Grammar("json_schema", '{"type": "array", "items":' * 300 + "{}" + "}" * 300),
            "nested too deeply; name parts of it in $defs",
        ),
        (Grammar("regex", "a" * 200_000), "of 200,000 bytes is longer than 2,048"),
        (Grammar("regex", "\ud83d"), "surrogates not allowed"),
        (Grammar("json_schema", json.dumps({"items": [optional(951)]})), "951 optional properties in a row, and a"),
        (Grammar("json_object", whitespace="("), "the ( has no )"),
    ],
    ids=str,
)
def test_a_grammar_that_cannot_be_used_is_refused_in_one_line(grammar, says, roomy):
    with pytest.raises(GrammarError) as refused:
        roomy.submit(Request([1], 5, grammar=grammar))
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert roomy.is_idle


def test_a_grammar_that_grows_too_large_fails_alone(roomy):
    """An expression of which each token makes more states, and objects of too many properties together."""
    other = Request([9], 12, stream=3)
    alone = drawn(roomy, [other])
    wide = Grammar("json_schema", json.dumps({"anyOf": [optional(900), optional(901)]}))
    long, wide = regex("([a-z]{1,1000}){500,1000}0", 300), regex("", 300)._replace(grammar=wide)
    first, second, beside = drawn(roomy, [long, wide, other])
    assert "too many expressions" in first[2] and "items; max is 4000" in second[2] and [beside] == alone


def test_a_text_draws_at_each_step_as_others_do(roomy):
    """It draws behind the reading of the draw before."""
    free, held = roomy.submit(Request([1], 20)), roomy.submit(regex("[ab]*", 40, ignores_stop_tokens=True))
    counts = {free: 0, held: 0}
    for _ in range(21):
        for event in roomy.step():
            counts[event.id] += 1
    assert counts == {free: 20, held: 20}
    roomy.cancel(held)
    assert not [event for event in roomy.run()]
    assert not roomy.pages_held


NAMED = {
    "type": "object",
    "properties": {
        "the_first_of_the_long_names": {"type": "boolean"},
        "the_second_of_the_long_names": {"type": "string", "maxLength": 9},
        "the_third_of_the_long_names": {"enum": ["a choice of words", "another choice of words", 7]},
    },
    "required": ["the_first_of_the_long_names", "the_second_of_the_long_names", "the_third_of_the_long_names"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def drafting(make):
    return make(speculation=Speculation("ngram", 4))


def test_what_a_grammar_forces_is_drawn_in_fewer_steps(drafting, roomy, monkeypatch):
    """And with what is looked up and drawn otherwise it is the same text, at every temperature."""
    grammar = Grammar("json_schema", json.dumps(NAMED))
    asked = [
        Request([1, 2], 150, Sampling(temperature, logprobs=1), stream=stream, grammar=grammar)
        for temperature in (0.0, 0.7, 1.5)
        for stream in range(2)
    ]
    monkeypatch.setattr(DraftWorth, "of", lambda *_: 0.3)  # whatever the times of this machine
    found, reads = {}, {}
    for name, engine in (("plain", roomy), ("drafting", drafting)):
        plans = []
        begin = engine.runner.begin
        monkeypatch.setattr(engine.runner, "begin", lambda plan, of=begin, plans=plans: plans.append(plan) or of(plan))
        found[name], reads[name] = drawn(engine, asked), len(plans)
    assert found["drafting"] == found["plain"]
    assert {end for _, _, end in found["plain"]} == {"stop"}
    assert reads["drafting"] < 0.5 * reads["plain"]
    assert drafting.accepted > 0.8 * drafting.drafted


def test_texts_without_a_grammar_do_not_wait_for_drafts_of_one(drafting, monkeypatch):
    monkeypatch.setattr(DraftWorth, "of", lambda *_: 0.3)
    free = drafting.submit(Request([1], 20))
    held = [drafting.submit(regex("(abcdefgh[xyz]){9}", 200, stream=stream)) for stream in range(2)]
    counts = dict.fromkeys((free, *held), 0)
    for _ in range(21):
        for event in drafting.step():
            counts[event.id] += 1
    assert counts[free] == 20, "a token in each step"
    assert all(counts[id] > 25 for id in held), "more than one in each of the steps that they take part in"
    for id in held:
        drafting.cancel(id)
    assert not [event for event in drafting.run()] and not drafting.pages_held


def allows(tokenizer, grammar, text):
    """Return whether a text is one of a grammar's."""
    held = Grammars(tokenizer, VOCABULARY)
    matcher = held.matcher(held.compile(grammar), [tokenizer.encode("\x00")[0]])
    for token in tokenizer.encode(text):
        if matcher.has_ended or not matcher.allowed_W[token // 32] >> token % 32 & 1:
            return False
        matcher.accept(token)
        assert not matcher.error
    return matcher.has_ended


def test_json_is_compact_unless_blanks_are_asked_for(tokenizer):
    """In schemas, in any object, and within other grammars."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {}}}, "additionalProperties": False}
    value = {"a": [1, {"b": None, "c": []}]}
    indented = json.dumps(value, indent=2)
    forms = [
        Grammar("json_object"),
        Grammar("json_schema", json.dumps(schema)),
        Grammar("lark", f"start: {json_rule(schema)}"),
    ]
    for form in forms:
        assert all(allows(tokenizer, form, text) for text in (json.dumps(value), json.dumps(value, separators=",:")))
        assert not any(allows(tokenizer, form, text) for text in (indented, '{"a":  []}', '{"a" :[]}', '{ "a":[]}'))
    assert all(allows(tokenizer, form._replace(whitespace="[ \n]{1,9}"), indented) for form in forms[:2])
    assert not allows(tokenizer, forms[0]._replace(whitespace="[ ]{1,2}"), indented)


def test_an_object_may_have_many_optional_properties(tokenizer):
    """Required ones divide them into runs."""
    whole = {**optional(950), "additionalProperties": False}
    assert allows(tokenizer, Grammar("json_schema", json.dumps(whole)), '{"p7":"","p8":"","p949":"x"}')
    divided = {**optional(1800), "required": ["p900"], "additionalProperties": False}
    assert allows(tokenizer, Grammar("json_schema", json.dumps(divided)), '{"p1":"","p900":"","p1799":"x"}')


def test_an_engine_without_a_tokenizer_takes_no_grammar(make):
    engine = make()
    engine.grammars = None
    with pytest.raises(InputError, match="has no tokenizer"):
        engine.submit(regex("a"))


def test_the_missing_library_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"needs the package llguidance: .*\[grammar\]"):
        Grammars(tokenizer, VOCABULARY).compile(Grammar("json_object"))


def test_few_compiled_grammars_are_kept(tokenizer, monkeypatch):
    compiled, of = [], grammars.CompiledGrammar.of
    monkeypatch.setattr(grammars, "_KEPT", 2)
    of_grammar = lambda grammar, *rest: compiled.append(grammar) or of(grammar, *rest)  # noqa: E731
    monkeypatch.setattr(grammars.CompiledGrammar, "of", of_grammar)
    known = Grammars(tokenizer, VOCABULARY)
    a, b, c = (Grammar("regex", letter) for letter in "abc")
    for grammar in (a, b, a, c, a, b):
        known.compile(grammar)
    assert compiled == [a, b, c, b]


@pytest.mark.parametrize("size", [260, 287, 288, 289, 320])
def test_the_ids_of_any_vocabulary_have_their_bits(size):
    """Also where the library's own end would begin another word."""
    tokenizer = tokenizer_fixtures.chatml()
    held = Grammars(tokenizer, size)
    matcher = held.matcher(held.compile(Grammar("regex", "[ab]c?")), tokenizer.stop_token_ids)

    def allowed():
        assert matcher.allowed_W.dtype == np.uint32 and len(matcher.allowed_W) == -(-size // 32)
        return set(np.flatnonzero(np.unpackbits(matcher.allowed_W.view(np.uint8), bitorder="little")).tolist())

    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    assert allowed() == {a, b}
    matcher.accept(b)
    assert allowed() == {c, *tokenizer.stop_token_ids} and not matcher.has_ended
    matcher.accept(c)
    assert matcher.has_ended


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (tokenizer_fixtures.chatml(*MERGES), '{"é": 00, "tru": "🙂"}'),
        (tokenizer_fixtures.llama2(), " the moon, é 🙂"),
        (tokenizer_fixtures.dropping("ab"), " aa b a"),
        (tokenizer_fixtures.wordpiece("the model"), " the model"),
    ],
)
def test_a_tokens_bytes_are_those_of_its_text(tokenizer, text):
    """A text that the grammar leaves no choice about is the text that the tokens give."""
    held = Grammars(tokenizer, tokenizer.vocab_size)
    matcher = held.matcher(held.compile(Grammar("lark", f"start: {json.dumps(text)} /x?/")))
    content = b""
    while content != text.encode():
        bits = np.unpackbits(matcher.allowed_W.view(np.uint8), bitorder="little")
        token = int(np.flatnonzero(bits)[-1])
        content += tokenizer.bytes_of(token)
        matcher.accept(token)
        assert text.encode().startswith(content) and not matcher.error


def test_an_id_without_a_token_is_never_allowed(tokenizer):
    """A model may have rows for more ids than its tokenizer has tokens; no text of tokens has one."""
    held = Grammars(tokenizer, tokenizer.vocab_size + 8)
    for _ in range(2):  # also where it is known that the grammar cannot be used
        with pytest.raises(GrammarError, match="no text of this model's tokens fits it"):
            held.compile(Grammar("lark", f"start: <[{tokenizer.vocab_size + 3}]>"))


def test_one_of_very_many_choices_can_be_followed(tokenizer):
    held = Grammars(tokenizer, VOCABULARY)
    choices = [f"a{n}" for n in range(2500)]
    matcher = held.matcher(held.compile(StructuredOutputs(choice=choices).held))
    for token in tokenizer.encode("a249"):
        matcher.accept(token)
    assert matcher.error is None and not matcher.has_ended
