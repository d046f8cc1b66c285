"""Sampling of the next token from logits: every row of a batch by its own options and random numbers.

A row's token and log-probabilities are equal to the bit alone and in any batch. On a CPU, XLA gives sums over float32
to a library from some size on, which adds in another order and has another exponential; so nothing here is a float32
sum or maximum of XLA's: `_total` adds part to part, largest logits come from argmax, and the draw counts in integers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from jaxlm.core.errors import InputError
from jaxlm.inference.requests import MAX_BIASES, MAX_LOGPROBS, BarredTokens, Sampling
from jaxlm.parallel.partition import constrain

NO_TOKEN = -1  # drawn from logits that give no distribution
_ALL = 2**31 - 1  # as top-k: more tokens than a vocabulary has; as a token id: none

_FEW = 64  # the largest top-k that lax.top_k finds, faster than a search over all values
_LOW = 2**32 - 1  # the lower half of 64 bits
_PARTS = 32  # of a row, added to each other in one loop: a power of two
_BLOCK = 512  # tokens of a block, among which a draw finds its block first


class NotFinite(InputError):
    """Logits are not finite, so that no token can be drawn: what a draw of NO_TOKEN means."""

    def __init__(self):
        super().__init__(
            "the model's logits are not finite, so that no token can be drawn: its weights are damaged or have "
            "diverged, or execution.dtype overflows; use another checkpoint, or execution.dtype=float32"
        )


class RowSampling(NamedTuple):
    """The sampling of each row of a batch, as arrays [R], or [R, `MAX_BIASES`] of biases: one program serves all
    options.

    Attributes:
      temperature: float32; 0 takes the likeliest token.
      top_k: int32; from the vocabulary's size on it excludes nothing.
      tail: float32, 1 − top_p, which keeps a top-p close to 1 apart from 1; 0 excludes nothing.
      farthest: float32, −ln(min_p): how far below the largest a token's ln p may be; ∞ excludes nothing.
      repetition, presence, frequency: float32, the penalties; 1, 0 and 0 change nothing.
      biased: int32, token ids; those outside the vocabulary have no bias.
      bias: float32, of these; −∞ bars a token at positions before `barred_until`, and is 0 from there on.
      barred_until: int32, a position in the sequence.
      logprobs: int32, how many likeliest tokens' log-probabilities are asked for; −1 asks for none at all.
      seed, seed_high: uint32, the lower and the upper half of the seed of the row's random numbers.
      stream: uint32, apart for rows of equal seeds.
    """

    temperature: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    tail: jax.Array | np.ndarray
    farthest: jax.Array | np.ndarray
    repetition: jax.Array | np.ndarray
    presence: jax.Array | np.ndarray
    frequency: jax.Array | np.ndarray
    biased: jax.Array | np.ndarray
    bias: jax.Array | np.ndarray
    barred_until: jax.Array | np.ndarray
    logprobs: jax.Array | np.ndarray
    seed: jax.Array | np.ndarray
    seed_high: jax.Array | np.ndarray
    stream: jax.Array | np.ndarray


class Drawn(NamedTuple):
    """The token of each row, and log-probabilities, natural, of the model: of its logits before penalties, biases,
    temperature and filters, so that they say how likely the model finds a text, however it was drawn.

    Attributes:
      token: int32 [R], NO_TOKEN where logits are not finite.
      logprob: float32 [R], the token's; NaN where the row asks for none, or has no token.
      top_ids: int32 [R, K], the ids of the likeliest tokens, in order, where K is the smaller of `MAX_LOGPROBS` and the
        vocabulary; NO_TOKEN beyond the number that the row asks for. No id without a token is among the likeliest.
      top_logprobs: float32 [R, K], of these tokens; −∞ beyond.
    """

    token: jax.Array
    logprob: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def row_sampling(
    rows: Sequence[Sampling],
    seed: int | Sequence[int],
    streams: Sequence[int] | None = None,
    barred: Sequence[BarredTokens] | None = None,
) -> RowSampling:
    """Return the sampling of rows under one seed, or under a seed of each row, of 64 bits; row i draws from stream i
    where no streams are given. A row's biases and barred tokens are at most `MAX_BIASES` together."""

    def floats(of: Callable[[Sampling], float]) -> np.ndarray:
        return np.array([of(how) for how in rows], np.float32)

    biased = np.full((len(rows), MAX_BIASES), _ALL, np.int32)
    bias = np.zeros((len(rows), MAX_BIASES), np.float32)
    barred = [BarredTokens()] * len(rows) if barred is None else barred
    for row, (how, bars) in enumerate(zip(rows, barred, strict=True)):
        given = [*(how.logit_bias or {}).items(), *((token, -np.inf) for token in sorted(bars.ids))]
        if given:
            biased[row, : len(given)], bias[row, : len(given)] = zip(*given, strict=True)
    seeds = [seed] * len(rows) if isinstance(seed, int) else seed
    return RowSampling(
        temperature=floats(lambda how: how.temperature),
        top_k=np.array([_ALL if how.top_k is None else min(how.top_k, _ALL) for how in rows], np.int32),
        tail=floats(lambda how: 0.0 if how.top_p is None else 1.0 - how.top_p),
        farthest=floats(lambda how: -np.log(how.min_p) if how.min_p else np.inf),
        repetition=floats(lambda how: how.repetition_penalty),
        presence=floats(lambda how: how.presence_penalty),
        frequency=floats(lambda how: how.frequency_penalty),
        biased=biased,
        bias=bias,
        barred_until=np.array([bars.until for bars in barred], np.int32),
        logprobs=np.array([-1 if how.logprobs is None else how.logprobs for how in rows], np.int32),
        seed=np.array([each & _LOW for each in seeds], np.uint32),
        seed_high=np.array([each >> 32 & _LOW for each in seeds], np.uint32),
        stream=np.array(range(len(rows)) if streams is None else streams, np.uint32),
    )


