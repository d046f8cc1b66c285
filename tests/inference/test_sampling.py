import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from matrices import sampled

from jaxlm.core.errors import InputError
from jaxlm.inference import sampling
from jaxlm.inference.requests import MAX_BIASES, MAX_LOGPROBS, BarredTokens, Sampling
from jaxlm.inference.sampling import NO_TOKEN, adjusted, count_drawn, row_sampling, token_counts

PROBABILITIES = np.array([0.5, 0.3, 0.15, 0.05])
LOGITS = jnp.log(jnp.asarray(PROBABILITIES, jnp.float32))[None]
SHUFFLED = jnp.asarray([[2, 0, 3, 1]])  # so that nothing depends on the order of ids

filtered = jax.jit(sampling.filtered)


@jax.jit
def sample(logits, how, position, valid=None, counts=None, allowed=None):
    return sampling.sample(logits, how, position, valid, None if counts is None else lambda: counts, allowed)


def kept(how, logits=LOGITS):
    remaining = filtered(logits, row_sampling([how], seed=0))
    return set(np.flatnonzero(remaining[0]).tolist())


ROWS, SIZE = 64, 64


def rows_of(logits, how, valid=None, counts=None, seed=0, streams=range(ROWS), position=0):
    """Return what `ROWS` rows draw by one program: from logits [n, v], options and counts of n in turn, of `SIZE` ids
    with those beyond v at −∞."""

    def filled(values, fill, dtype):
        values = np.resize(np.asarray(values, dtype), (ROWS, np.shape(values)[-1]))
        return np.pad(values, ((0, 0), (0, SIZE - values.shape[1])), constant_values=fill)

    options = [how] * ROWS if isinstance(how, Sampling) else [how[row % len(how)] for row in range(ROWS)]
    valid = filled(np.ones(SIZE) if valid is None else valid, False, bool)[0]
    counts = filled(np.zeros((1, SIZE)) if counts is None else counts, 0, np.int32)
    given = row_sampling(options, seed, streams), np.full(ROWS, position, np.int32), valid, counts
    return jax.device_get(sample(filled(logits, -np.inf, np.float32), *given))


def draw(*given, **named):
    """Return the tokens of `rows_of`."""
    return rows_of(*given, **named).token


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
        (Sampling(min_p=0.0), {0, 1, 2, 3}),
        (Sampling(min_p=0.2), {0, 1, 2}),  # at least a tenth
        (Sampling(min_p=0.5), {0, 1}),
        (Sampling(min_p=1.0), {0}),
        (Sampling(temperature=0.5, min_p=0.2), {0, 1}),  # a ratio of 0.6 becomes 0.36, and one of 0.3 becomes 0.09
        (Sampling(top_p=0.6, min_p=0.2), {0, 1}),
        (Sampling(top_p=0.9, min_p=0.5), {0, 1}),
        (Sampling(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0), {0, 1, 2, 3}),
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


def sorted_reference(logits, how):
    """Return whether each token of logits [V] stays, and whether rounding may move it, by sorting in float64."""
    far = (logits.max() - logits) / np.float64(np.float32(how.temperature))
    values, group = np.unique(far, return_inverse=True)  # from the likeliest on
    number = np.bincount(group)
    stays = np.cumsum(number) - number < (how.top_k or logits.size)
    mass, tail = np.where(stays, number * np.exp(-values), 0.0), 1.0 - (how.top_p or 1.0)
    rest = np.cumsum(mass[::-1])[::-1] / mass.sum()
    stays &= (rest > tail) | (values == 0.0) | (tail == 0.0)
    stays &= values <= (-np.log(how.min_p) if how.min_p else 87.0)  # float32 has no smaller probability
    near = (np.abs(rest - tail) < 1e-5 * tail) & (values > 0.0)
    return stays[group], near[group]


