"""Paged attention against the reference, and its promise that a row depends on its own sequence alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrices import sampled

from kernels_pallas.paged_attention import paged_attention

PAGES, K, S, H, M = 23, 2, 16, 8, 5


def drawn(groups, dtype="float32", seed=0):
    """Return pages of keys and of values, and a function that draws queries."""
    random = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(random.standard_normal(shape, np.float32)).astype(dtype)

    return draw(PAGES, K, H, S), draw(PAGES, K, S, H), lambda Q, T: draw(Q, T, K * groups, H)


def tables(*rows):
    """Return tables of these pages, filled up with page 0."""
    return jnp.asarray([[*row, *[0] * (M - len(row))] for row in rows], jnp.int32)


def ranges(*rows):
    """Return the key range of rows of (start, end)."""
    both = np.asarray(rows, np.int32)
    return jnp.asarray(both[..., 0]), jnp.asarray(both[..., 1])


TABLE = tables([3, 7, 1], [4], [9, 8, 11, 2, 6])
SEEN = ranges([(0, 37), (0, 38)], [(0, 0), (0, 1)], [(41, 72), (42, 73)])


CAPPED = {"scale": 0.3, "soft_cap": 2.0}
FORMS = itertools.product([1, 3], [{}, CAPPED], ["float32", "bfloat16"])


@pytest.mark.parametrize(
    ("groups", "options", "dtype"),
    sampled(
        [pytest.param(*form, id=f"{form[0]}-{'capped' if form[1] else 'plain'}-{form[2]}") for form in FORMS],
        ["1-plain-bfloat16", "3-capped-float32", "3-plain-float32"],
    ),
)
def test_it_is_the_reference(groups, options, dtype):
    key, value, query = drawn(groups, dtype)
    q = query(3, 2)
    made, expected = (
        paged_attention(q, key, value, TABLE, key_range=SEEN, implementation=name, **options)
        for name in ("xla", "reference")
    )
    assert made.dtype == q.dtype and not made[1, 0].any()
    # float32: sums in another order; bfloat16: one rounding of numbers up to 2.
    np.testing.assert_allclose(
        np.float32(made), np.float32(expected), rtol=0, atol=2e-6 if dtype == "float32" else 2e-2
    )


def test_rows_depend_on_their_own_sequence_alone_to_the_bit():
    """Compare with each row alone, in other pages, beside longer ones, and beside pages that hold NaN."""
    key, value, query = drawn(3)
    q, attend = query(3, 2), jax.jit(paged_attention)
    together = np.asarray(attend(q, key, value, TABLE, key_range=SEEN))
    moved = np.random.default_rng(1).permutation(PAGES)
    where = np.argsort(moved)[np.asarray(TABLE)].astype(np.int32)
    np.testing.assert_array_equal(attend(q, key[moved], value[moved], jnp.asarray(where), key_range=SEEN), together)

    unseen = np.ones((PAGES, S), bool)
    for row, start, end in zip(np.asarray(TABLE), *(np.asarray(x) for x in SEEN), strict=True):
        for position in range(start.min(), end.max()):
            unseen[row[position // S], position % S] = False
    spoiled = [
        jnp.where(where, jnp.nan, x) for where, x in ((unseen[:, None, None], key), (unseen[:, None, :, None], value))
    ]
    np.testing.assert_array_equal(attend(q, *spoiled, TABLE, key_range=SEEN), together)

    for i in range(3):
        for t in range(2):
            seen = tuple(x[i : i + 1, t : t + 1] for x in SEEN)
            alone = attend(q[i : i + 1, t : t + 1], key, value, TABLE[i : i + 1], key_range=seen)
            np.testing.assert_array_equal(alone[0, 0], together[i, t])


@pytest.mark.parametrize(
    ("heads", "groups", "width", "size"), [(4, 1, 8, 32), (4, 2, 8, 128), (4, 2, 24, 128), (3, 1, 64, 128)]
)
def test_a_row_is_computed_in_one_way_however_many_there_are(heads, groups, width, size):
    """Compare rows of one sequence by themselves with rows of a run, to the bit."""
    random = np.random.default_rng(0)
    key, value, q = (
        jnp.asarray(random.standard_normal(shape, np.float32))
        for shape in [(4, heads, width, size), (4, heads, size, width), (1, 32, heads * groups, width)]
    )
    table, end = jnp.asarray([[2, 1, 3]]), size + 6 + jnp.arange(32)[None]
    attend = jax.jit(paged_attention)
    together = attend(q, key, value, table, key_range=(jnp.zeros_like(end), end))[0, :8]
    one = jnp.swapaxes(end[:, :8], 0, 1)
    tables_81 = jnp.broadcast_to(table, (8, 3))
    alone = attend(jnp.swapaxes(q[:, :8], 0, 1), key, value, tables_81, key_range=(jnp.zeros_like(one), one))
    np.testing.assert_array_equal(alone[:, 0], together)


def test_what_does_not_fit_is_refused():
    key, value, query = drawn(3)
    q = query(3, 2)
    for operands, message in [
        ((q, key, value[..., :4, :], TABLE), "one dtype"),
        ((q, jnp.swapaxes(key, 2, 3), value, TABLE), r"\[P, K, H, S\]"),
        ((q[:, :, :5], key, value, TABLE), "no multiple of 2"),
        ((q[:2], key, value, TABLE), "2 sequences"),
        ((q[..., None], key, value, TABLE), "4, 4, 4 and 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            paged_attention(*operands, key_range=SEEN)
    with pytest.raises(ValueError, match="key_range"):
        paged_attention(q, key, value, TABLE, key_range=tuple(x[:2] for x in SEEN))
