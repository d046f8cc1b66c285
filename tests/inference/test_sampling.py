import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import InputError
from jaxlm.inference.requests import Sampling
from jaxlm.inference.sampling import filtered, sample

PROBABILITIES = np.array([0.5, 0.3, 0.15, 0.05])
LOGITS = jnp.log(jnp.asarray(PROBABILITIES, jnp.float32))[None]
SHUFFLED = jnp.asarray([[2, 0, 3, 1]])  # so that nothing depends on the order of ids


def kept(how, logits=LOGITS):
    return set(np.flatnonzero(np.isfinite(filtered(logits, how)[0])).tolist())


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
    keys = jax.random.split(jax.random.key(0), 8192)
    drawn = jax.vmap(lambda key: sample(LOGITS, key, Sampling())[0])(keys)
    share = np.bincount(drawn, minlength=4) / 8192
    np.testing.assert_allclose(share, PROBABILITIES, atol=0.02)  # four sigma of a binomial


def test_temperature_sharpens():
    keys = jax.random.split(jax.random.key(0), 4096)
    drawn = jax.vmap(lambda key: sample(LOGITS, key, Sampling(temperature=0.5))[0])(keys)
    sharp = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4096, sharp, atol=0.03)


def test_temperature_zero_takes_the_likeliest():
    logits = jnp.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    np.testing.assert_array_equal(sample(logits, jax.random.key(0), Sampling(temperature=0.0)), [1, 0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_is_never_drawn(temperature):
    logits = jnp.array([[0.0, 0.0, 50.0, 50.0]])
    keys = jax.random.split(jax.random.key(0), 64)
    drawn = {int(sample(logits, key, Sampling(temperature), vocab_size=2)[0]) for key in keys}
    assert drawn <= {0, 1}


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
    drawn = {int(sample(logits, key, how)[0]) for key in jax.random.split(jax.random.key(0), 64)}
    assert drawn == ({1} if temperature < 1 else {0, 1, 2})