def adversarial(size):
    """Yield rows of logits: ties, one likely token, none, signs of zero, tails as small as float32 has them."""
    draw = np.random.default_rng(size)
    yield "wide", draw.normal(0.0, 4.0, size)
    yield "ties", draw.integers(-3, 3, size)
    yield "alike", np.full(size, 7.5)
    yield "one", np.where(np.arange(size) == size // 2, 1e4, 0.0)
    yield "few", np.where(draw.random(size) < 0.1, draw.normal(0.0, 1.0, size), -np.inf)
    yield "zeros", draw.choice([0.0, -0.0, -1.0], size)
    yield "neighbours", np.nextafter(np.float32(3.0), np.float32(4.0)) - 2e-7 * draw.integers(0, 4, size)
    yield "tail", np.where(np.arange(size) < 3, 0.0, -60.0 - 25.0 * draw.random(size))
    yield "negative", -1e3 + draw.normal(0.0, 2.0, size)


ADVERSARIAL_OPTIONS = [
    *(Sampling(top_k=k) for k in (1, 2, 63, 64, 65, 500, 10**6)),
    *(Sampling(top_p=p) for p in (1e-6, 0.5, 0.95, 0.9999, 0.9999999, 1.0)),
    *(Sampling(top_k=k, top_p=p) for k, p in ((3, 0.9), (80, 0.7), (200, 0.999))),
    *(Sampling(temperature=t, top_p=0.9, min_p=0.01) for t in (1e-6, 0.3, 3.0, 1e3)),
    Sampling(top_k=100, top_p=0.99, min_p=0.2),
]


@pytest.mark.parametrize("size", sampled([1, 2, 33, 1000, 50257], ["33", "1000"]))
def test_filters_equal_a_sort(size):
    rows = [row.astype(np.float32) for _, row in adversarial(size) if np.isfinite(row).any()]
    options = [how for how in ADVERSARIAL_OPTIONS for _ in rows]
    logits = np.stack(rows * len(ADVERSARIAL_OPTIONS))
    found = np.asarray(filtered(logits, row_sampling(options, seed=0))) > 0.0
    for row, how, found_V in zip(logits, options, found, strict=True):
        expected, near = sorted_reference(row, how)
        assert ((found_V == expected) | near).all(), how
        assert (near.mean() < 0.01 or size < 3) and found_V[row == row.max()].all()


def test_samples_follow_the_probabilities():
    """Pearson's χ² of 2^14 draws, with 19 degrees of freedom, is above 55 with a probability of 2e-5."""
    rows = 2**14
    logits = np.random.default_rng(1).normal(0.0, 1.5, 24).astype(np.float32)
    how = Sampling(temperature=0.8, top_k=20)
    stays, _ = sorted_reference(logits, how)
    shares = np.where(stays, np.exp(logits.astype(np.float64) / how.temperature), 0.0)
    expected = rows * shares / shares.sum()
    options = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), row_sampling([how], seed=0))
    given = options._replace(stream=jnp.arange(rows, dtype=jnp.uint32)), jnp.zeros(rows, jnp.int32)
    counts = np.bincount(sample(jnp.broadcast_to(logits, (rows, 24)), *given).token, minlength=24)
    assert stays.sum() == 20 and not counts[~stays].any()
    assert ((counts - expected)[stays] ** 2 / expected[stays]).sum() < 55


@pytest.mark.parametrize("size", sampled([1, 24, 700], ["700"]))
def test_random_bits_are_divided_as_the_probabilities_are(size):
    """Each token gets its share of numbers at equal distances, to one: unlikely tokens get theirs too."""
    logits = np.random.default_rng(2).normal(0.0, 3.0, size).astype(np.float32)
    bits = (jnp.arange(4096, dtype=jnp.uint32) << 20) + 77
    shares = np.exp(logits - logits.max())
    tokens = jax.jit(sampling.pick)(jnp.broadcast_to(shares, (len(bits), size)), bits)
    assert np.abs(np.bincount(tokens, minlength=size) - len(bits) * shares / shares.sum()).max() < 1.01


