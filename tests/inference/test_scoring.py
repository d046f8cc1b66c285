"""Scores are sums of log-softmax of the logits, whatever else is in the batch, on any mesh."""

import itertools
import random
import string
from dataclasses import replace

import jax
import meshes
import model_fixtures
import numpy as np
import pytest
import tokenizer_fixtures
from engine_fixtures import SMALL, drawn
from matrices import sampled
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxlm.core.errors import InputError
from jaxlm.data.tokenizers import Tokenizer, bytes_tokenizer, characters_tokenizer
from jaxlm.inference.engine import Engine
from jaxlm.inference.requests import Sampling
from jaxlm.inference.scoring import Scorer, encode_pair
from jaxlm.models import tree

families = pytest.mark.parametrize("family", sampled(model_fixtures.FAMILIES, ["gpt2", "gemma"]))


def parts(family=model_fixtures.LLAMA, mesh=None, **changes):
    model = model_fixtures.model(family, **{"num_layers": 2, **changes})
    graph, _ = tree.abstract(model)
    return graph, model, tree.init(model, 0, mesh or meshes.make())


def scores(pairs, family=model_fixtures.LLAMA, mesh=None, settings=SMALL, **options):
    mesh = mesh or meshes.make()
    _, model, parameters = parts(family, mesh)
    found = dict(Scorer(Engine(model, parameters, mesh, settings, **options))(pairs))
    return [found[i] for i in range(len(pairs))]


def pairs(count=5, most=40):
    draw = np.random.default_rng(0)
    sizes = [(int(draw.integers(1, most)), int(draw.integers(1, 8))) for _ in range(count)]
    return [tuple(draw.integers(0, model_fixtures.VOCABULARY, n).tolist() for n in pair) for pair in sizes]


@families
def test_scores_are_sums_over_the_continuation_after_as_much_context_as_fits(family):
    asked = [*pairs(), ([1], [2] * model_fixtures.CONTEXT)]
    assert any(len(context) + len(rest) > model_fixtures.CONTEXT + 1 for context, rest in asked)
    graph, model, parameters = parts(family := model_fixtures.FAMILIES[family])
    for (context, continuation), score in zip(asked, scores(asked, family), strict=True):
        tokens = np.array([*context, *continuation])[-model.context_length - 1 :]
        logprobs = jax.nn.log_softmax(model_fixtures.full_logits(graph, parameters, tokens[:-1]))
        each = np.asarray(logprobs, np.float64)[np.arange(len(tokens) - 1), tokens[1:]]
        expected = each[-len(continuation) :].sum()  # which may lie beyond where float32 has steps of 1e-5
        # Two kernels for products of float32 differ by up to 4e-7 in each term, of up to ten.
        assert score.logprob == pytest.approx(expected, abs=max(1e-5, 1e-6 * len(continuation)))


def test_one_at_a_time_scores_as_many_do():
    """To the last bit, whatever else is scored and whatever the cache holds."""
    asked = pairs()
    assert [scores([pair])[0] for pair in asked[:3]] == scores(asked)[:3] == scores([*asked, *asked])[5:8]


def test_a_context_that_several_share_is_read_once():
    """Up to the page that holds the token before the first that is scored."""
    draw = np.random.default_rng(1)
    context = draw.integers(0, model_fixtures.VOCABULARY, 90).tolist()
    asked = [(context, [i, i + 1]) for i in range(4)]
    _, model, parameters = parts(context_length=160)
    engine = Engine(model, parameters, meshes.make(), SMALL)
    found = [dict(Scorer(engine)([pair]))[0] for pair in asked]
    assert engine.pages_cached == 2  # pages of 32 tokens
    cold = [dict(Scorer(Engine(model, parameters, meshes.make(), SMALL))([pair]))[0] for pair in asked[-1:]]
    assert cold == found[-1:]


def test_a_cache_too_small_for_all_scores_the_same():
    asked = pairs()
    small = replace(SMALL, context=model_fixtures.CONTEXT, cache_bytes=47_000)
    assert scores(asked, settings=small) == scores(asked)


def test_any_mesh_scores_the_same():
    asked = pairs()
    one, many = scores(asked), scores(asked, mesh=meshes.make(data=2, fsdp=2, tensor=2))
    np.testing.assert_allclose([s.logprob for s in many], [s.logprob for s in one], rtol=1e-5)


