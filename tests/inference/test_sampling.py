import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import InputError
from jaxlm.inference.requests import Sampling
from jaxlm.inference.sampling import NO_TOKEN, check_drawn, filtered, row_sampling, sample

PROBABILITIES = np.array([0.5, 0.3, 0.15, 0.05])
LOGITS = jnp.log(jnp.asarray(PROBABILITIES, jnp.float32))[None]
SHUFFLED = jnp.asarray([[2, 0, 3, 1]])  # so that nothing depends on the order of ids


def kept(how, logits=LOGITS):
    row = row_sampling([how], seed=0)
    remaining = filtered(logits / how.temperature, jnp.asarray(row.top_k), jnp.asarray(row.tail))
    return set(np.flatnonzero(np.isfinite(remaining[0])).tolist())


def draw(logits, how, rows, known=None):
    """Return the tokens that so many streams draw from the logits [1, V]."""
    logits = jnp.broadcast_to(logits, (rows, logits.shape[-1]))
    return np.asarray(sample(logits, row_sampling([how] * rows, seed=0), jnp.zeros(rows, jnp.int32), known))


@pytest.mark.parametrize(
    ("how", "tokens"),
    [
        (Sampling(), {0, 1, 2, 3}),
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_k=9), {0, 1, 2, 3}),
        (Sampling(top_p=0.4), {0}),
        (Sampling(top_p=0.6), {0, 1}),
        (Sampling(top_p=0.9), {0, 1, 2}),
        (Sampling(top_p=1.0), {0, 1, 2, 3}),
        (Sampling(top_k=3, top_p=0.9), {0, 1, 2}),
        (Sampling(top_k=2, top_p=0.6), {0}),  # of the two left, the first has 0.625
        (Sampling(temperature=100.0, top_p=0.6), {0, 1, 2}),  # nearly uniform: three quarters in three tokens
        (Sampling(top_p=1e-9), {0}),
    ],
)
def test_filters_keep_the_tokens_that_they_should(how, tokens):
    assert kept(how) == tokens
    where = {int(np.flatnonzero(SHUFFLED[0] == token)[0]) for token in tokens}
    assert kept(how, LOGITS[:, SHUFFLED[0]]) == where


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999, 0.99999, 0.9999999])
def test_as_many_tokens_of_a_large_vocabulary_stay_as_in_float64(top_p):
    logits = np.random.default_rng(0).normal(0.0, 3.0, 2**17).astype(np.float32)
    shares = np.sort(np.exp(logits.astype(np.float64)))[::-1]
    shares /= shares.sum()
    expected = np.count_nonzero(np.cumsum(shares) - shares < top_p)
    assert len(kept(Sampling(top_p=top_p), jnp.asarray(logits)[None])) == pytest.approx(expected, rel=1e-4)


def test_samples_follow_the_probabilities():
    share = np.bincount(draw(LOGITS, Sampling(), 8192), minlength=4) / 8192
    np.testing.assert_allclose(share, PROBABILITIES, atol=0.02)  # four sigma of a binomial


def test_temperature_sharpens():
    drawn = draw(LOGITS, Sampling(temperature=0.5), 4096)
    sharp = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4096, sharp, atol=0.03)


def test_temperature_zero_takes_the_likeliest():
    logits = jnp.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    how = row_sampling([Sampling(temperature=0.0)] * 2, seed=0)
    np.testing.assert_array_equal(sample(logits, how, jnp.zeros(2, jnp.int32)), [1, 0])


@pytest.mark.parametrize("how", [Sampling(0.0), Sampling(), Sampling(top_k=2, top_p=0.5)])
def test_logits_that_are_not_finite_give_no_token(how):
    nan, inf = jnp.nan, jnp.inf
    bad = [[nan] * 4, [0.0, nan, 1.0, 2.0], [0.0, inf, 1.0, 2.0], [-inf] * 4]
    good = [[0.0, 9.0, 1.0, -inf], [-inf, 9.0, -inf, -inf], [0.0, 1e30, -1e30, 2.0]]
    rows = row_sampling([how] * 7, seed=0)
    jitted = jax.jit(lambda *arrays: sample(*arrays))
    tokens = np.asarray(jitted(jnp.array(bad + good), rows, jnp.zeros(7, jnp.int32)))
    assert (tokens[:4] == NO_TOKEN).all() and (tokens[4:] >= 0).all() and (check_drawn(tokens[4:]) == tokens[4:]).all()
    with pytest.raises(InputError, match="logits are not finite"):
        check_drawn(tokens)
    padded = jnp.array([[0.0, 1.0, nan, inf]])
    assert draw(padded, how, 1, jnp.arange(4) < 2).item() in (0, 1)