@pytest.mark.parametrize("how", [Sampling(0.0), Sampling(), Sampling(top_k=2, top_p=0.5), Sampling(logprobs=2)])
def test_logits_that_are_not_finite_give_no_token(how):
    nan, inf = np.nan, np.inf
    bad = [[nan] * 4, [0.0, nan, 1.0, 2.0], [0.0, inf, 1.0, 2.0], [-inf] * 4]
    good = [[0.0, 9.0, 1.0, -inf], [-inf, 9.0, -inf, -inf], [0.0, 1e30, -1e30, 2.0]]
    drawn = rows_of(bad + good, how)
    tokens = drawn.token[:7]
    assert (tokens[:4] == NO_TOKEN).all() and (tokens[4:] >= 0).all()
    assert np.isnan(drawn.logprob[:4]).all() and np.isfinite(drawn.logprob[4:7]).all() == (how.logprobs is not None)
    assert set(draw([[0.0, 1.0, nan, inf]], how, valid=[np.arange(4) < 2])) <= {0, 1}


@pytest.mark.parametrize("how", [Sampling(0.0), Sampling(), Sampling(top_k=3), Sampling(top_p=0.9), Sampling(1e6)])
def test_a_row_without_a_token_is_never_drawn(how):
    """Neither beyond the tokens nor between them. The likelier such rows are not among those that filters count."""
    logits, valid = [[0.0, 50.0, 0.0, 0.0, 50.0, 60.0]], [[True, False, True, True, False, False]]
    biased = how._replace(logit_bias={1: 100.0, 4: 100.0})
    assert set(draw(logits, biased, valid)) == ({0} if how.temperature == 0.0 else {0, 2, 3})


@pytest.mark.parametrize("size", [31, 32, 33])
def test_a_row_draws_what_it_may(size):
    """And a row that may draw all has the bits that it has without masks; log-probabilities are the model's."""
    draw = np.random.default_rng(size)
    logits = draw.normal(0.0, 2.0, (ROWS, size)).astype(np.float32)
    options = [Sampling(0.0, logprobs=3), Sampling(logprobs=0), Sampling(top_k=9, top_p=0.9), Sampling(min_p=0.1)]
    given = logits, row_sampling(options * (ROWS // 4), seed=0), np.zeros(ROWS, np.int32)
    may = draw.random((ROWS, size)) < 0.1
    may[:, size // 2] |= ~may.any(axis=1)
    may[::2] = True
    bits = np.packbits(np.pad(may, ((0, 0), (0, -size % 32)), constant_values=True), axis=1, bitorder="little")
    free, held = sample(*given), sample(*given, allowed=bits.view(np.uint32))
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one[::2], other[::2]), free, held)
    assert may[np.arange(ROWS), held.token].all() and not may[np.arange(ROWS), free.token].all()
    np.testing.assert_array_equal(free.top_logprobs, held.top_logprobs)
    likeliest = np.where(may, logits, -np.inf).argmax(axis=1)
    np.testing.assert_array_equal(held.token[::4], likeliest[::4])


def test_a_vocabulary_without_gaps_and_counts_draws_as_ever():
    logits = np.random.default_rng(0).normal(0.0, 2.0, (ROWS, SIZE)).astype(np.float32)
    options = [Sampling(0.0), Sampling(), Sampling(top_k=9, top_p=0.9), Sampling(min_p=0.1)] * (ROWS // 4)
    alone = sample(logits, row_sampling(options, seed=0), np.zeros(ROWS, np.int32)).token
    np.testing.assert_array_equal(draw(logits, options), alone)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        *((Sampling(t), "temperature = .* must be 0, or") for t in (-1.0, float("nan"), float("inf"), 9e-7, 1.1e6)),
        (Sampling(top_k=0), "top_k = 0 must be 1 or more"),
        *((Sampling(top_p=p), "top_p = .* must be above 0 and at most 1") for p in (0.0, 1.5)),
        *((Sampling(min_p=p), "min_p = .* must be from 0 to 1") for p in (-0.1, 1.1, float("nan"))),
        *(
            (Sampling(repetition_penalty=r), "repetition_penalty = .* must be from 1e-06 to 1e.06; 1 is none")
            for r in (0.0, -1.0, float("nan"), 1e30)
        ),
        (Sampling(presence_penalty=2.1), "presence_penalty = 2.1 must be from -2 to 2"),
        (Sampling(frequency_penalty=-2.1), "frequency_penalty = -2.1 must be from -2 to 2"),
        (Sampling(logit_bias={3: 100.5}), "logit_bias = {3: 100.5}: a bias must be from -100 to 100"),
        (Sampling(logit_bias={3: float("nan")}), "logit_bias = {3: nan}: a bias"),
        (Sampling(logit_bias={-1: 1.0}), "logit_bias = {-1: 1}: a token id must be 0 or more"),
        (Sampling(logit_bias=dict.fromkeys(range(301), 1.0)), "logit_bias = 301 token ids must be at most 300"),
        *((Sampling(logprobs=n), f"logprobs = {n} must be from 0 to 20") for n in (-1, 21)),
    ],
)
def test_values_that_mean_nothing_are_refused(how, message):
    with pytest.raises(InputError, match=message):
        how.check()


