"""Attention masks: intervals, their unions, and the blocks of scores that follow from them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrices import sampled
from test_flash_attention import drawn

from kernels_pallas import flash_attention
from kernels_pallas.core import interpreted
from kernels_pallas.core.attention.key_range import clipped
from kernels_pallas.flash_attention import (
    KeyRange,
    blocks,
    causal,
    costs,
    intersection,
    packed,
    prefix_lm,
    shifted,
    sliding_window,
    union,
)
from kernels_pallas.flash_attention.cases import first, segments
from kernels_pallas.flash_attention.operands import unmasked_scores

IDS = np.array([[3, 3, 3, 1, 1, -1, -1], [0, 0, 7, 7, 7, 7, 0]])


@pytest.mark.parametrize(
    "key_range, unmasked",
    [
        (causal(7), lambda b, t, s: s <= t),
        (causal(7, offset=jnp.array([0, 4])), lambda b, t, s: s <= t + 4 * b),
        (sliding_window(7, 2, offset=1), lambda b, t, s: t - 1 <= s <= t + 1),
        (sliding_window(7, None, after=1), lambda b, t, s: s <= t + 1),
        (sliding_window(7, 1, after=None), lambda b, t, s: s >= t - 1),
        (prefix_lm(7, 3), lambda b, t, s: s < 3 or s <= t),
        (prefix_lm(7, jnp.array([0, 5])), lambda b, t, s: s < 5 * b or s <= t),
        (packed(IDS), lambda b, t, s: IDS[b, t] >= 0 and (b, t, s) not in APART and IDS[b, t] == IDS[b, s]),
        (
            intersection(causal(7), packed(IDS), sliding_window(7, 1)),
            lambda b, t, s: IDS[b, t] == IDS[b, s] >= 0 and t - 1 <= s <= t,
        ),
        (shifted(causal(7), 2), lambda b, t, s: s + 2 <= t),
        (
            intersection(causal(7), union(first(7, 2), sliding_window(7, 1))),
            lambda b, t, s: s <= t and (s < 2 or s >= t - 1),
        ),
        (union(segments(3, 4), segments(2, 5)), lambda b, t, s: t == 2 or (t < 2 and s < 3) or (t > 2 and s >= 2)),
        (
            intersection(packed(IDS), union(first(7, 1), shifted(first(7, 1), -6))),
            lambda b, t, s: s in (0, 6) and (b, t, s) not in APART and IDS[b, t] == IDS[b, s] >= 0,
        ),
        (
            intersection(union(first(7, 2), sliding_window(7, 0)), union(first(7, 1), sliding_window(7, 1))),
            lambda b, t, s: s < 1 or s == t or (s < 2 and t - 1 <= s <= t),
        ),
        (shifted(union(first(7, 3), sliding_window(7, 1)), 2), lambda b, t, s: s + 2 < 3 or t - 1 <= s + 2 <= t),
        (segments(3, 1, 3), lambda b, t, s: [0, 0, 0, 1, 2, 2, 2][t] == [0, 0, 0, 1, 2, 2, 2][s]),
    ],
    ids=[
        "causal",
        "offset",
        "window",
        "ahead",
        "back",
        "prefix",
        "prefixes",
        "packed",
        "intersection",
        "shifted",
        "first and window",
        "overlapping",
        "union of packed",
        "intersection of unions",
        "shifted union",
        "segments",
    ],
)
def test_intervals_equal_dense_masks(key_range, unmasked):
    start, end = clipped(key_range, 2, 7, 7)
    got = [
        [[int(np.sum((start[:, b, t] <= s) & (s < end[:, b, t]))) for s in range(7)] for t in range(7)] for b in (0, 1)
    ]
    assert got == [[[bool(unmasked(b, t, s)) for s in range(7)] for t in range(7)] for b in range(2)]


# The last token of the second row has the id of its first two, but is a separate segment.
APART = {(1, 6, 0), (1, 6, 1), (1, 0, 6), (1, 1, 6)}


def test_ranges_hold_all_unmasked_blocks_and_full_blocks_are_full():
    """Compare with the dense mask, for random intervals, some of them empty."""
    T, S, queries, keys = 50, 70, 8, 16
    low, high = np.random.default_rng(0).integers(0, S + 1, (2, 40, T))
    key_range = np.maximum(low, 0), np.where(np.arange(40)[:, None] % 2, high, S)
    unmasked = (key_range[0][..., None] <= np.arange(S)) & (np.arange(S) < key_range[1][..., None])
    unmasked = np.pad(unmasked, ((0, 0), (0, -T % queries), (0, -S % keys)))
    tiles = unmasked.reshape(40, -(-T // queries), queries, -(-S // keys), keys).transpose(0, 1, 3, 2, 4)
    some_unmasked, all_unmasked = tiles.any((-1, -2)), tiles.all((-1, -2))
    of_queries = blocks.key_ranges(*map(jnp.asarray, key_range), queries, keys)
    of_keys = blocks.query_ranges(of_queries, some_unmasked.shape[2])
    for ranges, axes in ((of_queries, (0, 1, 2)), (of_keys, (0, 2, 1))):
        some, whole = (x.transpose(axes) for x in (some_unmasked, all_unmasked))
        first, full, full_end, last = (np.asarray(x)[..., None] for x in ranges)
        index = np.arange(some.shape[2])
        assert np.all((0 <= first) & (first <= full) & (full <= full_end) & (full_end <= last))
        assert np.all((first <= index) & (index < last) | ~some)
        assert np.all(~((full <= index) & (index < full_end)) | whole)
        assert np.any(full < full_end)
    # Blocks that add to the same block of queries do so in order.
    orders = np.asarray(blocks.add_order(of_keys, some_unmasked.shape[1])).transpose(0, 2, 1)
    i = np.arange(some_unmasked.shape[1])[:, None]
    through = (np.asarray(of_keys.first)[:, None] <= i) & (i < np.asarray(of_keys.last)[:, None])
    for these, goes in zip(orders.reshape(-1, orders.shape[2]), through.reshape(-1, orders.shape[2]), strict=True):
        assert these[goes].tolist() == list(range(goes.sum()))


BEYOND = [
    (np.zeros((1, 20), np.int64), np.full((1, 20), 2**40)),
    (np.full((1, 20), -(2**40)), np.full((1, 20), 2**64 - 1, np.uint64)),
    (np.zeros((1, 20), np.uint32), np.full((1, 20), 2**32 - 1, np.uint32)),
    (np.zeros((1, 20), np.int8), np.full((1, 20), 127, np.int8)),
    shifted(sliding_window(20, 3, after=None, offset=9), -5)._replace(start=np.zeros((1, 20), int)),
]


@pytest.mark.parametrize("implementation", sampled(["reference", "triton", "mosaic_tpu"], ["reference", "triton"]))
@pytest.mark.parametrize("key_range", BEYOND, ids=["int64", "uint64", "uint32", "int8", "no limit"])
@interpreted()
def test_what_lies_beyond_the_keys_is_cut_off_in_any_dtype(key_range, implementation):
    arrays = drawn((1, 20, 1, 16), (1, 30, 1, 16), (1, 30, 1, 16))
    attend = functools.partial(flash_attention, *arrays, implementation=implementation)
    chex.assert_trees_all_equal(attend(key_range=key_range), attend())
    assert unmasked_scores(key_range, 1, 20, 30) == (20 * 30,)


@pytest.mark.parametrize("implementation", sampled(["reference", "triton", "mosaic_tpu"], ["reference", "mosaic_tpu"]))
@interpreted()
def test_a_union_is_attention_under_its_mask(implementation):
    """Unions of overlapping, touching and separate intervals in packed rows, with padding, against plain softmax."""
    ids = np.repeat([[0, 0, 1, 1, 1, -1], [2, 3, 3, 3, 3, 3]], 20, axis=1)
    query, key, value = drawn((2, 120, 2, 16), (2, 120, 2, 16), (2, 120, 2, 16))
    pulls = drawn((2, 120, 2, 16), (2, 120, 2), seed=1)
    t, s = np.arange(120)[:, None], np.arange(120)
    mask = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[..., None] & (s <= t) & ((s < 47) | (s >= t - 30))
    empty = ~mask.any(-1)[..., None]

    def plain(query, key, value):
        scores = jnp.where(mask[:, None], jnp.einsum("btnh,bsnh->bnts", query, key) / 4, -1e30)
        log_sum_exp = jnp.swapaxes(jax.nn.logsumexp(scores, axis=-1), 1, 2)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)
        return jnp.where(empty[..., None], 0.0, out), jnp.where(empty, 0.0, log_sum_exp)

    def ours(query, key, value):
        key_range = intersection(causal(120), packed(ids), union(first(120, 47), sliding_window(120, 30)))
        options = dict(key_range=key_range, return_log_sum_exp=True, implementation=implementation)
        out, log_sum_exp = flash_attention(query, key, value, **options)
        return out, jnp.where(empty & (log_sum_exp == -jnp.inf), 0.0, log_sum_exp)

    def results_and_gradients(attend):
        results, pull_back = jax.vjp(attend, query, key, value)
        return results, pull_back(tuple(pulls))

    chex.assert_trees_all_close(
        *map(jax.jit(results_and_gradients, static_argnums=0), (ours, plain)), rtol=1e-4, atol=1e-5
    )


def test_a_union_costs_the_unmasked_scores_of_each_interval():
    x = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.float32)
    whole = costs(x, x, x)
    overlapping = costs(x, x, x, key_range=union(first(64, 40), shifted(first(64, 40), -24)))
    assert overlapping.forward.flops == whole.forward.flops
    assert overlapping.backward.bytes == 2 * whole.backward.bytes
    assert (
        costs(x, x, x, key_range=union(causal(64), first(64, 0))).forward.flops
        == costs(x, x, x, key_range=causal(64)).forward.flops
    )


def test_intervals_of_any_integer_dtype_meet_and_are_shifted():
    """Numbers that int32 cannot hold are far beyond the keys, and stay beyond them."""
    for dtype, far in (
        (np.int64, 2**40),
        (np.int64, np.iinfo(np.int64).max),
        (np.uint64, 2**63),
        (np.uint32, 2**32 - 1),
    ):
        everything = KeyRange(np.zeros((1, 5), dtype), np.full((1, 5), far, dtype))
        for met in (
            intersection(packed(jnp.zeros((1, 5), int)), everything),
            union(packed(jnp.arange(5)[None]), everything),
        ):
            lengths = np.maximum(np.subtract(*reversed(clipped(met, 1, 5, 5))), 0)
            assert np.all(np.sum(lengths, axis=0) == 5)
        start, end = shifted(everything, 5)
        assert np.all(start == -5) and np.all(end > 5)
    wide = shifted(KeyRange(jnp.zeros((1, 4), jnp.uint8), jnp.full((1, 4), 200, jnp.uint8)), 1)
    assert np.all(wide.start == -1) and np.all(wide.end == 199)
    limit = sliding_window(4, None, 2**28, offset=2**28)
    assert np.all(shifted(limit, 2**28).end > 2**28) and np.all(shifted(causal(4, offset=2**28), 2**28).end > 0)
    narrow = shifted(shifted(KeyRange(np.zeros((1, 5), np.int8), np.full((1, 5), 100, np.int8)), 100), 100)
    assert np.all(narrow.start == -200) and np.all(narrow.end == -100)


def test_segments_may_have_ids_of_any_width():
    """Ids may be hashes of documents: a difference in the upper half is another segment, and negative is padding."""
    wide = packed(np.array([[5, 5, 5 + 2**32, 2**31, -1 - 2**32]]))
    narrow = packed(jnp.array([[5, 5, 6, 7, -1]]))
    chex.assert_trees_all_equal(wide, narrow)
    assert np.all(packed(jnp.array([[1, 2**32 - 1]], jnp.uint32)).end == np.array([[1, 2]]))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: causal(20, offset=2**31), "offset = 2147483648; it must be between"),
        (lambda: causal(20, offset=1.5), "offset = 1.5; it must be a whole number"),
        (lambda: sliding_window(20, 4.5), "before = 4.5; it must be a whole number"),
        (lambda: sliding_window(20, None, after=2**31 - 5), "after = 2147483643; it must be between"),
        (lambda: sliding_window(20, -1), "before = -1; it must be 0 or more"),
        (lambda: sliding_window(20, None, after=-1), "after = -1; it must be 0 or more"),
        (lambda: causal(-1), "queries = -1; it must be 0 or more"),
        (lambda: prefix_lm(20, 2**31), "length = 2147483648; it must be between"),
        (lambda: packed(jnp.zeros((1, 5))), r"packed: segment_ids is float32\[1, 5\]"),
        (lambda: packed(jnp.zeros(5, int)), r"packed: segment_ids is int32\[5\]; it must be int\[B, T\]"),
        (lambda: intersection(causal(20), causal(21)), "intersection: its masks are of 20, 21 queries"),
        (lambda: intersection(causal(20), causal(1)), "intersection: its masks are of 1, 20 queries"),
        (lambda: union(), "union: its masks are of none queries"),
        (lambda: packed(None), r"packed: segment_ids is None; it must be an array, int\[B, T\]"),
        (lambda: packed([[0, 0, 1]]), "packed: segment_ids is of type list; it must be an array"),
        (lambda: causal(4, [1, 2]), r"offset = \[1, 2\]; it must be a whole number"),
        (lambda: intersection(causal(20), None), "intersection: None is no KeyRange"),
        (
            lambda: intersection(packed(jnp.zeros((2, 5), int)), packed(jnp.zeros((3, 5), int))),
            r"of batches of \[2, 3\]",
        ),
        (
            lambda: intersection(prefix_lm(4, jnp.ones(3, int)), prefix_lm(4, jnp.ones(2, int))),
            r"of batches of \[2, 3\]",
        ),
        (lambda: union(KeyRange(np.zeros((1, 4), int), np.ones((1, 5), int))), "its masks are of 4, 5 queries"),
        (lambda: causal(4, np.array([0, 2**40])), r"offset = \[ *0 1099511627776\]; it must be between"),
        (lambda: shifted(causal(4), np.array([-(2**30)])), r"first_key = \[-1073741824\]; it must be between"),
        (lambda: shifted(causal(4), -(2**30)), "first_key = -1073741824; it must be between"),
        (lambda: causal(4, jnp.full((2,), 7, jnp.uint32)), r"offset is uint32\[2\]; it must be int32\[B\]"),
        (lambda: causal(4, jnp.uint32(7)), r"offset is uint32\[\]; it must be int32\[\]"),
        (lambda: shifted(KeyRange(*jnp.zeros((2, 1, 4), jnp.uint32)), 1), r"shifted: start is uint32\[1, 4\]"),
        (
            lambda: intersection((np.zeros((1, 5)), np.ones((1, 5)))),
            r"intersection: start is float64\[1, 5\]; it must be int32\[B, T\]",
        ),
        (lambda: shifted(causal(4), 1.5), "first_key = 1.5; it must be a whole number"),
        (lambda: shifted(causal(4), np.zeros((1, 4), int)), r"first_key is int64\[1, 4\]; it must be int32\[B\]"),
        (lambda: causal(4, np.array([1.7])), r"offset is float64\[1\]; it must be int32\[B\]"),
        (lambda: sliding_window(4, jnp.arange(4)), r"before = .* must be a whole number"),
        (lambda: sliding_window(4, jnp.float32(1.5)), r"before is float32\[\]; it must be int32\[\]"),
    ],
)
def test_what_makes_no_intervals_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
