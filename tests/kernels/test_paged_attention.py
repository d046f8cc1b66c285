"""Paged attention against the reference, and its promise that a row depends on its own sequence alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrices import sampled

from kernels_pallas import paged_attention
from kernels_pallas.core import interpreted, target
from kernels_pallas.core.fp8 import from_bytes
from kernels_pallas.core.rounding import rounded_rows
from kernels_pallas.flash_attention import KeyRange
from kernels_pallas.paged_attention import xla
from kernels_pallas.paged_attention.costs import LANES, SPLIT, block_trips

PAGES, K, S, H, M = 23, 2, 16, 8, 5
SIZES = {"xla": S, "triton": S, "mosaic_tpu": 128}  # tokens of a page that each implementation serves


def drawn(groups, dtype="float32", seed=0, size=S):
    """Return pages of keys and of values, and a function that draws queries."""
    random = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(random.standard_normal(shape, np.float32)).astype(dtype)

    return draw(PAGES, K, H, size), draw(PAGES, K, size, H), lambda Q, T: draw(Q, T, K * groups, H)


def tables(*rows):
    """Return tables of these pages, filled up with page 0."""
    return jnp.asarray([[*row, *[0] * (M - len(row))] for row in rows], jnp.int32)


def ranges(*rows, size=S):
    """Return the key range of rows of (start, end), in sixteenths of a page."""
    both = np.asarray(rows, np.int32) * (size // S)
    return jnp.asarray(both[..., 0]), jnp.asarray(both[..., 1])


TABLE = tables([3, 7, 1], [4], [9, 8, 11, 2, 6])
SEEN = [(0, 37), (0, 38)], [(0, 0), (0, 1)], [(41, 72), (42, 73)]


CAPPED = {"scale": 0.3, "soft_cap": 2.0}
NAMES = list(SIZES)
FORMS = itertools.product([1, 3], [{}, CAPPED], ["float32", "bfloat16"], NAMES)


@interpreted()
def attend(name, *operands, **options):
    """Call an implementation, interpreted."""
    return paged_attention(*operands, implementation=name, **options)


@pytest.mark.parametrize(
    ("groups", "options", "dtype", "name"),
    sampled(
        [pytest.param(*form, id=f"{form[0]}-{'capped' if form[1] else 'plain'}-{form[2]}-{form[3]}") for form in FORMS],
        [
            *("1-plain-bfloat16-xla", "3-capped-float32-xla"),
            *("1-plain-bfloat16-triton", "3-capped-float32-triton", "3-capped-bfloat16-mosaic_tpu"),
        ],
    ),
)
def test_it_is_the_reference(groups, options, dtype, name):
    (key, value, query), seen = drawn(groups, dtype, size=SIZES[name]), ranges(*SEEN, size=SIZES[name])
    q = query(3, 2)
    made = attend(name, q, key, value, TABLE, key_range=seen, **options)
    expected = paged_attention(q, key, value, TABLE, key_range=seen, implementation="reference", **options)
    assert made.dtype == q.dtype and not made[1, 0].any()
    # float32: sums in another order; bfloat16: one rounding of numbers up to 2.
    np.testing.assert_allclose(
        np.float32(made), np.float32(expected), rtol=0, atol=2e-6 if dtype == "float32" else 2e-2
    )


@pytest.mark.parametrize("name", NAMES)
def test_ranges_are_clipped_to_the_keys(name):
    """Beside a longer range, whose pages a loop over pages reads for every sequence."""
    (key, value, query), size = drawn(1, size=SIZES[name]), SIZES[name]
    q, table = query(3, 2), tables([3, 7, 1, 2, 8], [4, 5, 6, 9, 2], [9, 8, 11, 2, 6])
    seen = ranges([(-40, 48), (0, 144)], [(-48, 32), (16, 81)], [(90, 90), (100, 90)], size=size)
    made = program(name)(q, key, value, table, key_range=seen)
    expected = paged_attention(q, key, value, table, key_range=seen, implementation="reference")
    np.testing.assert_allclose(made, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("name", "sinks"), [*((name, False) for name in NAMES), ("xla", True), ("triton", True)])
def test_rows_depend_on_their_own_sequence_alone_to_the_bit(name, sinks):
    """Compare with each row alone, in other pages, beside longer ones, and beside pages that hold NaN."""
    size = SIZES[name]
    (key, value, query), seen = drawn(3, size=size), ranges(*SEEN, size=size)
    options = {"sinks": jnp.linspace(-2.0, 2.0, 3 * K)} if sinks else {}
    q, attend = query(3, 2), functools.partial(program(name), **options)
    together = np.asarray(attend(q, key, value, TABLE, key_range=seen))
    moved = np.random.default_rng(1).permutation(PAGES)
    where = np.argsort(moved)[np.asarray(TABLE)].astype(np.int32)
    np.testing.assert_array_equal(attend(q, key[moved], value[moved], jnp.asarray(where), key_range=seen), together)

    unseen = np.ones((PAGES, size), bool)
    for row, start, end in zip(np.asarray(TABLE), *(np.asarray(x) for x in seen), strict=True):
        for position in range(start.min(), end.max()):
            unseen[row[position // size], position % size] = False
    spoiled = [
        jnp.where(where, jnp.nan, x) for where, x in ((unseen[:, None, None], key), (unseen[:, None, :, None], value))
    ]
    np.testing.assert_array_equal(attend(q, *spoiled, TABLE, key_range=seen), together)

    # XLA's code for a CPU rounds otherwise in the interpreter's programs of another number of queries.
    at_once = 2 if name == "mosaic_tpu" else 1
    for i in range(3):
        for t in range(0, 2, at_once):
            part = slice(i, i + 1), slice(t, t + at_once)
            alone = attend(q[part], key, value, TABLE[part[0]], key_range=tuple(x[part] for x in seen))
            np.testing.assert_array_equal(alone, together[part])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_are_a_part_of_the_keys_are_those_values_to_the_bit(dtype):
    """By XLA: promises of rows then hold for them too; beside NaN in what nobody sees."""
    (key, _, query), seen = drawn(3, dtype), ranges(*SEEN)
    q, width = query(3, 2), 5
    apart = jnp.swapaxes(key[:, :, :width], 2, 3)
    attend = program("xla")
    expected = attend(q, key, apart, TABLE, key_range=seen)
    in_keys = jax.jit(lambda key: paged_attention(q, key, width, TABLE, key_range=seen, implementation="xla"))
    np.testing.assert_array_equal(np.float32(in_keys(key)), np.float32(expected))
    unseen = set(range(PAGES)) - set(np.asarray(TABLE).ravel().tolist())
    spoiled = key.at[jnp.asarray(sorted(unseen))].set(jnp.nan).at[4, ..., 8:].set(jnp.nan)
    np.testing.assert_array_equal(np.float32(in_keys(spoiled)), np.float32(expected))


def of_eight_bits(pages, dtype, *, tokens_last):
    """Return pages with the numbers of each token rounded, and their scales [P, K, 1, S]."""
    numbers, scales = rounded_rows(jnp.swapaxes(pages, 2, 3) if tokens_last else pages, dtype)
    return jnp.swapaxes(numbers, 2, 3) if tokens_last else numbers, jnp.swapaxes(scales, 2, 3)


@pytest.mark.parametrize(("dtype", "step"), [("int8", 1 / 254), ("float8_e4m3fn", 1 / 16)])
def test_pages_of_eight_bits_differ_by_the_rounding_of_their_numbers(dtype, step):
    """The bound: a number is off by half a step of int8, 1/254 of the largest of its token, or by 1/16 of itself. So
    are scores by so much of |q|·|k|, weights by the exponential of twice that, and results by both."""
    (key, value, query), seen = drawn(3), ranges(*SEEN)
    q = query(3, 2)
    (keys, of_keys), (values, of_values) = (
        of_eight_bits(pages, dtype, tokens_last=last) for pages, last in ((key, True), (value, False))
    )
    largest_key, largest = (jnp.max(jnp.abs(x)) for x in (key, value))
    near = (1 + 1e-5) * step  # of float32
    assert jnp.max(jnp.abs(keys.astype(jnp.float32) * of_keys - key)) <= near * largest_key
    assert jnp.max(jnp.abs(values.astype(jnp.float32) * jnp.swapaxes(of_values, 2, 3) - value)) <= near * largest
    call = functools.partial(paged_attention, key_range=seen, implementation="reference")
    got = call(q, keys, values, TABLE, key_scales=of_keys, value_scales=of_values)
    off = H**-0.5 * jnp.max(jnp.sum(jnp.abs(q), axis=-1)) * near * largest_key
    bound = largest * (near + jnp.expm1(2 * off))
    error = jnp.max(jnp.abs(got - call(q, key, value, TABLE)))
    assert 1e-4 < error <= bound


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_tokens_that_nobody_sees_change_nothing(name):
    size = SIZES[name]
    (key, value, query), seen = drawn(3, size=size), ranges(*SEEN, size=size)
    (keys, of_keys), (values, of_values) = (
        of_eight_bits(pages, "float8_e4m3fn", tokens_last=last) for pages, last in ((key, True), (value, False))
    )
    q, attend = query(3, 2), program(name)
    expected = attend(q, keys, values, TABLE, key_range=seen, key_scales=of_keys, value_scales=of_values)
    unseen = np.ones((PAGES, 1, 1, size), bool)
    for row, start, end in zip(np.asarray(TABLE), *(np.asarray(x) for x in seen), strict=True):
        for position in range(start.min(), end.max()):
            unseen[row[position // size], ..., position % size] = False
    spoiled = {"key_scales": jnp.where(unseen, jnp.nan, of_keys), "value_scales": jnp.where(unseen, jnp.nan, of_values)}
    values = jnp.where(jnp.swapaxes(unseen, 2, 3), jnp.nan, values).astype(values.dtype)
    np.testing.assert_array_equal(attend(q, keys, values, TABLE, key_range=seen, **spoiled), expected)


def test_scales_that_do_not_fit_are_refused():
    (key, value, query), seen = drawn(1), ranges(*SEEN)
    keys, of_keys = of_eight_bits(key, "int8", tokens_last=True)
    values, of_values = of_eight_bits(value, "int8", tokens_last=False)
    call = functools.partial(paged_attention, query(3, 2), table=TABLE, key_range=seen)
    for operands, message in [
        ({"key": keys, "value": values}, "key is int8; it must be of floating point"),
        ({"key": keys, "value": values, "key_scales": of_keys}, "value_scales is None"),
        ({"key": key, "value": value, "key_scales": of_keys, "value_scales": of_values}, "float32 with scales"),
        ({"key": keys, "value": values, "key_scales": of_keys[:, :, 0], "value_scales": of_values}, "key_scales is"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**operands)


def test_bytes_are_the_numbers_of_float8_e4m3fn():
    """GPUs before compute capability 8.9 have no instruction for them."""
    every = np.arange(256, dtype=np.uint8)
    expected = jax.lax.bitcast_convert_type(jnp.asarray(every), jnp.float8_e4m3fn).astype(jnp.float32)
    np.testing.assert_array_equal(from_bytes(jnp.asarray(every.view(np.int8))), expected)


@pytest.mark.parametrize("name", ["triton", "mosaic_tpu"])
def test_rows_of_latents_depend_on_their_own_sequence_alone_to_the_bit(name):
    """Beside others or alone, in other pages, and beside NaN in what nobody sees."""
    size, width = SIZES[name], 5
    (key, _, query), seen = drawn(3, size=size), ranges(*SEEN, size=size)
    q = query(3, 2)
    call = interpreted()(functools.partial(paged_attention, value=width, implementation=name))
    attend = jax.jit(lambda q, key, table, seen: call(q, key, table=table, key_range=seen))
    together = np.asarray(attend(q, key, TABLE, seen))
    expected = paged_attention(q, key, width, TABLE, key_range=seen, implementation="reference")
    np.testing.assert_allclose(together, expected, rtol=0, atol=2e-6)  # float32: sums in another order
    unseen = np.ones((PAGES, 1, 1, size), bool)
    for row, start, end in zip(np.asarray(TABLE), *(np.asarray(x) for x in seen), strict=True):
        for position in range(start.min(), end.max()):
            unseen[row[position // size], ..., position % size] = False
    np.testing.assert_array_equal(attend(q, jnp.where(unseen, jnp.nan, key), TABLE, seen), together)
    moved = np.random.default_rng(1).permutation(PAGES)
    where = jnp.asarray(np.argsort(moved)[np.asarray(TABLE)].astype(np.int32))
    np.testing.assert_array_equal(attend(q, key[moved], where, seen), together)
    for i in range(3):
        part = slice(i, i + 1)
        np.testing.assert_array_equal(attend(q[part], key, TABLE[part], tuple(x[part] for x in seen)), together[part])


@pytest.mark.parametrize(
    "value, implementation, said",
    [
        (9, "xla", "values of 9 channels are no part of keys"),
        (4, "mosaic_gpu", "values are a part of the keys"),
    ],
)
def test_values_that_are_no_part_of_the_keys_are_refused(value, implementation, said):
    (key, _, query), seen = drawn(1), ranges(*SEEN)
    with pytest.raises((ValueError, NotImplementedError), match=said):
        attend(implementation, query(3, 2), key, value, TABLE, key_range=seen)


def program(name):
    """Return an implementation, interpreted in one compiled program for each shape."""
    call = interpreted()(functools.partial(paged_attention, implementation=name))
    return jax.jit(call, static_argnames=("scale", "soft_cap"))


def in_float64(q, key, value, table, key_range, scale, cap):
    """Return attention in NumPy's float64, a row at a time."""
    start, end = (np.asarray(x) for x in key_range)
    (Q, T, N, _), K = q.shape, key.shape[1]
    attended = np.zeros((Q, T, N, value.shape[-1]))
    for i, t, n in np.ndindex(Q, T, N):
        keys = np.concatenate(np.asarray(key, np.float64)[table[i], n // (N // K)], axis=1)[:, start[i, t] : end[i, t]]
        values = np.concatenate(np.asarray(value, np.float64)[table[i], n // (N // K)])[start[i, t] : end[i, t]]
        scores = cap * np.tanh(scale * np.asarray(q, np.float64)[i, t, n] @ keys / cap)
        weights = np.exp(scores - scores.max(initial=-np.inf))
        attended[i, t, n] = weights @ values / weights.sum() if len(scores) else 0
    return attended


def test_splits_go_round_all_lanes_and_windows_begin_in_any():
    """More tokens than all lanes take at once, beside a window that begins within a split, and a row with no key."""
    size, heads, width = 64, 3, 24
    pages = (LANES + 3) * SPLIT // size
    random = np.random.default_rng(0)
    key, value, q = (
        jnp.asarray(random.standard_normal(shape, np.float32))
        for shape in [(pages + 1, 1, width, size), (pages + 1, 1, size, 40), (3, 2, heads, width)]
    )
    table = jnp.asarray(np.stack([1 + random.permutation(pages) for _ in range(3)]), jnp.int32)
    most = pages * size
    seen = ranges([(0, most - 70), (0, most)], [(3000, 3300), (3001, 3301)], [(0, 0), (700, 701)])
    made = program("triton")(q, key, value, table, key_range=seen, scale=0.4, soft_cap=9.0)
    expected = in_float64(q, key, value, np.asarray(table), seen, 0.4, 9.0)
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-6)  # sums of 9,000 weights, in float32


@pytest.mark.parametrize(("name", "size"), [("triton", 32), ("mosaic_tpu", 128)])
def test_no_surroundings_change_a_bit_of_a_row(name, size):
    """One sequence of two lanes, or of several blocks of pages, in 200 random surroundings: row of the batch, pages,
    lengths of the others, NaN in what others have and in what is left over of its pages; and in batches and tables of
    other sizes."""
    pages, length, width = 40, 9 * size + 13, 16
    random = np.random.default_rng(0)
    own_key, own_value, q = (
        random.standard_normal(shape).astype(np.float32)
        for shape in [(2, width, length), (2, length, width), (1, 1, 4, width)]
    )
    attend, own = program(name), -(-length // size)

    def surrounded(rows, most):
        """Return the sequence's row of a random batch of so many rows, whose tables have so many pages."""
        mine = random.permutation(pages)[:own]
        key, value = (
            np.full((pages, 2, width, size), np.nan, np.float32),
            np.full((pages, 2, size, width), np.nan, np.float32),
        )
        at = np.arange(length)
        key[mine[at // size], :, :, at % size] = np.moveaxis(own_key, 2, 0)
        value[mine[at // size], :, at % size] = np.moveaxis(own_value, 1, 0)
        row = int(random.integers(rows))
        table = random.integers(pages, size=(rows, most)).astype(np.int32)
        table[row, :own] = mine
        queries = random.standard_normal((rows, 1, 4, width)).astype(np.float32)
        queries[row] = q[0]
        end = random.integers(most * size + 1, size=(rows, 1)).astype(np.int32)
        end[row] = length
        return np.asarray(attend(queries, key, value, table, key_range=(np.zeros_like(end), end)))[row]

    expected = surrounded(1, own)
    assert np.isfinite(expected).all()
    shapes = [(3, 12)] * 192 + [(1, 10), (1, 16), (2, 70), (5, 10)] * 2
    for shape in shapes:
        np.testing.assert_array_equal(surrounded(*shape), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("queries", [1, 12])
def test_no_surroundings_change_a_bit_of_a_row_by_mosaic_gpu(queries):
    """Rows of several lanes, or of several blocks of 64, whose ranges leave their pages; in another batch, in a wider
    table, beside pages of NaN."""
    random = np.random.default_rng(0)
    key, value, q = (
        jnp.asarray(random.standard_normal(shape, np.float32)).astype("bfloat16")
        for shape in [(PAGES, 1, 64, 64), (PAGES, 1, 64, 128), (2, queries, 6, 64)]
    )
    table = jnp.asarray([[3, 7, 1, 5, 6, 9], [4, 2, 0, 0, 0, 0]], jnp.int32)
    end = jnp.asarray([[390], [70]]) - jnp.arange(queries)[None, ::-1]  # the first table has 384 tokens
    start = end - 290
    together = attend("mosaic_gpu", q, key, value, table, key_range=(start, end))
    expected = paged_attention(q, key, value, table, key_range=(start, end), implementation="reference")
    np.testing.assert_allclose(np.float32(together), np.float32(expected), rtol=0, atol=2e-2)
    seen = np.zeros((PAGES, 64), bool)
    for row, first, last in zip(np.asarray(table), np.asarray(start).min(1), np.asarray(end).max(1), strict=True):
        for position in range(max(first, 0), min(last, 384)):
            seen[row[position // 64], position % 64] = True
    key, value = jnp.where(seen[:, None, None], key, jnp.nan), jnp.where(seen[:, None, :, None], value, jnp.nan)
    for i in range(2):
        wider = jnp.pad(table[i : i + 1], [(0, 0), (0, 5)], constant_values=PAGES - 1)
        own_range = start[i : i + 1], jnp.minimum(end[i : i + 1], 384)
        alone = attend("mosaic_gpu", q[i : i + 1], key, value, wider, key_range=own_range)
        np.testing.assert_array_equal(np.asarray(alone[0]), np.asarray(together[i]))


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


def test_all_pages_at_once_are_the_loop_over_pages_and_no_surroundings_change_a_bit(monkeypatch):
    """As XLA attends on a GPU: rows in tables of other widths, in other pages, in batches of other sizes, and with NaN
    in pages and parts of pages that nobody sees."""
    random = np.random.default_rng(0)
    key, value, q = (
        jnp.asarray(random.standard_normal(shape, np.float32))
        for shape in [(PAGES, K, 32, 32), (PAGES, K, 32, 32), (3, 2, 3 * K, 32)]
    )
    seen = ranges([(0, 70), (0, 71)], [(0, 0), (0, 1)], [(41, 147), (42, 148)])
    attend = functools.partial(paged_attention, implementation="xla", **CAPPED)
    expected = attend(q, key, value, TABLE, key_range=seen)
    monkeypatch.setattr(target, "platform", lambda: "gpu")
    at_once = jax.jit(lambda *operands, key_range: attend(*operands, key_range=key_range))
    together = at_once(q, key, value, TABLE, key_range=seen)
    assert not together[1, 0].any() and "while" not in at_once.lower(q, key, value, TABLE, key_range=seen).as_text()
    np.testing.assert_allclose(together, expected, rtol=0, atol=2e-6)  # sums in another order

    unseen = np.ones((PAGES, 32), bool)
    for row, start, end in zip(np.asarray(TABLE), *(np.asarray(x) for x in seen), strict=True):
        for position in range(start.min(), end.max()):
            unseen[row[position // 32], position % 32] = False
    spoiled = [jnp.where(at, jnp.nan, x) for at, x in ((unseen[:, None, None], key), (unseen[:, None, :, None], value))]
    for width in (5, 6, 13):
        table = jnp.pad(TABLE, [(0, 0), (0, width - M)], constant_values=PAGES - 1)
        np.testing.assert_array_equal(at_once(q, *spoiled, table, key_range=seen), together)
        for i in range(3):
            alone = at_once(q[i : i + 1], *spoiled, table[i : i + 1], key_range=[x[i : i + 1] for x in seen])
            np.testing.assert_array_equal(alone[0], together[i])


@pytest.mark.slow
def test_the_tpu_kernel_races_with_nothing_and_reads_what_it_copied():
    """On emulated TPU memory, with NaN where nothing was copied: a block of which one page is copied, a sequence that
    sees nothing, blocks from a window on, and a last sequence."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    size = SIZES["mosaic_tpu"]
    key, value, query = drawn(1, size=size)
    q, table = query(4, 2), tables([3], [], [9, 8, 11, 2, 6], [4, 5])
    operands = q, key, value, table
    seen = ranges([(0, 3), (0, 5)], [(0, 0), (0, 0)], [(37, 79), (38, 80)], [(0, 20), (0, 21)], size=size)
    with interpreted("mosaic_tpu", detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"):
        made = paged_attention(*operands, key_range=seen)
    assert not interpret_pallas_call.races.races_found
    expected = paged_attention(*operands, key_range=seen, implementation="reference")
    np.testing.assert_allclose(made, expected, rtol=0, atol=2e-6)


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
            paged_attention(*operands, key_range=ranges(*SEEN))
    with pytest.raises(ValueError, match="key_range"):
        paged_attention(q, key, value, TABLE, key_range=tuple(x[:2] for x in ranges(*SEEN)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("empty", ["sequences", "queries", "pages"])
def test_of_nothing_there_are_zeros(name, empty):
    key, value, draw = drawn(2, size=SIZES[name])
    Q, T, M = (0 if empty == each else 2 for each in ("sequences", "queries", "pages"))
    seen = (jnp.zeros((Q, T), jnp.int32),) * 2
    out = attend(name, draw(Q, T), key, value, jnp.zeros((Q, M), jnp.int32), key_range=seen)
    assert out.shape == (Q, T, 2 * K, H) and not out.any()


@pytest.mark.parametrize("form", ["float32", "bfloat16", "latent", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("name", ["triton", "mosaic_tpu"])
def test_a_draft_of_nan_changes_no_bit_of_the_tokens_before_it(name, form):
    """The third of four tokens that are read together is NaN, or its value infinite; those that see it become NaN."""
    size, width = SIZES[name], 5
    key, value, query = drawn(3, "bfloat16" if form == "bfloat16" else "float32", size=size)
    call, q, table, scales = program(name), query(1, 4), TABLE[:1], {}
    end = jnp.asarray([[2 * size - 1 + t for t in range(4)]])  # the third begins a page
    if form == "latent":
        value = width
        call = jax.jit(interpreted()(functools.partial(paged_attention, value=width, implementation=name)))
    elif form not in ("float32", "bfloat16"):
        (key, of_keys), (value, of_values) = (
            of_eight_bits(pages, form, tokens_last=last) for pages, last in ((key, True), (value, False))
        )
        scales = {"key_scales": of_keys, "value_scales": of_values}
    page = int(table[0, 2])

    def attended(key, value, scales):
        pages = {"key": key} if form == "latent" else {"key": key, "value": value}
        return np.asarray(call(q, **pages, table=table, key_range=(jnp.zeros_like(end), end), **scales), np.float32)

    expected = attended(key, value, scales)
    assert np.isfinite(expected).all()
    if scales:
        spoiled = [(key, value, {each: x.at[page, ..., 0].set(jnp.nan) for each, x in scales.items()})]
    elif form == "latent":
        spoiled = [(key.at[page, :, :, 0].set(jnp.nan), value), (key.at[page, :, width - 1, 0].set(jnp.inf), value)]
    else:
        spoiled = [(key.at[page, :, :, 0].set(jnp.nan), value.at[page, :, 0].set(jnp.nan))]
        spoiled += [(key, value.at[page, :, 0, 1].set(jnp.inf))]
    for pages in spoiled:
        got = attended(*pages, *([] if scales else [scales]))
        np.testing.assert_array_equal(got[:, :2], expected[:, :2])
        assert np.isnan(got[:, 2:]).any(axis=-1).all()


def test_runs_of_prompts_read_pages_in_blocks_of_those_that_see_as_many():
    """Each run by itself has the same result to the bit; blocks of four runs of 32 rows take 0, 1 and 3 trips."""
    draw, runs, rows = np.random.default_rng(0), 9, 32
    query = jnp.asarray(draw.standard_normal((runs, rows, 2, 32)), jnp.float32)
    key, value = (jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in ((9, 2, 32, 64), (9, 2, 64, 32)))
    table = jnp.asarray(draw.integers(1, 9, (runs, 3)))
    end = np.zeros((runs, rows), np.int32)
    for run, last in {0: 160, 2: 64, 3: 180, 5: 33, 8: 40}.items():
        end[run] = np.arange(last - rows, last) + 1
    range_of = KeyRange(jnp.zeros_like(end), jnp.asarray(end))
    attend = jax.jit(lambda *x: xla.paged_attention(*x[:4], key_range=KeyRange(*x[4:]), scale=0.2, soft_cap=None))
    together = attend(query, key, value, table, *range_of)
    alone = [
        attend(query[i : i + 1], key, value, table[i : i + 1], *(x[i : i + 1] for x in range_of)) for i in range(runs)
    ]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    assert block_trips([3, 1, 3, 1, 1], runs, rows) == 4 and block_trips([3, 1], 2, 1) == 3