def test_the_outermost_values_are_taken():
    for how in (
        Sampling(1e-6, 1, 1.0, 1.0, 1e-6, 2.0, -2.0, dict.fromkeys(range(MAX_BIASES), -100.0), MAX_LOGPROBS),
        Sampling(1e6, 2**40, 1e-9, 0.0, 1e6, -2.0, 2.0, {}, 0),
    ):
        assert how.check() == how and row_sampling([how], seed=0)


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_the_outermost_temperatures_draw_as_they_should(temperature):
    how = Sampling(temperature).check()
    assert set(draw([[-1000.0, 1000.0, 999.0]], how)) == ({1} if temperature < 1 else {0, 1, 2})
    assert set(draw([[-3e38, 3e38, 3e38]], how)) == {1, 2}


def counts_of(prompts, drawn, size):
    """Return the counts of rows with these token ids before."""
    return jnp.stack([token_counts(*each, size) for each in zip(prompts, drawn, strict=True)])


def test_counts_tell_prompts_from_what_is_drawn():
    """NO_TOKEN counts nowhere, and a token that occurs twice in a prompt once."""
    counts = counts_of([[0, 1, 1], [3]], [[1, 2, 2], []], 4)
    np.testing.assert_array_equal(counts, [[1, 3, 4, 0], [0, 0, 0, 1]])
    again = count_drawn(counts, jnp.array([0, 1]), jnp.array([2, NO_TOKEN]))
    np.testing.assert_array_equal(again, [[1, 3, 6, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Sampling(repetition_penalty=2.0), [1.0, 1.0, -4.0, 1.5, 2.5]),  # of prompt and drawn tokens
        (Sampling(repetition_penalty=0.5), [4.0, 4.0, -1.0, 6.0, 2.5]),
        (Sampling(presence_penalty=0.5), [2.0, 1.5, -2.5, 2.5, 2.5]),  # of drawn tokens, once
        (Sampling(frequency_penalty=0.5), [2.0, 1.5, -3.0, 2.5, 2.5]),  # for each time
        (Sampling(frequency_penalty=-1.0, presence_penalty=0.25), [2.0, 2.75, -0.25, 3.75, 2.5]),
        (Sampling(repetition_penalty=2.0, frequency_penalty=0.5), [1.0, 0.5, -5.0, 1.0, 2.5]),
        (Sampling(logit_bias={4: 1.0, 0: -100.0}), [-98.0, 2.0, -2.0, 3.0, 3.5]),
        (Sampling(repetition_penalty=2.0, logit_bias={0: 1.0}), [2.0, 1.0, -4.0, 1.5, 2.5]),  # penalties come first
        (Sampling(0.3, 2, 0.5, 0.5, logprobs=3), [2.0, 2.0, -2.0, 3.0, 2.5]),
    ],
)
def test_penalties_and_biases_change_logits_as_they_should(how, expected):
    """A row without options beside it keeps its logits to the bit. Token 0 is in the prompt, 2 was drawn twice, 1 and 3
    once, and 3 is in the prompt too."""
    logits = jnp.array([[2.0, 2.0, -2.0, 3.0, 2.5]] * 2)
    counts = counts_of([[0, 3]] * 2, [[1, 2, 2, 3]] * 2, 5)
    found = jax.jit(lambda *rows: adjusted(*rows, None, lambda: counts))(
        logits, row_sampling([how, Sampling()], seed=0), jnp.zeros(2, jnp.int32)
    )
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    np.testing.assert_array_equal(found[1], logits[1])


