"""Speculation changes no text, not in a bit of what it is drawn from, and takes fewer steps."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from engine_fixtures import SMALL, check_pages
from matrices import sampled

from jaxlm import api
from jaxlm.core.errors import InputError
from jaxlm.inference import ngrams, paged_cache, ragged_step, speculation
from jaxlm.inference.acceptance import Acceptance, DraftWorth
from jaxlm.inference.draft_model import DraftModel
from jaxlm.inference.engine import Engine
from jaxlm.inference.grammar import Grammar, Grammars
from jaxlm.inference.requests import Request, Sampling
from jaxlm.inference.settings import Speculation
from jaxlm.models import tree
from jaxlm.models.views import RowRuns

STORIES = Path(__file__).parents[1] / "families" / "stories260K"
OPENINGS = ["Once upon a time", 'Lily said, "I love', "The dog and the cat", "One day, Tom saw a big ball. The big"]
NO = ngrams.NO_DRAFT
GRAMMARS = [
    Grammar("regex", r"( [A-Za-z]{1,8}){3,30}\."),
    Grammar(
        "json_schema",
        '{"type": "object", "properties": {"the name of the animal": {"type": "string"}, "is it happy": {"type": '
        '"boolean"}}, "required": ["the name of the animal", "is it happy"], "additionalProperties": false}',
    ),
]


def test_what_followed_the_last_occurrence_of_the_end_is_proposed():
    histories = [
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # the latest of equal length, and its period goes on
        ([7, 1, 2, 3, 5, 9, 2, 3, 6, 1, 2, 3], [5, 9, 2, 3]),  # three tokens before two
        ([1, 2, 3], [NO] * 4),
        ([5, 5], [5] * 4),
        ([5], [NO] * 4),
        ([0, 0, 4], [NO] * 4),  # what the array holds beyond is no token
    ]
    rows = np.zeros((len(histories), 16), np.int32)
    for row, (tokens, _) in zip(rows, histories, strict=True):
        row[: len(tokens)] = tokens
    lengths = np.array([len(tokens) for tokens, _ in histories])
    on_host, on_device = (
        ngrams.look_up(rows, lengths, 4),
        ngrams.look_up(jnp.asarray(rows), jnp.asarray(lengths), 4, jnp),
    )
    assert on_host.tolist() == on_device.tolist() == [drafts for _, drafts in histories]


def test_a_draft_is_accepted_where_it_is_drawn_after_accepted_ones():
    """Runs of 4, 1, 3 and 2 rows; the second run's token is none of the first, and the last begins at its limit."""
    draft = np.array([0, 1, 2, 3, 0, 0, 1, 2, 0, 1])
    read = np.array([5, 6, 7, 8, 1, 2, 3, 4, 5, 6])
    drawn = np.array([6, 7, 9, 8, 3, 9, 4, 4, 6, 6])
    is_read = np.array([True] * 8 + [False] * 2)
    found = speculation.accepted(*map(jnp.asarray, (read, is_read, draft, drawn)), 3)
    assert np.flatnonzero(found).tolist() == [0, 1, 2, 4, 5]
    assert np.flatnonzero(speculation.is_last(found, jnp.asarray(draft))).tolist() == [2, 4, 5]
    after = speculation.drafts_after(jnp.asarray([[6, 7, 8], [3, 4, NO]]), jnp.asarray([0, 0, 1, 1]), jnp.arange(4))
    assert after.tolist() == [6, 7, NO, NO]
    counts = speculation.count_drafts(jnp.zeros((10, 10), jnp.int32), jnp.asarray(read), jnp.asarray(draft), 3)
    assert [np.flatnonzero(row).tolist() for row in counts] == [
        *([], [6], [6, 7], [6, 7, 8]),
        *([], [], [3], [3, 4]),
        *([], [6]),
    ]
    assert set(counts.ravel().tolist()) == {0, 2}


def test_drafts_are_as_many_as_are_worth_their_rows():
    good, bad = Acceptance(), Acceptance()
    good.update(40, 0)
    bad.update(0, 40)
    assert good.share > 0.99 and bad.share < 0.01
    assert good.probabilities(2) == pytest.approx([good.share, good.share**2])
    fixed = DraftWorth([2, 8, 40], measures=False)
    assert good.drafts(4, fixed.of([good, bad], 4)) == 4 and bad.drafts(4, fixed.of([good, bad], 4)) == 0

    measured = DraftWorth([2, 8, 40], measures=True)
    for rows, seconds in ((8, 9.0), (8, 1.0), (40, 9.0), (40, 20.0)):  # the first of each may have compiled
        measured.note(rows, seconds)
    worth = measured.of([good] * 4, 4)
    assert sum(good.drafts(4, worth) for _ in range(4)) <= 4, "a step of 40 rows takes 20 times as long"
    measured = DraftWorth([2, 8, 40], measures=True)
    for rows in (8, 8, 40, 40):
        measured.note(rows, 1.0)
    assert good.drafts(4, measured.of([good] * 4, 4)) == 4, "rows are free"
    assert bad.drafts(4, measured.of([bad] * 4, 4)) == 0