def test_what_greedy_decoding_gives_is_greedy():
    """Also where the model's likeliest ids have no tokens: none is drawn, and what is scored keeps its probability."""
    _, model, parameters = parts()

    def follows(valid_token_mask=None):
        (ids,) = drawn(model, parameters, [[3, 1, 4]], 6, sampling=Sampling(0.0), valid_token_mask=valid_token_mask)
        return ids

    likeliest, valid_token_mask = follows(), np.arange(model_fixtures.VOCABULARY) < 60
    valid_token_mask[likeliest[0]] = False
    ids = follows(valid_token_mask)
    assert valid_token_mask[ids].all() and likeliest[0] not in ids
    other = [*ids[:-1], next(i for i in range(60) if valid_token_mask[i] and i != ids[-1])]
    asked = [([3, 1, 4], ids), ([3, 1, 4], other)]
    assert [s.greedy for s in scores(asked, valid_token_mask=valid_token_mask)] == [True, False]
    assert [s.logprob for s in scores(asked, valid_token_mask=valid_token_mask)] == [s.logprob for s in scores(asked)]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([], [1]), "a context without tokens"),
        (([1], []), "a continuation without tokens"),
        (([1], [1] * 33), "33 tokens exceeds the context of 32"),
    ],
)
def test_what_cannot_be_scored_is_refused(pair, message):
    with pytest.raises(InputError, match=message):
        scores([([1], [2]), pair])


def unigram():
    """Pieces of several letters, which depend on the whole word."""
    pieces = ["<unk>", "</s>", "▁", *string.ascii_lowercase, "th", "the", "hey", "▁th", "▁the", "ey", "on", "one"]
    backend = Backend(models.Unigram([(piece, -8.0 - 1 / len(piece)) for piece in pieces], 0))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(backend)


def prefixed():
    """A byte-level tokenizer that puts a blank before a text."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "th"), ("Ġ", "the"), ("e", "y"), ("h", "e")]
    backend = Backend.from_str(tokenizer_fixtures.chatml(*merges).to_json())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return Tokenizer(backend)


MERGING = {
    "bytes": bytes_tokenizer,
    "characters": lambda: characters_tokenizer([f"{string.ascii_lowercase} "]),
    "byte-level": lambda: tokenizer_fixtures.chatml(("t", "h"), ("th", "e"), ("h", "e"), ("the", "y"), ("o", "n")),
    "byte-level after a blank": prefixed,
    "llama2": tokenizer_fixtures.llama2,
    "unigram": unigram,
    "wordpiece": lambda: tokenizer_fixtures.wordpiece("the mon y x"),
}


@pytest.mark.parametrize("kind", MERGING)
def test_continuations_follow_the_same_tokens_and_are_told_apart(kind):
    """Whatever merges with the context: two choices never share their ids, and none loses text or gains a blank."""
    tokenizer, draw = MERGING[kind](), random.Random(0)
    choices = ["e", "ey", "y", "eyth", "n", "one", " on", " the", "he", "th"]
    for context in (
        "th",
        "t",
        "o",
        "moth",
        "the th",
        "th ",
        "",
        *("".join(draw.choices("then o", k=6)) for _ in range(9)),
    ):
        if not context.strip() and kind == "characters":
            continue
        before = context.rstrip()
        found = [encode_pair(tokenizer, context, choice) for choice in choices]
        assert {tuple(ids) for ids, _ in found} == {tuple(tokenizer.encode_prompt(before))}
        for choice, (ids, following) in zip(choices, found, strict=True):
            whole = tokenizer.encode_prompt(context + choice)
            assert following and (whole == ids + following or whole[: len(ids)] != ids)
            assert tokenizer.decode(ids + following) == tokenizer.decode(whole)
        for (_, first), (_, second) in itertools.combinations(found, 2):
            assert first != second


def test_the_cut_does_not_count_ids():
    """The tokens of "the" and "thay" are as many as those of "th" and one more, and are others."""
    tokenizer = tokenizer_fixtures.chatml(("t", "h"), ("th", "e"), ("th", "a"))
    separator, th, e, a, y = tokenizer.separator, *(tokenizer.encode(text)[0] for text in ("th", "e", "a", "y"))
    found = [encode_pair(tokenizer, "th", choice) for choice in ("ey", "ay", "e")]
    assert found == [([separator, th], ids) for ids in ([e, y], [a, y], [e])]