@pytest.mark.parametrize(
    ("how", "tokens"),
    [
        (Sampling(), {0, 1, 2, 3}),
        (Sampling(0.0), {0}),
        (Sampling(0.01), {0}),
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.9), {0, 1, 2}),
        (Sampling(min_p=0.2), {0, 1, 2}),
        (Sampling(0.0, repetition_penalty=1e6), {3}),  # logits below 0 become those far below
        (Sampling(0.0, presence_penalty=2.0), {1}),
        (Sampling(0.0, frequency_penalty=0.5), {1}),
        (Sampling(0.0, frequency_penalty=0.1), {0}),
        (Sampling(logit_bias={2: 100.0}), {2}),
        (Sampling(0.0, logit_bias={0: -100.0}), {1}),
    ],
)
def test_each_option_changes_what_is_drawn(how, tokens):
    """Token 0 was drawn twice, tokens 1 and 2 are in the prompt."""
    assert set(draw(LOGITS, how, counts=counts_of([[1, 2]], [[0, 0]], 4))) == tokens


def test_barred_tokens_are_drawn_from_their_position_on():
    """A bias of such a token stays, and other rows keep their logits to the bit."""
    options = [Sampling(0.0, logit_bias={0: 0.5}), Sampling(0.0), Sampling(0.0)]
    how = row_sampling(options, 0, barred=[BarredTokens(frozenset([0, 1]), 7), BarredTokens(), BarredTokens()])
    logits = jnp.tile(LOGITS, (3, 1))
    for position, tokens in ((6, [2, 0, 0]), (7, [0, 0, 0])):
        at = jnp.full(3, position, jnp.int32)
        changed = adjusted(logits, how, at)
        assert sample(logits, how, at).token.tolist() == tokens
        np.testing.assert_array_equal(changed[1:], logits[1:])
        assert np.isneginf(changed[0]).tolist() == [position < 7] * 2 + [False] * 2
    np.testing.assert_array_equal(changed[0], logits[0].at[0].add(0.5))


MIXED = [
    Sampling(0.0),
    Sampling(),
    Sampling(0.7, top_k=3, logprobs=2),
    Sampling(1.5, top_p=0.8),
    Sampling(0.9, top_k=70, top_p=0.9, repetition_penalty=1.3),
    Sampling(0.0, top_k=2, frequency_penalty=0.3, presence_penalty=0.1, logprobs=20),
    Sampling(1.1, min_p=0.02, logit_bias={1: 2.5, 40: -3.0}),
    Sampling(0.8, top_k=90, min_p=0.01, logprobs=0),
]


@pytest.mark.parametrize(
    "size, batches",
    sampled(
        [
            pytest.param(1000, (1,)),
            *(pytest.param(size, (1, 2, 3, 8, 17, 32)) for size in (97, 1000, 4099, 50257)),
        ],
        ["1000-(1,)"],
    ),
    ids=str,
)
def test_a_row_is_sampled_as_if_alone(size, batches):
    """Mixed options in one batch give each row what it draws alone, to the bit, in batches of any size.

    XLA adds and exponentiates in another way from some thousand elements on: these sizes are on both sides of it.
    """
    random = np.random.default_rng(0)
    logits = random.normal(0.0, 2.0, (ROWS, size)).astype(np.float32)
    options, position = (MIXED * ROWS)[:ROWS], np.arange(3, 3 + ROWS, dtype=np.int32)
    counts = np.asarray(counts_of(*random.integers(0, size, (2, ROWS, 9)), size))
    valid = random.random(size) < 0.9

    @jax.jit
    def both(logits, how, position, counts):
        drawn = sampling.sample(logits, how, position, valid, lambda: counts)
        return *drawn, sampling.filtered(adjusted(logits, how, position, valid, lambda: counts), how)

    def run(first, last):
        here = slice(first, last)
        how = row_sampling(options[here], 7, streams=range(first, last))
        return jax.device_get(both(logits[here], how, position[here], counts[here]))

    whole = run(0, ROWS)
    for batch in batches:
        for first in range(0, ROWS - batch + 1, max(batch, 5)):
            for found, expected in zip(run(first, first + batch), whole, strict=True):
                np.testing.assert_array_equal(found, expected[first : first + batch])
    assert both._cache_size() == 1 + len(batches)  # one program for all options, per batch