def token_counts(prompt: Sequence[int], drawn: Sequence[int], size: int) -> np.ndarray:
    """Return the counts of a sequence over a vocabulary of this size, int32 [V]: two for each time that a token was
    drawn, and one more if it is in the prompt."""
    counts_V = np.zeros(size, np.int32)
    np.add.at(counts_V, drawn, 2)
    counts_V[prompt] |= 1
    return counts_V


def count_drawn(counts_RV: jax.Array, row_N: jax.Array, token_N: jax.Array) -> jax.Array:
    """Return counts [R, V] (`token_counts`) in which tokens N of rows N are drawn once more; NO_TOKEN is none."""
    return counts_RV.at[row_N, jnp.where(token_N == NO_TOKEN, _ALL, token_N)].add(2, mode="drop")


def sample(
    logits_RV: jax.Array,
    how: RowSampling,
    position_R: jax.Array,
    valid_V: jax.Array | None = None,
    counts: Callable[[], jax.Array] | None = None,
    allowed_RW: jax.Array | None = None,
) -> Drawn:
    """Draw a token for each row: it depends on the row's logits, options, seed, stream, position and counts alone.

    A row has no token if its largest logit is not finite: logits of NaN, of ∞, or of −∞ alone are no distribution.
    Nothing is drawn where all rows take the likeliest token, nothing is searched where no row is filtered, and
    nothing else is computed that no row asks for.

    Args:
      logits_RV: float32.
      position_R: int32, of the token that is drawn in its sequence.
      valid_V: bool, whether an id has a token; ids without a token have probability 0. None where all ids have one.
      counts: returns the counts [R, V] of the tokens before (`token_counts`), which are read where a row has a
        penalty; None where no row has one.
      allowed_RW: uint32 [R, ⌈V / 32⌉], the ids that each row may draw: bit i % 32 of word i // 32 is that of id i. None
        where all rows may draw any.
    """
    # Logits are gathered once, so that no branch exchanges anything: shards need not take the same branches.
    logits_RV = constrain(logits_RV, "batch", None)
    changed_RV = adjusted(logits_RV, how, position_R, valid_V, counts, allowed_RW)
    likeliest_R = jnp.argmax(changed_RV, axis=-1).astype(jnp.int32)
    is_drawn_R = how.temperature > 0.0

    def drawn() -> jax.Array:
        bits_R = _bits(how, position_R)
        distance_RV, mass_RV = _distance_and_mass(changed_RV, how)
        filters = _Filters.of(how, changed_RV.shape[-1])
        # Each branch returns tokens, since a branch that returned its operand, the masses, would copy the masses.
        picked_R = _if_any(
            filters.filters_R,
            lambda: pick(filters.left(distance_RV, mass_RV), bits_R),
            lambda: pick(mass_RV, bits_R),
        )
        return jnp.where(is_drawn_R, picked_R, likeliest_R)

    token_R = _if_any(is_drawn_R, drawn, lambda: likeliest_R)
    token_R = jnp.where(jnp.isfinite(_at(changed_RV, likeliest_R)), token_R, NO_TOKEN)
    return Drawn(token_R, *_logprobs(logits_RV, token_R, how.logprobs, valid_V))


