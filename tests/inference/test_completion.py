"""Continuations in batches: each is what it is alone."""

import itertools
from dataclasses import replace

import meshes
import model_fixtures
import numpy as np
import pytest
import tokenizer_fixtures
from engine_fixtures import SMALL, WrittenEngine, drawn

from jaxlm.core.errors import InputError
from jaxlm.data.tokenizers import bytes_tokenizer
from jaxlm.inference.completion import Completer, Completion, TextChunk, completions, in_order
from jaxlm.inference.engine import Engine
from jaxlm.inference.requests import Request, Sampling, fitting_tokens, sampled
from jaxlm.models import tree

CONTEXT = 64


MODEL = model_fixtures.model(vocab_size=257, context_length=CONTEXT, num_layers=1)


def make(slots=8, tokenizer=None, valid_token_mask=None, model=MODEL):
    """Return a completer over an engine of its own, which draws no separator where it is not said what it draws."""
    tokenizer = tokenizer or bytes_tokenizer()
    mesh = meshes.make()
    settings = replace(SMALL, slots=slots)
    valid_token_mask = np.arange(model.vocab_size) < 256 if valid_token_mask is None else valid_token_mask
    engine = Engine(
        model,
        tree.init(model, 0, mesh),
        mesh,
        settings,
        valid_token_mask=valid_token_mask,
        stop_token_ids=tokenizer.stop_token_ids,
    )
    return Completer(engine, tokenizer)


@pytest.fixture(scope="module")
def completer():
    return make()


def complete(completer, requests, seed=0):
    return completions(completer(requests, seed), len(requests))


def test_each_is_what_it_is_alone(completer):
    greedy, drawn = Sampling(temperature=0.0), Sampling(temperature=0.7, top_k=5)
    requests = [
        Request([256, *b"ab"], 9, drawn, stream=5),
        Request([256, *b"a longer prompt that takes another length"], 9, greedy, stream=3),
        Request([256, *b"x"], 4, drawn, stream=9),
        Request([256], 9, drawn, stream=7),
        Request([256, *b"abc"], 9, greedy, stream=1),
    ]
    alone = [complete(completer, [request], 2)[0] for request in requests]
    assert complete(make(slots=2), requests[::-1], 2) == alone[::-1]
    assert [len(one.token_ids) for one in alone] == [9, 9, 4, 9, 9]
    assert all(one.finish_reason == "length" for one in alone)
    assert complete(completer, requests, 3) != alone


def test_rows_of_the_model_without_a_token_are_never_drawn(completer):
    """The likeliest ids of the model, beyond the tokens and between them."""
    asked = [Request([256, byte], 9, Sampling(t), stream=byte) for byte, t in zip(b"abcd", (0, 0, 1, 1), strict=True)]
    likeliest = {token for one in complete(completer, asked) for token in one.token_ids}
    valid_token_mask = np.ones(257, bool)
    valid_token_mask[list(likeliest)] = False
    drawn = {token for one in complete(make(valid_token_mask=valid_token_mask), asked) for token in one.token_ids}
    assert drawn and not drawn & likeliest


def test_samples_and_prompts_that_are_added_change_no_others(completer):
    def run(prompts, num_samples):
        texts = complete(completer, sampled(MODEL, prompts, [6] * len(prompts), num_samples, Sampling(), ()))
        return [tuple(texts[at : at + num_samples]) for at in range(0, len(texts), num_samples)]

    few, many = run([[256, 1]], 2), run([[256, 1], [256, 2]], 3)
    assert many[0][:2] == few[0]
    assert len({one.token_ids for row in many for one in row}) == 6


def test_penalties_count_prompts_and_what_was_drawn():
    """Step by step, as logits of the whole sequence and their definition give it; other rows have no penalties."""
    model = model_fixtures.model(num_layers=1)
    parameters, (graph, _) = tree.init(model, 0, meshes.make()), tree.abstract(model)
    how = Sampling(0.0, repetition_penalty=1.7, presence_penalty=0.2, frequency_penalty=0.4, logit_bias={9: 0.3})
    prompts, options = [[3, 1, 4, 1, 5], [2, 2, 7, 0, 7]], [how, Sampling(0.0)]
    found = drawn(model, parameters, prompts, 10, sampling=options)
    for ids, prompt, option in zip(found, prompts, options, strict=True):
        sequence = [*prompt, *ids]
        logits = np.array(model_fixtures.full_logits(graph, parameters, sequence))
        for at in range(len(prompt), len(sequence)):
            counts = np.bincount(sequence[len(prompt) : at], minlength=model.vocab_size)
            changed, seen, by = logits[at - 1], sorted({*sequence[:at]}), option.repetition_penalty
            changed[seen] = np.where(changed[seen] > 0, changed[seen] / by, changed[seen] * by)
            changed -= option.frequency_penalty * counts + option.presence_penalty * (counts > 0)
            changed[9] += (option.logit_bias or {}).get(9, 0.0)
            assert sequence[at] == changed.argmax()
    plain = drawn(model, parameters, prompts, 10, sampling=Sampling(0.0))
    assert found[0] != plain[0] and found[1] == plain[1]