@pytest.fixture(scope="module")
def whole():
    """A published model of five layers."""
    return api.load(STORIES, dtype="float32", workload="decode")


@pytest.fixture(scope="module")
def stories(whole):
    """The first two of its layers, which engines compile in half the time."""
    layers = jax.tree.map(lambda x: x[:2], whole.parameters["layers"])
    return SimpleNamespace(
        config=whole.config.model_copy(update={"num_layers": 2}),
        parameters={**whole.parameters, "layers": layers},
        tokenizer=whole.tokenizer,
    )


def engine_of(model, speculates=None, mesh=None, cache_bytes=None, draft=None):
    mesh = mesh or meshes.make()
    parameters = jax.device_put(model.parameters, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    settings = replace(SMALL, speculation=speculates and Speculation.parse(speculates), cache_bytes=cache_bytes)
    if draft is None and settings.speculation and not settings.looks_up:
        draft = DraftModel(model.config, parameters)
    return Engine(
        model.config,
        parameters,
        mesh,
        settings,
        draft=draft,
        stop_token_ids=model.tokenizer.stop_token_ids,
        grammars=Grammars(model.tokenizer, model.config.vocab_size),
    )


def asked(model, count, seed=0, most=40):
    """Return random requests of openings, with every option that a draw depends on, and some with a grammar."""
    draw = np.random.default_rng(seed)
    often = model.tokenizer.encode(" the")[-1]
    return [
        Request(
            model.tokenizer.encode_prompt(OPENINGS[i % len(OPENINGS)]),
            int(draw.integers(1, most)),
            Sampling(
                temperature=[0.0, 0.7, 1.5][i % 3],
                top_k=[None, 40][i % 2],
                top_p=[None, 0.9][i // 2 % 2],
                frequency_penalty=[0.0, 0.0, 0.5][i // 3 % 3],
                repetition_penalty=[1.0, 1.0, 1.0, 1.3][i // 2 % 4],
                logit_bias={often: -2.0} if i % 5 == 4 else None,
                logprobs=2 if i % 4 == 1 else None,
            ),
            stream=i,
            min_tokens=int(draw.integers(0, 3)),
            grammar=GRAMMARS[i % 7 - 5] if i % 7 >= 5 else None,
            hidden=True,
        )
        for i in range(count)
    ]


def served(engine, requests):
    """Return the tokens of each request with log-probabilities and what they were drawn from, and the steps."""
    ids = [engine.submit(request, seed=7) for request in requests]
    found, steps = {id: [] for id in ids}, 0
    while not engine.is_idle:
        events = engine.step()
        steps += engine._ahead is not None
        for event in events:
            assert event.error is None
            found[event.id].append((event.token, event.ended_by, event.end, event.hidden.tobytes()))
        check_pages(engine)
    assert not engine.pages_held
    return [found[id] for id in ids], steps


@pytest.fixture(scope="module")
def plain(stories):
    return served(engine_of(stories), asked(stories, 14))


@pytest.mark.parametrize("speculates", sampled(["ngram:3", "itself:3"], ["ngram:3"]))
def test_texts_are_the_same_in_fewer_steps(stories, plain, speculates, monkeypatch):
    monkeypatch.setattr(DraftWorth, "of", lambda *_: 0.3)  # whatever the times of this machine
    engine = engine_of(stories, speculates)
    found, steps = served(engine, asked(stories, 14))
    assert found == plain[0] and engine.accepted > 0
    assert steps <= plain[1] * (0.7 if speculates == "itself:3" else 1.0), "its own drafts are drawn"
    alone, _ = served(engine, asked(stories, 14)[4:5])
    assert alone == found[4:5]


def test_texts_are_the_same_where_pages_are_few_and_on_shards(stories, plain):
    """Drafts take no pages from other requests, and a preempted request is read again."""
    engine = engine_of(stories, "ngram:3", meshes.make(2), cache_bytes=120_000)
    assert served(engine, asked(stories, 14))[0] == plain[0]
    assert engine.runner.programs.shards == 2


def test_drafts_in_one_page_are_all_written_where_pages_are_scattered_whole(stories, plain, monkeypatch):
    """As on a TPU, which writes the pages of all rows at once."""
    monkeypatch.setattr(paged_cache, "target", SimpleNamespace(platform=lambda: "tpu"))
    monkeypatch.setattr(DraftWorth, "of", lambda *_: 0.3)
    engine = engine_of(stories, "itself:2")  # compiled for no other test
    found, _ = served(engine, asked(stories, 14)[:4])
    assert [[token[0] for token in text] for text in found] == [[token[0] for token in text] for text in plain[0][:4]]
    assert engine.accepted > 20
    before = paged_cache._before_in_page(jnp.array([3, 3, 3, 4, 4, 0, 0, 7]), jnp.array([5, 6, 7, 8, 9, -1, -1, 2]), 3)
    assert before.tolist() == [0, 1, 2, 0, 1, 0, 0, 0]


def test_rows_of_a_run_that_read_their_pages_together_are_the_same_to_the_bit(stories, plain, monkeypatch):
    """As where a kernel reads them, with runs that are cut where they are longer."""
    door = importlib.import_module("jaxlm.models.doors.paged_attention")
    together = []
    monkeypatch.setattr(door, "_reads_in_a_kernel", lambda query, *_: together.append(query.shape) or True)
    monkeypatch.setattr(DraftWorth, "of", lambda *_: 0.3)
    monkeypatch.setattr(ragged_step, "FEW_QUERIES", 3)
    found, _ = served(engine_of(stories, "itself:4"), asked(stories, 14)[:6])
    assert found == plain[0][:6] and together


def test_runs_hold_their_rows_in_order():
    """Runs of 1, 4 and 2 rows in pieces of 3, then padding; a row is found again in its place."""
    runs = RowRuns.of(jnp.asarray([0, 0, 1, 2, 3, 0, 1, 0, 0]), 5, 3)
    assert runs.row_GT.tolist()[:4] == [[0, 9, 9], [1, 2, 3], [4, 9, 9], [5, 6, 9]]
    rows = jnp.arange(1.0, 10)[:, None] * jnp.ones((1, 2))
    gathered = runs.gathered(rows)
    assert gathered.shape == (5, 3, 2) and not gathered[0, 1:].any() and gathered[1, :, 0].tolist() == [2, 3, 4]
    np.testing.assert_array_equal(runs.scattered(gathered)[:7], rows[:7])


@pytest.mark.exhaustive
@pytest.mark.parametrize("cache_bytes", [None, 600_000], ids=["roomy", "tight"])
@pytest.mark.parametrize("speculates", ["ngram:4", "itself:2"])
def test_five_hundred_random_requests_have_the_same_texts(whole, speculates, cache_bytes):
    requests = asked(whole, 500, seed=1, most=120)
    expected, _ = served(engine_of(whole), requests)
    double = cache_bytes and cache_bytes * (1 + (speculates == "itself:2"))
    assert served(engine_of(whole, speculates, cache_bytes=double), requests)[0] == expected


def test_another_model_may_draw_the_drafts():
    """A model of another vocabulary size and other layers, whose drafts are wrong and cost nothing but time."""
    mesh = meshes.make()
    model = model_fixtures.model(context_length=96, num_layers=1)
    other = model_fixtures.model(context_length=96, num_layers=2, vocab_size=model.vocab_size + 3)
    parameters, draft = tree.init(model, 0, mesh), DraftModel(other, tree.init(other, 1, mesh))
    requests = [Request([1, 2, 3], 12, Sampling(temperature=t), stream=n) for n, t in enumerate((0.0, 1.0))]
    texts = []
    for options in ({}, {"draft": draft}):
        speculates = Speculation("other", 2) if options else None
        engine = Engine(model, parameters, mesh, replace(SMALL, speculation=speculates), **options)
        texts.append(served(engine, [request._replace(hidden=True) for request in requests])[0])
    assert texts[0] == texts[1]


def test_what_cannot_be_speculated_is_refused():
    mesh = meshes.make()
    model = model_fixtures.model(context_length=96, num_layers=1)
    parameters = tree.init(model, 0, mesh)
    ngram, other = (replace(SMALL, speculation=Speculation(source, 2)) for source in ("ngram", "other"))
    short = model_fixtures.model(context_length=64, num_layers=1)
    draft, shorter = DraftModel(model, parameters), DraftModel(short, tree.init(short, 0, mesh))
    for settings, given, message in (
        (ngram, draft, "a draft model is given exactly where"),
        (other, None, "a draft model is given exactly where"),
        (other, shorter, "the draft model has a context of 64 tokens, and sequences have up to 96; give inference.con"),
    ):
        with pytest.raises(InputError, match=message):
            Engine(model, parameters, mesh, settings, draft=given)
    for text in ("ngram:0", "ngram:17", "ngram:x", ":3", ""):
        with pytest.raises(ValueError, match="must be ngram or a model, with :N for at most N drafts, from 1 to 16"):
            Speculation.parse(text)
    assert Speculation.parse("runs/small") == ("runs/small", 4) and Speculation.parse("hf:a/b:2") == ("hf:a/b", 2)
