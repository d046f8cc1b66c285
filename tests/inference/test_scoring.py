"""Scores are sums of log-softmax of the logits, whatever else is in the batch, on any mesh."""

import chex
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from matrices import sampled

from jaxlm.core.errors import InputError
from jaxlm.inference import steps
from jaxlm.inference.generate import generate
from jaxlm.inference.requests import Sampling
from jaxlm.inference.scoring import Scorer, padded_length, token_logprobs
from jaxlm.models import tree

families = pytest.mark.parametrize("family", sampled(model_fixtures.FAMILIES, ["gpt2", "gemma"]))


def parts(family=model_fixtures.LLAMA, mesh=None):
    model = model_fixtures.model(family)
    graph, _ = tree.abstract(model)
    return graph, model, tree.init(model, 0, mesh or meshes.make())


def scores(pairs, batch=4, mesh=None, **options):
    mesh = mesh or meshes.make()
    found = dict(Scorer(*parts(mesh=mesh)[1:], batch, mesh, **options)(pairs))
    return [found[i] for i in range(len(pairs))]


def pairs(count=5, most=40):
    draw = np.random.default_rng(0)
    sizes = [(int(draw.integers(1, most)), int(draw.integers(1, 8))) for _ in range(count)]
    return [tuple(draw.integers(0, model_fixtures.VOCABULARY, n).tolist() for n in pair) for pair in sizes]


@families
def test_token_logprobs_are_log_softmax_and_argmax(family):
    graph, _, parameters = parts(model_fixtures.FAMILIES[family])
    tokens, targets = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (2, 3, 12), dtype=np.int32)
    logprobs, likeliest = jax.jit(lambda *x: token_logprobs(graph, *x))(parameters, tokens, targets, np.full(3, 12))
    chex.assert_type([logprobs, likeliest], [jnp.float32, jnp.bool_])
    for row in range(3):
        logits = model_fixtures.full_logits(graph, parameters, tokens[row])
        expected = jax.nn.log_softmax(logits)[jnp.arange(12), targets[row]]
        np.testing.assert_allclose(logprobs[row], expected, atol=1e-5)
        np.testing.assert_array_equal(likeliest[row], jnp.argmax(logits, axis=-1) == targets[row])


def test_scores_are_sums_over_the_continuation_after_as_much_context_as_fits():
    asked = pairs()
    assert any(len(context) + len(rest) > model_fixtures.CONTEXT + 1 for context, rest in asked)
    graph, model, parameters = parts()
    for (context, continuation), score in zip(asked, scores(asked), strict=True):
        tokens = np.array([*context, *continuation])[-model.context_length - 1 :]
        logprobs = jax.nn.log_softmax(model_fixtures.full_logits(graph, parameters, tokens[:-1]))
        expected = np.asarray(logprobs)[np.arange(len(tokens) - 1), tokens[1:]][-len(continuation) :].sum()
        assert score.logprob == pytest.approx(expected, abs=1e-5)


def test_one_at_a_time_scores_as_many_do():
    asked = pairs()
    many, one = scores(asked, batch=16), scores(asked, batch=1)
    assert [s.greedy for s in many] == [s.greedy for s in one]
    np.testing.assert_allclose([s.logprob for s in many], [s.logprob for s in one], atol=1e-5)
    assert scores(asked[:1], batch=16)[0] == many[0]  # to the last bit, whatever the other rows hold


def test_any_mesh_scores_the_same():
    asked = pairs()
    one, many = scores(asked), scores(asked, mesh=meshes.make(data=2, fsdp=2, tensor=2))
    np.testing.assert_allclose([s.logprob for s in many], [s.logprob for s in one], rtol=1e-5)


def test_what_greedy_decoding_gives_is_greedy():
    """Also where the model's likeliest ids have no tokens: none is drawn, and what is scored keeps its probability."""
    _, model, parameters = parts()

    def drawn(known=None):
        how = {"sampling": Sampling(0.0), "known": known}
        return [int(token[0]) for token in generate(model, parameters, [[3, 1, 4]], 6, meshes.make(), **how)]

    likeliest, known = drawn(), np.arange(model_fixtures.VOCABULARY) < 60
    known[likeliest[0]] = False
    ids = drawn(known)
    assert known[ids].all() and likeliest[0] not in ids
    other = [*ids[:-1], next(i for i in range(60) if known[i] and i != ids[-1])]
    asked = [([3, 1, 4], ids), ([3, 1, 4], other)]
    assert [s.greedy for s in scores(asked, known=known)] == [True, False]
    assert [s.logprob for s in scores(asked, known=known)] == [s.logprob for s in scores(asked)]


def test_few_lengths_are_compiled():
    assert {padded_length(n, 1000) for n in range(1, 1001)} == {32, 64, 128, 256, 512, 1000}
    assert padded_length(5, 24) == 24


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([], [1]), "a context without tokens"),
        (([1], []), "a continuation without tokens"),
        (([1], [1] * 33), r"33 tokens exceeds model\.context_length = 32"),
    ],
)
def test_what_cannot_be_scored_is_refused(pair, message):
    with pytest.raises(InputError, match=message):
        scores([([1], [2]), pair])


@pytest.mark.exhaustive
def test_prompts_padded_to_one_length_run_one_program(monkeypatch):
    _, model, parameters = parts(model_fixtures.GPT2)
    # Another value than other tests', whose compiled programs would be found again.
    model = model.model_copy(update={"initializer_std": 0.123})
    greedy, mesh = Sampling(temperature=0.0), meshes.make()

    def run(prompt, **options):
        drawn = generate(model, parameters, [prompt], 4, mesh, sampling=greedy, **options)
        return [int(token[0]) for token in drawn]

    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    expected = [run(prompt) for prompt in prompts]
    monkeypatch.setattr(steps, "prefill", chex.assert_max_traces(steps.prefill, n=1))
    monkeypatch.setattr(steps, "decode_step", chex.assert_max_traces(steps.decode_step, n=1))
    assert [run(prompt, pad_to=12) for prompt in prompts] == expected