def test_seed_stream_and_position_each_draw_other_tokens():
    def drawn(**named):
        return draw(np.zeros((1, SIZE)), Sampling(), **named).tolist()

    first, other = drawn(), drawn(seed=1)
    assert first == drawn() and len(set(first)) > ROWS // 2
    for another in (other, drawn(streams=range(ROWS, 2 * ROWS)), drawn(position=1)):
        assert sum(a == b for a, b in zip(first, another, strict=True)) < 10  # one is expected by chance
    for seed in (2**32, -1, 2**63 - 1, -(2**63)):  # those with equal lower halves are others too
        assert sum(a == b for a, b in zip(drawn(seed=seed % 2**32), drawn(seed=seed), strict=True)) < 10
    mixed = drawn(seed=[0, 1] * (ROWS // 2))
    assert mixed[::2] == first[::2] and mixed[1::2] == other[1::2]


def test_log_probabilities_are_those_of_the_model():
    """Penalties, biases, temperature and filters change none of them, and rows that ask for none get none."""
    random = np.random.default_rng(3)
    logits, valid = random.normal(0.0, 3.0, (4, SIZE)).astype(np.float32), random.random(SIZE) < 0.5
    counts = counts_of(*random.integers(0, SIZE, (2, 4, 9)), SIZE)
    options = [
        Sampling(0.0, logprobs=3),
        Sampling(5.0, top_p=0.9, repetition_penalty=1.5, logit_bias={7: 9.0}, logprobs=20),
        Sampling(0.5),
        Sampling(2.0, logprobs=0),
    ]
    token, logprob, top, top_logprobs = rows_of(logits, options, valid[None], counts)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    likeliest = np.argsort(np.where(valid, -exact, np.inf), axis=-1)[:, :MAX_LOGPROBS]
    for row, asked in enumerate((3, 20, None, 0)):
        assert np.isnan(logprob[row]) if asked is None else logprob[row] == pytest.approx(exact[row, token[row]])
        asked = asked or 0
        np.testing.assert_array_equal(top[row, :asked], likeliest[row, :asked])
        np.testing.assert_allclose(top_logprobs[row, :asked], exact[row, likeliest[row, :asked]], rtol=1e-6)
        assert (top[row, asked:] == NO_TOKEN).all() and (top_logprobs[row, asked:] == -np.inf).all()


def test_fewer_tokens_than_log_probabilities():
    how = row_sampling([Sampling(logprobs=20)], seed=0)
    drawn = sample(LOGITS, how, jnp.zeros(1, jnp.int32), np.array([True, False, True, True]))
    assert drawn.top_ids.tolist() == [[0, 2, 3, NO_TOKEN]]
    np.testing.assert_allclose(np.exp(drawn.top_logprobs), [[0.5, 0.15, 0.05, 0.0]], rtol=1e-6)


def primitives(jaxpr):
    """Yield the names of the primitives of a jaxpr and of all within it."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jaxprs_in_params(eqn.params):
            yield from primitives(inner)


def test_nothing_is_computed_that_no_row_asks_for():
    """Each option is a branch of its own: greedy decoding draws no random numbers, and nothing is sorted anywhere."""
    rows, size = len(MIXED), 64
    given = jnp.zeros((rows, size)), row_sampling(MIXED, seed=0), jnp.zeros(rows, jnp.int32)
    jaxpr = jax.make_jaxpr(sample.__wrapped__)(*given, None, jnp.zeros((rows, size), jnp.int32)).jaxpr
    costly = {"threefry2x32", "exp", "log", "div", "cumsum", "top_k", "while", "scan", "scatter-add"}
    assert "sort" not in {*primitives(jaxpr)} and costly <= {*primitives(jaxpr)} | {"while"}
    assert not costly & {eqn.primitive.name for eqn in jaxpr.eqns}