@pytest.mark.parametrize("how", [Sampling(0.0), Sampling(), Sampling(top_k=3), Sampling(top_p=0.9), Sampling(1e6)])
def test_a_row_without_a_token_is_never_drawn(how):
    """Neither beyond the tokens nor between them. The likelier such rows are not among those that filters count."""
    logits = jnp.array([[0.0, 50.0, 0.0, 0.0, 50.0, 60.0]])
    known = np.array([True, False, True, True, False, False])
    assert set(draw(logits, how, 64, known)) == ({0} if how.temperature == 0.0 else {0, 2, 3})


def test_a_vocabulary_without_gaps_draws_as_ever():
    logits = jnp.asarray(np.random.default_rng(0).normal(0.0, 2.0, (1, 64)), jnp.float32)
    for how in (Sampling(0.0), Sampling(), Sampling(top_k=9, top_p=0.9)):
        np.testing.assert_array_equal(draw(logits, how, 64, np.ones(64, bool)), draw(logits, how, 64))


@pytest.mark.parametrize(
    "how",
    [
        *map(Sampling, (-1.0, float("nan"), float("inf"), 1e-40, 9e-7, 1.1e6, 1e300)),
        *(Sampling(top_k=0), Sampling(top_p=0.0), Sampling(top_p=1.5)),
    ],
)
def test_values_that_mean_nothing_are_refused(how):
    with pytest.raises(InputError, match="must be"):
        how.check()


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_the_outermost_temperatures_draw_as_they_should(temperature):
    how = Sampling(temperature).check()
    logits = jnp.array([[-1000.0, 1000.0, 999.0]])
    assert set(draw(logits, how, 64)) == ({1} if temperature < 1 else {0, 1, 2})


MIXED = [
    Sampling(0.0),
    Sampling(),
    Sampling(0.7, top_k=3),
    Sampling(1.5, top_p=0.8),
    Sampling(0.9, top_k=20, top_p=0.9),
    Sampling(0.0, top_k=2),
]


def test_a_row_is_sampled_as_if_alone():
    """Mixed options in one batch give each row what it draws alone, by its seed, stream and position."""
    jitted = jax.jit(sample)
    logits = jnp.asarray(np.random.default_rng(0).normal(0.0, 2.0, (len(MIXED), 64)), jnp.float32)
    position = jnp.arange(3, 3 + len(MIXED))
    together = jitted(logits, row_sampling(MIXED, seed=7), position)
    alone = [
        jitted(logits[i : i + 1], row_sampling([how], 7, streams=[i]), position[i : i + 1])[0]
        for i, how in enumerate(MIXED)
    ]
    np.testing.assert_array_equal(together, alone)
    assert jitted._cache_size() == 2  # one program for all options, per batch


def test_seed_stream_and_position_each_draw_other_tokens():
    logits, rows = jnp.zeros((64, 1000)), [Sampling()] * 64

    def drawn(seed=0, streams=range(64), position=0):
        return sample(logits, row_sampling(rows, seed, streams), jnp.full(64, position)).tolist()

    assert drawn() == drawn() and len(set(drawn())) > 32
    for other in (drawn(seed=1), drawn(streams=range(64, 128)), drawn(position=1)):
        assert sum(a == b for a, b in zip(drawn(), other, strict=True)) < 4


def test_a_vocabulary_is_sorted_only_where_a_row_is_filtered():
    """Greedy decoding draws no random numbers either: each is a branch of its own."""
    how = row_sampling(MIXED, seed=0)
    jaxpr = jax.make_jaxpr(sample)(jnp.zeros((len(MIXED), 64)), how, jnp.zeros(len(MIXED), jnp.int32)).jaxpr
    assert not {"sort", "random_bits", "threefry2x32"} & {eqn.primitive.name for eqn in jaxpr.eqns}
    (outer,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond")
    drawing = max((branch.jaxpr for branch in outer.params["branches"]), key=lambda branch: len(branch.eqns))
    assert "sort" not in {eqn.primitive.name for eqn in drawing.eqns}
    assert any(eqn.primitive.name == "cond" for eqn in drawing.eqns)