def test_the_whole_context_can_be_used():
    model = model_fixtures.model(model_fixtures.GPT2, num_layers=1)
    parameters, (graph, _) = tree.init(model, 0, meshes.make()), tree.abstract(model)
    for given, follow in ((30, 3), (32, 1)):
        (ids,) = drawn(model, parameters, [[1] * given], follow, sampling=Sampling(0.0))
        assert len(ids) == follow
        read = [1] * given + ids[:-1]
        assert len(read) == model_fixtures.CONTEXT
        assert ids[-1] == int(np.argmax(model_fixtures.full_logits(graph, parameters, read)[-1]))


def test_a_stop_ends_its_own_row_alone():
    """A stop is found where it begins in one token and ends in another, and the first blank stays."""
    tokenizer = tokenizer_fixtures.llama2()
    prompt = tokenizer.encode("the model")
    following = tokenizer.encode("the model goes on 😀 here")[len(prompt) :]
    stops = {(): " goes on 😀 here", ("on 😀",): " goes ", (" go",): "", ("never", "😀 h"): " goes on ", ("e x",): ...}
    completer = Completer(WrittenEngine(lambda _: following), tokenizer)
    texts = complete(completer, [Request(prompt, len(following), stop=stop) for stop in stops])
    expected = [" goes on 😀 here" if text is ... else text for text in stops.values()]
    assert [one.text for one in texts] == expected
    assert [one.finish_reason for one in texts] == ["length", "stop", "stop", "stop", "length"]
    assert texts[0].token_ids == tuple(following)
    assert all(one.token_ids == tuple(following[: len(one.token_ids)]) for one in texts)
    assert len(texts[2].token_ids) < len(texts[1].token_ids) < len(texts[3].token_ids) < len(following)


def test_a_separator_ends_a_continuation_without_it():
    engine = WrittenEngine(lambda request: [66, 256, 66] if request.stream else [65] * 3, [256])
    texts = complete(Completer(engine, bytes_tokenizer()), [Request([1], 3, stream=1), Request([1], 3)])
    assert texts == [Completion("B", (66,), "stop"), Completion("AAA", (65, 65, 65), "length")]


def test_texts_that_are_read_in_turns_are_their_own_and_one_left_alone_ends(completer):
    """Two are drawn by one engine; each is asked for when its reader wants it."""
    asked = [Request([256, *b"ab"], 9, stream=1), Request([256, *b"cd"], 9, stream=2), Request([256], 9, stream=3)]
    whole = [list(completer([request])) for request in asked]
    first, second, third = (completer([request]) for request in asked)
    next(third)
    pieces = [piece for pair in zip(first, second, strict=True) for piece in pair]
    assert [pieces[::2], pieces[1::2]] == whole[:2]
    third.close()
    engine = completer._engine
    assert engine.step() == [] and engine.is_idle and not engine.pages_held


def test_pieces_come_row_by_row():
    a, b = (
        [TextChunk(0, 1, "a"), TextChunk(0, None, "", "stop")],
        [TextChunk(1, 2, "b"), TextChunk(1, None, "", "length")],
    )
    for order in set(itertools.permutations("aabb")):
        left = {"a": iter(a), "b": iter(b)}
        assert [*in_order(next(left[row]) for row in order)] == [*a, *b]
    assert next(in_order(iter(a + b))) == a[0]  # at once


def test_a_prompt_that_cannot_be_continued_is_named():
    model = MODEL
    with pytest.raises(InputError, match="^prompt 2: a prompt of 65 tokens exceeds model.context_length = 64"):
        sampled(model, [[1], [1] * 65], [4, 4], 1, Sampling(), ())
    with pytest.raises(InputError, match="^the prompt is empty"):
        sampled(model, [[]], [4], 1, Sampling(), ())
    with pytest.raises(InputError, match=r"^--num-samples 0 must be from 1 to 65,535"):
        sampled(model, [[1]], [4], 0, Sampling(), (), lambda field: f"--{field.replace('_', '-')}")
    assert [fitting_tokens(model, given, 10) for given in (1, 60, 80)] == [10, 5, 1]
