"""Several steps of one dispatch change no text, not in a bit of its log-probabilities, and are fewer dispatches."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from engine_fixtures import SMALL, check_pages
from story_fixtures import shallow

from jaxlm import api
from jaxlm.core.errors import InputError
from jaxlm.inference.engine import Engine
from jaxlm.inference.grammar import Grammar, Grammars
from jaxlm.inference.programs import EnginePrograms
from jaxlm.inference.requests import Request, Sampling
from jaxlm.inference.settings import LOOK_UP, Speculation
from jaxlm.inference.step_shapes import steps_per_dispatch
from jaxlm.models import tree


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    folder = shallow(tmp_path_factory.mktemp("stories") / "shallow")
    return api.load(folder, dtype="float32", workload="decode")


def engine_of(model, steps, mesh=None, cache_bytes=None):
    mesh = mesh or meshes.make()
    parameters = jax.device_put(model.parameters, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    return Engine(
        model.config,
        parameters,
        mesh,
        replace(SMALL, steps_per_dispatch=steps, cache_bytes=cache_bytes),
        stop_token_ids=model.tokenizer.stop_token_ids,
        grammars=Grammars(model.tokenizer, model.config.vocab_size),
    )


def asked(model, count, most=60):
    """Return random requests with every option that a draw depends on; the last token of a draw ends some of them."""
    draw, text = np.random.default_rng(0), model.tokenizer.encode_prompt("Once upon a time there was a dog. The dog")
    often = model.tokenizer.encode(" the")[-1]
    return [
        Request(
            text[: int(draw.integers(2, len(text)))],
            int(draw.integers(1, most)),
            Sampling(
                temperature=[0.0, 0.7, 1.5][i % 3],
                top_k=[None, 40][i % 2],
                top_p=[None, 0.9][i // 2 % 2],
                frequency_penalty=[0.0, 0.0, 0.5][i // 3 % 3],
                logit_bias={often: -2.0} if i % 5 == 4 else None,
                logprobs=5,
            ),
            stream=i,
            stop_token_ids=frozenset({often} if i % 4 == 3 else ()),
            min_tokens=int(draw.integers(0, 3)),
            grammar=Grammar("regex", r"( [A-Za-z]{1,8}){1,3}\.") if i % 7 == 6 else None,
        )
        for i in range(count)
    ]


def served(engine, requests, cancelled=()):
    """Return the tokens of each request with their log-probabilities, and the dispatches; some are cancelled behind
    their tenth token."""
    ids = [engine.submit(request, seed=7) for request in requests]
    found, dispatches = {id: [] for id in ids}, 0
    while not engine.is_idle:
        dispatches += 1
        for event in engine.step():
            assert event.error is None
            found[event.id].append((event.token, event.ended_by, event.end))
        for id in (ids[i] for i in cancelled):
            if len(found[id]) >= 10:
                engine.cancel(id)
        check_pages(engine)
    assert not engine.pages_held
    return [found[id] for id in ids], dispatches


@pytest.fixture(scope="module")
def plain(stories):
    return served(engine_of(stories, 1), asked(stories, 14))


def test_texts_are_the_same_in_fewer_dispatches(stories, plain):
    engine = engine_of(stories, 4)
    found, dispatches = served(engine, asked(stories, 14))
    assert found == plain[0] and dispatches < plain[1], "one at a time only while some wait, read or have grammars"
    alone, dispatches = served(engine, asked(stories, 14)[:1])
    assert alone == plain[0][:1] and dispatches < 0.5 * len(alone[0])
    ended, _ = served(engine, asked(stories, 14), cancelled=(1, 2, 8))
    for i, (text, whole) in enumerate(zip(ended, plain[0], strict=True)):
        assert text == whole[: len(text)] and (len(text) == len(whole) or i in (1, 2, 8))


@pytest.mark.exhaustive
def test_texts_are_the_same_where_pages_are_few_and_on_shards(stories, plain):
    """Steps take no pages from other requests, and a preempted request is read again."""
    engine = engine_of(stories, 8, meshes.make(2))
    assert served(engine, asked(stories, 14))[0] == plain[0] and engine.runner.programs.shards == 2
    engine = engine_of(stories, 8, cache_bytes=45_000)
    long = [request._replace(max_tokens=100, grammar=None) for request in asked(stories, 8)]
    assert served(engine, long)[0] == served(engine_of(stories, 1), long)[0] and engine.preemptions


@pytest.mark.exhaustive
def test_windows_and_states_go_on_from_step_to_step():
    """Layers with a window whose pages are freed as it moves, and layers with a state of each sequence."""
    mesh, model = meshes.make(), model_fixtures.model({**model_fixtures.MIXED, "num_layers": 4}, context_length=160)
    parameters = tree.init(model, 0, mesh)
    requests = [Request([*range(1, 4 + n)], 120, Sampling(temperature=n % 2, logprobs=3)) for n in range(3)]
    texts = []
    for steps in (1, 8):
        engine = Engine(model, parameters, mesh, replace(SMALL, steps_per_dispatch=steps))
        texts.append(served(engine, requests))
    assert texts[0][0] == texts[1][0] and texts[1][1] < 0.25 * texts[0][1]


def test_a_dispatch_takes_about_twenty_milliseconds_at_most():
    assert [steps_per_dispatch(1e6, rows, "cpu") for rows in (1, 8, 64, 512)] == [8, 8, 1, 1]
    assert steps_per_dispatch(5e8, 1, "cpu") == 1, "GPT-2 124M in float32 takes longer on a CPU"
    assert [steps_per_dispatch(size, 1, "gpu") for size in (1.2e9, 6e9, 16e9)] == [8, 2, 1]


def test_several_steps_and_drafts_are_refused_together():
    model = model_fixtures.model(context_length=96, num_layers=1)
    settings = replace(SMALL, steps_per_dispatch=4, speculation=Speculation(LOOK_UP, 2))
    with pytest.raises(InputError, match="steps_per_dispatch = 4 is of steps without drafts"):
        EnginePrograms.of(model, meshes.make(), jnp.dtype("float32"), settings)