def adjusted(
    logits_RV: jax.Array,
    how: RowSampling,
    position_R: jax.Array,
    valid_V: jax.Array | None = None,
    counts: Callable[[], jax.Array] | None = None,
    allowed_RW: jax.Array | None = None,
) -> jax.Array:
    """Return logits after penalties and biases (`Sampling`), −∞ for ids without a token and for those that are barred
    or not allowed; arguments as of `sample`."""

    def penalised() -> jax.Array:
        counts_RV = counts()
        repetition_R1, drawn_RV = how.repetition[:, None], counts_RV >> 1
        less_RV = jnp.where(logits_RV > 0.0, logits_RV / repetition_R1, logits_RV * repetition_R1)
        once_RV = jnp.where(drawn_RV > 0, how.presence[:, None], 0.0)
        each_RV = how.frequency[:, None] * drawn_RV.astype(jnp.float32)
        return jnp.where(counts_RV > 0, less_RV, logits_RV) - each_RV - once_RV

    def biased() -> jax.Array:
        add = jax.vmap(lambda logits_V, ids, bias: logits_V.at[ids].add(bias, mode="drop"))
        return add(changed_RV, how.biased, bias_RB)

    changed_RV = logits_RV
    if counts is not None:
        has_penalty_R = (how.repetition != 1.0) | (how.presence != 0.0) | (how.frequency != 0.0)
        changed_RV = _if_any(has_penalty_R, penalised, lambda: logits_RV)
    is_over_RB = (how.bias == -jnp.inf) & (position_R >= how.barred_until)[:, None]
    bias_RB = jnp.where(is_over_RB, 0.0, how.bias)
    changed_RV = _if_any(bias_RB != 0.0, biased, lambda: changed_RV)
    if valid_V is not None:
        changed_RV = jnp.where(valid_V[None], changed_RV, -jnp.inf)
    if allowed_RW is not None:
        changed_RV = jnp.where(_bits_of(allowed_RW, changed_RV.shape[-1]), changed_RV, -jnp.inf)
    return changed_RV


