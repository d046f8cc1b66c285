"""Continuations in batches: each is what it is alone."""

import itertools

import meshes
import model_fixtures
import numpy as np
import pytest
import tokenizer_fixtures

from jaxlm.core.errors import InputError
from jaxlm.data.tokenizers import bytes_tokenizer
from jaxlm.inference import generate
from jaxlm.inference.completion import Completer, Completion, Piece, completions, in_order
from jaxlm.inference.requests import Request, Sampling, answer_tokens, fitting_tokens, sampled
from jaxlm.models import tree

CONTEXT = 64


@pytest.fixture(scope="module")
def completer():
    model = model_fixtures.model(vocab_size=257, context_length=CONTEXT)
    parameters = tree.init(model, 0, meshes.make())
    return lambda batch, tokenizer=None: Completer(
        model, parameters, tokenizer or bytes_tokenizer(), batch, meshes.make()
    )


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
    alone = [complete(completer(1), [request], 2)[0] for request in requests]
    assert complete(completer(3), requests[::-1], 2) == alone[::-1]
    assert [len(one.token_ids) for one in alone] == [9, 9, 4, 9, 9]
    assert all(one.finish_reason == "length" for one in alone)
    assert complete(completer(3), requests, 3) != alone


def test_rows_of_the_model_without_a_token_are_never_drawn(completer, monkeypatch):
    """The likeliest ids of the model, beyond the tokens and between them. They cost no other program."""
    asked = [Request([256, byte], 9, Sampling(t), stream=byte) for byte, t in zip(b"abcd", (0, 0, 1, 1), strict=True)]
    likeliest = {token for one in complete(completer(4), asked) for token in one.token_ids}
    tokenizer, known = bytes_tokenizer(), np.ones(257, bool)
    known[list(likeliest)] = False
    monkeypatch.setattr(tokenizer, "known", lambda size: known)
    compiled = generate.programs.cache_info().misses
    drawn = {token for one in complete(completer(4, tokenizer), asked) for token in one.token_ids}
    assert drawn and not drawn & likeliest and generate.programs.cache_info().misses == compiled


def test_samples_and_prompts_that_are_added_change_no_others(completer):
    model = completer(1)._model

    def run(prompts, num_samples):
        texts = complete(completer(4), sampled(model, prompts, [6] * len(prompts), num_samples, Sampling(), ()))
        return [tuple(texts[at : at + num_samples]) for at in range(0, len(texts), num_samples)]

    few, many = run([[256, 1]], 2), run([[256, 1], [256, 2]], 3)
    assert many[0][:2] == few[0]
    assert len({one.token_ids for row in many for one in row}) == 6


def test_few_programs_serve_many_prompts(completer, monkeypatch):
    shapes, original = set(), generate.programs

    def watched(model, batch, size, *rest):
        shapes.add((batch, size))
        return original(model, batch, size, *rest)

    monkeypatch.setattr(generate, "programs", watched)
    complete(completer(4), [Request([256] * n, 5) for n in range(1, 31)])
    assert len(shapes) == 2  # 30 prompts are seven batches of four and one of two


def test_a_stop_ends_its_own_row_alone(completer, monkeypatch):
    """A stop is found where it begins in one token and ends in another, and the first blank stays."""
    tokenizer = tokenizer_fixtures.llama2()
    prompt = tokenizer.encode("the model")
    following = tokenizer.encode("the model goes on 😀 here")[len(prompt) :]
    monkeypatch.setattr(
        generate, "generate", lambda _, __, prompts, *_2, **_3: (np.full(len(prompts), t) for t in following)
    )
    stops = {(): " goes on 😀 here", ("on 😀",): " goes ", (" go",): "", ("never", "😀 h"): " goes on ", ("e x",): ...}
    texts = complete(completer(8, tokenizer), [Request(prompt, len(following), stop=stop) for stop in stops])
    expected = [" goes on 😀 here" if text is ... else text for text in stops.values()]
    assert [one.text for one in texts] == expected
    assert [one.finish_reason for one in texts] == ["length", "stop", "stop", "stop", "length"]
    assert texts[0].token_ids == tuple(following)
    assert all(one.token_ids == tuple(following[: len(one.token_ids)]) for one in texts)
    assert len(texts[2].token_ids) < len(texts[1].token_ids) < len(texts[3].token_ids) < len(following)


def test_a_separator_ends_a_continuation_without_it(completer, monkeypatch):
    monkeypatch.setattr(generate, "generate", lambda *_, **__: (np.array([t, 65]) for t in (66, 256, 66)))
    texts = complete(completer(2), [Request([1], 3), Request([1], 3)])
    assert texts == [Completion("B", (66,), "stop"), Completion("AAA", (65, 65, 65), "length")]


def test_pieces_come_row_by_row():
    a, b = [Piece(0, 1, "a"), Piece(0, None, "", "stop")], [Piece(1, 2, "b"), Piece(1, None, "", "length")]
    for order in set(itertools.permutations("aabb")):
        left = {"a": iter(a), "b": iter(b)}
        assert [*in_order(next(left[row]) for row in order)] == [*a, *b]
    assert next(in_order(iter(a + b))) == a[0]  # at once


def test_a_prompt_that_cannot_be_continued_is_named(completer):
    model = completer(1)._model
    with pytest.raises(InputError, match="^prompt 2: a prompt of 65 tokens exceeds model.context_length = 64"):
        sampled(model, [[1], [1] * 65], [4, 4], 1, Sampling(), ())
    with pytest.raises(InputError, match="^the prompt is empty"):
        sampled(model, [[]], [4], 1, Sampling(), ())
    with pytest.raises(InputError, match=r"^--num-samples 0 must be from 1 to 65,535"):
        sampled(model, [[1]], [4], 0, Sampling(), (), lambda field: f"--{field.replace('_', '-')}")
    limits = [fitting_tokens(model, given, 10) for given in (1, 60)]
    assert limits == [10, 5]
    assert [answer_tokens(model, given, 10) for given in (1, 60, 80)] == [10, 4, 1]