def _bits_of(words_RW: jax.Array, V: int) -> jax.Array:
    """Return the first V bits of each row of words, bool [R, V], the lowest bit of a word first."""
    bits_RWB = words_RW[..., None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & 1
    return bits_RWB.reshape(len(words_RW), -1)[:, :V] == 1


def filtered(logits_RV: jax.Array, how: RowSampling) -> jax.Array:
    """Return p / largest p of softmax(logits / temperature), 0 for tokens that top-k, top-p and min-p exclude.

    Probabilities that are equal in float32 stay or go together. Nothing is excluded from rows of temperature 0, which
    has no softmax.
    """
    distance_RV, mass_RV = _distance_and_mass(logits_RV, how)
    return _Filters.of(how, logits_RV.shape[-1]).left(distance_RV, mass_RV)


def _distance_and_mass(logits_RV: jax.Array, how: RowSampling) -> tuple[jax.Array, jax.Array]:
    """Return ln(largest p / p) and p / largest p of softmax(logits / temperature)."""
    largest_R1 = _at(logits_RV, jnp.argmax(logits_RV, axis=-1))[:, None]
    # The largest logit is subtracted before it can overflow.
    temperature_R = jnp.where(how.temperature > 0.0, how.temperature, 1.0)
    distance_RV = (largest_R1 - logits_RV) / temperature_R[:, None]
    return distance_RV, jnp.exp(-distance_RV)


class _Filters(NamedTuple):
    """The filters of each row, for a vocabulary of V tokens. A row that takes the likeliest token has none.

    `top_k_R`: int32; V excludes nothing. `tail_R`, `farthest_R`: float32, as `RowSampling` has them.
    """

    top_k_R: jax.Array
    tail_R: jax.Array
    farthest_R: jax.Array
    V: int

    @classmethod
    def of(cls, how: RowSampling, V: int) -> "_Filters":
        is_drawn_R = how.temperature > 0.0
        return cls(
            jnp.where(is_drawn_R, jnp.minimum(how.top_k, V), V),
            jnp.where(is_drawn_R, how.tail, 0.0),
            jnp.where(is_drawn_R, how.farthest, jnp.inf),
            V,
        )

    @property
    def filters_R(self) -> jax.Array:
        """bool [R], true where a filter may exclude tokens."""
        return (self.top_k_R < self.V) | (self.tail_R > 0.0) | (self.farthest_R < jnp.inf)

    def left(self, distance_RV: jax.Array, mass_RV: jax.Array) -> jax.Array:
        """Return the masses (p / largest p) of the tokens that are left, 0 for those that a filter excludes.
        `distance_RV`: ln(largest p / p)."""
        V, top_k_R, tail_R, farthest_R = self.V, self.top_k_R, self.tail_R, self.farthest_R

        def few_tokens() -> jax.Array:
            nearest_RK, _ = jax.lax.top_k(-distance_RV, min(V, _FEW))
            return -_at(nearest_RK, jnp.minimum(top_k_R, _FEW) - 1)

        def many_tokens() -> jax.Array:
            # A token stays while fewer than k are likelier, that is, while more than all but k are as likely at most.
            return _largest(lambda at_R: jnp.sum(distance_RV >= at_R[:, None], axis=-1) > V - top_k_R, len(top_k_R))

        def likeliest() -> jax.Array:
            kth_R = _if_any((top_k_R > _FEW) & (top_k_R < V), many_tokens, few_tokens)
            return jnp.where(distance_RV <= jnp.where(top_k_R < V, kth_R, jnp.inf)[:, None], mass_RV, 0.0)

        def nucleus() -> jax.Array:
            # A token goes while it and all less likely ones hold 1 − top_p at most: sums of small numbers, for which
            # float32 is exact enough. The likeliest always stays.
            limit_R = tail_R * _total(likeliest_RV)
            least_R = _largest(
                lambda at_R: _total(jnp.where(likeliest_RV <= at_R[:, None], likeliest_RV, 0.0)) <= limit_R,
                len(limit_R),
            )
            stays_RV = (likeliest_RV > least_R[:, None]) | (distance_RV == 0.0) | (tail_R == 0.0)[:, None]
            return jnp.where(stays_RV, likeliest_RV, 0.0)

        likeliest_RV = _if_any(top_k_R < V, likeliest, lambda: mass_RV)
        nucleus_RV = _if_any(tail_R > 0.0, nucleus, lambda: likeliest_RV)
        return _if_any(
            farthest_R < jnp.inf,
            lambda: jnp.where(distance_RV <= farthest_R[:, None], nucleus_RV, 0.0),
            lambda: nucleus_RV,
        )


def _largest(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """Return the largest float32 of each row, from 0, for which `holds` is true, as it is for all below.

    Floats that are not negative are ordered as their bits, which are found one by one from the highest: 31 sums over a
    vocabulary instead of a sort.
    """

    def with_bit(at: jax.Array, bits_R: jax.Array) -> jax.Array:
        trial_R = bits_R | (1 << (30 - at))
        return jnp.where(holds(jax.lax.bitcast_convert_type(trial_R, jnp.float32)), trial_R, bits_R)

    bits_R = jax.lax.fori_loop(0, 31, with_bit, jnp.zeros(rows, jnp.int32))
    return jax.lax.bitcast_convert_type(bits_R, jnp.float32)


def pick(mass_RV: jax.Array, bits_R: jax.Array) -> jax.Array:
    """Return the token, int32 [R], at which the sum of probabilities over ids passes a random share of the whole.

    Args:
      mass_RV: float32, probabilities times one number of a row; the largest is 1.
      bits_R: uint32, random.

    Probabilities are rounded to multiples of 2^-30: sums of integers are exact, and 32 bits could tell few more apart.
    """
    weight_RV = jnp.round(mass_RV * (2.0**30 / _total(mass_RV))[:, None]).astype(jnp.int32)
    blocks_RNL = jnp.pad(weight_RV, ((0, 0), (0, -weight_RV.shape[-1] % _BLOCK))).reshape(len(bits_R), -1, _BLOCK)
    upto_RN = jnp.cumsum(jnp.sum(blocks_RNL, axis=-1), axis=-1)
    target_R = _share(bits_R, upto_RN[:, -1])
    block_R = jnp.sum(upto_RN <= target_R[:, None], axis=-1)
    block_RL = jnp.take_along_axis(blocks_RNL, block_R[:, None, None], axis=1)[:, 0]
    target_R -= _at(upto_RN, block_R) - jnp.sum(block_RL, axis=-1)  # within the block
    return block_R * _BLOCK + jnp.sum(jnp.cumsum(block_RL, axis=-1) <= target_R[:, None], axis=-1)


def _share(bits_R: jax.Array, whole_R: jax.Array) -> jax.Array:
    """Return ⌊bits · whole / 2³²⌋, int32, of uint32 bits and int32 numbers that are not negative.

    `jax.lax.mulhi` would be this, but does not compile for several devices in JAX 0.10.
    """
    whole_R, half = whole_R.astype(jnp.uint32), jnp.uint32(0xFFFF)
    low_R, high_R = (bits_R & half) * (whole_R & half), (bits_R >> 16) * (whole_R >> 16)
    one_R, other_R = (bits_R >> 16) * (whole_R & half), (bits_R & half) * (whole_R >> 16)
    carry_R = ((low_R >> 16) + (one_R & half) + (other_R & half)) >> 16
    return (high_R + (one_R >> 16) + (other_R >> 16) + carry_R).astype(jnp.int32)


def _logprobs(
    logits_RV: jax.Array, token_R: jax.Array, count_R: jax.Array, valid_V: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the fields of Drawn beside the token. `count_R`: the rows' `RowSampling.logprobs`."""
    size = len(token_R), min(MAX_LOGPROBS, logits_RV.shape[-1])

    def some() -> tuple[jax.Array, jax.Array, jax.Array]:
        distance_RV = logits_RV - _at(logits_RV, jnp.argmax(logits_RV, axis=-1))[:, None]
        ln_total_R = jnp.log(_total(jnp.exp(distance_RV)))
        drawn_R = jnp.where(count_R >= 0, _at(distance_RV, token_R) - ln_total_R, jnp.nan)
        top_RK, id_RK = jax.lax.top_k(
            distance_RV if valid_V is None else jnp.where(valid_V[None], distance_RV, -jnp.inf), size[1]
        )
        is_asked_RK = (jnp.arange(size[1])[None] < count_R[:, None]) & (top_RK > -jnp.inf)
        return (
            jnp.where(token_R == NO_TOKEN, jnp.nan, drawn_R),
            jnp.where(is_asked_RK, id_RK, NO_TOKEN),
            jnp.where(is_asked_RK, top_RK - ln_total_R[:, None], -jnp.inf),
        )

    def none() -> tuple[jax.Array, jax.Array, jax.Array]:
        return jnp.full(size[0], jnp.nan), jnp.full(size, NO_TOKEN), jnp.full(size, -jnp.inf)

    return _if_any(count_R >= 0, some, none)


def _if_any(is_row_R: jax.Array, compute: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return the result of `compute` where `is_row_R` is true of any row, else the result of `otherwise`."""
    return jax.lax.cond(jnp.any(is_row_R), compute, otherwise)


def _bits(how: RowSampling, position_R: jax.Array) -> jax.Array:
    """Return 32 random bits of each row: Threefry-2x32 of the position and the seed's upper half under the key of its
    lower half and the stream (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    bits_R, _ = threefry2x32_p.bind(how.seed, how.stream, position_R.astype(jnp.uint32), how.seed_high)
    return bits_R


def _at(values_RV: jax.Array, index_R: jax.Array) -> jax.Array:
    """Return one value of each row."""
    return jnp.take_along_axis(values_RV, index_R[:, None], axis=-1)[:, 0]


def _total(values_RV: jax.Array) -> jax.Array:
    """Return the sum of each row: on a CPU in an order that depends on the length of a row alone.

    Within a loop a TPU would turn the rows around to cut them, and pad two rows to 64 times their size.
    """
    return jax.lax.platform_dependent(values_RV, cpu=_in_order, default=partial(jnp.sum, axis=-1))


def _in_order(values_RV: jax.Array) -> jax.Array:
    """Return the sum of each row by pairs of its parts."""
    while values_RV.shape[-1] > 1:
        filled_RV = jnp.pad(values_RV, ((0, 0), (0, -values_RV.shape[-1] % _PARTS)))
        parts = jnp.split(filled_RV, _PARTS, axis=-1)
        while len(parts) > 1:
            parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
        (values_RV,) = parts
    return values_RV[:, 0]
