"""Pages of a cache: what rows write is read at its position, by their own sequence."""

import jax.numpy as jnp
import meshes
import numpy as np
import pytest

from jaxlm.inference import paged_cache
from jaxlm.inference.paged_cache import PagedCache, PageLayout
from jaxlm.models.cache import CacheEntry, Slot
from jaxlm.models.doors import Dropout, attention
from jaxlm.models.logical_axes import HEADS
from jaxlm.models.rows import RowContext
from jaxlm.parallel.rules import ENGINE
from kernels_pallas.core.rounding import rounded_rows
from kernels_pallas.flash_attention import KeyRange, flash_attention

PAGE, TILE, SHAPE = 8, 4, (2, 16)


PLATFORMS = pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])


@PLATFORMS
def test_rows_write_to_and_read_from_their_own_sequence(platform, monkeypatch):
    """One that decodes, and a tile of another whose last row is padding; attention is that over the arrays."""
    monkeypatch.setattr(paged_cache.target, "platform", lambda: platform)  # each one's way to write runs anywhere
    slot = Slot(SHAPE, HEADS[2:])
    layout = PageLayout.of({"0": CacheEntry(1, {"key": slot._replace(tokens_last=True), "value": slot})}, PAGE)
    draw = np.random.default_rng(0)
    before = {name: draw.standard_normal((6, 2, PAGE, 16)).astype(np.float32) for name in ("key", "value")}
    tables = jnp.asarray([[4, 2]]), jnp.asarray([[1, 3]])
    position = np.array([11, 4, 5, 6, -1], np.int32)
    arrays = {"0": {"key": jnp.asarray(before["key"].swapaxes(2, 3)), "value": jnp.asarray(before["value"])}}
    cache = PagedCache(arrays, (tables,), position, layout, (1, TILE))
    end = jnp.asarray(position + 1)[:, None]
    rows = RowContext(jnp.maximum(position, 0)[:, None], KeyRange(jnp.zeros_like(end), end), None, Dropout())
    new = {name: draw.standard_normal((5, 1, *SHAPE)).astype(np.float32) for name in before}
    view = cache.layer("0", 0).update(rows, **{name: jnp.asarray(x) for name, x in new.items()}).view()
    for name, arrays in view.arrays.items():
        assert arrays.shape == (5, 2 * PAGE, *SHAPE)
        np.testing.assert_array_equal(arrays[0, 11], new[name][0, 0])
        np.testing.assert_array_equal(arrays[0, :11], np.concatenate(before[name][[4, 2]].swapaxes(1, 2))[:11])
        for row in range(1, 4):  # rows of a tile see one another
            np.testing.assert_array_equal(arrays[row, 4:7], new[name][1:4, 0])
        np.testing.assert_array_equal(view.pages_of(name, tokens_last=False)[0], before[name][0])
    query = jnp.asarray(draw.standard_normal((5, 1, 4, 16)).astype(np.float32))
    expected = flash_attention(query, view.arrays["key"], view.arrays["value"], key_range=rows.key_range)
    np.testing.assert_allclose(attention(query, view), expected, rtol=0, atol=1e-6)  # sums in another order
    assert layout.page_bytes(0, jnp.dtype("float32"), meshes.make(), ENGINE) == sum(
        x[0].nbytes for x in before.values()
    )


@PLATFORMS
def test_padding_among_rows_that_decode_changes_no_page_that_is_read(platform, monkeypatch):
    monkeypatch.setattr(paged_cache.target, "platform", lambda: platform)
    layout = PageLayout.of({"0": CacheEntry(1, {"value": Slot(SHAPE, HEADS[2:])})}, PAGE)
    draw = np.random.default_rng(0)
    before = draw.standard_normal((5, 2, PAGE, 16)).astype(np.float32)
    new = draw.standard_normal((3, 1, *SHAPE)).astype(np.float32)
    position = np.array([9, -1, 2], np.int32)
    tables = (jnp.asarray([[4, 2], [0, 0], [3, 0]]),)
    cache = PagedCache({"0": {"value": jnp.asarray(before)}}, (tables,), position, layout, (1,))
    end = jnp.asarray(position + 1)[:, None]
    rows = RowContext(jnp.maximum(position, 0)[:, None], KeyRange(jnp.zeros_like(end), end), None, Dropout())
    after = cache.layer("0", 0).update(rows, value=jnp.asarray(new)).pages["value"]
    expected = before.copy()
    expected[2, :, 1], expected[3, :, 2] = new[0, 0], new[2, 0]
    np.testing.assert_array_equal(after[1:], expected[1:])


def test_states_have_pages_of_their_own_beside_keys_of_two_tokens():
    """A state may be written over by the next one of its sequence, and keys may not."""
    keys, state = Slot(SHAPE, HEADS[2:], window=2), Slot(SHAPE, HEADS[2:], per="sequence")
    layout = PageLayout.of({"0": CacheEntry(1, {"key": keys}), "1": CacheEntry(1, {"matrix": state})}, PAGE)
    assert (layout.groups, layout.state_group, layout.names) == ((2, 2), 1, ("window=2", "states"))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@PLATFORMS
def test_pages_of_eight_bits_hold_each_token_rounded_by_itself(platform, dtype, monkeypatch):
    """Beside its scale, whatever is written with it; and attention reads it so."""
    monkeypatch.setattr(paged_cache.target, "platform", lambda: platform)
    slot = Slot(SHAPE, HEADS[2:])
    entries = {"0": CacheEntry(1, {"key": slot._replace(tokens_last=True), "value": slot})}
    layout = PageLayout.of(entries, PAGE, dtype)
    pages = layout.allocate([5], jnp.dtype("float32"))
    shapes = {name: (x.shape, x.dtype.name) for name, x in pages["0"].items()}
    kept = {"int8": "int8", "fp8": "float8_e4m3fn"}[dtype]
    assert shapes == {
        "key": ((5, 2, 16, PAGE), kept),
        "key_scales": ((5, 2, 1, PAGE), "float32"),
        "value": ((5, 2, PAGE, 16), kept),
        "value_scales": ((5, 2, 1, PAGE), "float32"),
    }
    assert layout.page_bytes(0, jnp.dtype("float32"), meshes.make(), ENGINE) == 2 * 2 * PAGE * (16 + 4)
    position = np.array([11, 4, 5, 6, -1], np.int32)
    tables = jnp.asarray([[4, 2]]), jnp.asarray([[1, 3]])
    cache = PagedCache(pages, (tables,), position, layout, (1, TILE))
    start, end = jnp.asarray([[11], [4], [4], [4], [0]]), jnp.asarray(position + 1)[:, None]
    rows = RowContext(jnp.maximum(position, 0)[:, None], KeyRange(start, end), None, Dropout())
    draw = np.random.default_rng(0)
    new = {
        name: jnp.asarray(draw.standard_normal((5, 1, *SHAPE)).astype(np.float32)) * 10.0**power
        for name, power in (("key", 3), ("value", -3))
    }
    view = cache.layer("0", 0).update(rows, **new).view()
    for row, (page, at) in enumerate([(2, 3), (1, 4), (1, 5), (1, 6)]):
        for name in new:
            numbers, scales = rounded_rows(new[name][row, 0], kept)
            stored = view.pages_of(name, tokens_last=False)[page, :, at]
            np.testing.assert_array_equal(np.float32(stored), np.float32(numbers))
            np.testing.assert_array_equal(view.pages[f"{name}_scales"][page, :, :, at], scales)
    query = jnp.asarray(draw.standard_normal((5, 1, 4, 16)).astype(np.float32)) * 1e-3
    of_tile = KeyRange(jnp.zeros((1, 3), jnp.int32), jnp.arange(1, 4)[None])
    tile = (x[1:4, 0][None] for x in (query, new["key"], new["value"]))
    expected = flash_attention(*tile, key_range=of_tile)[0]
    # A value is off by half of a step, 1/127 of the largest, or by 1/16 of itself; scores are up to 3, and so are off
    # by about as much.
    error = jnp.max(jnp.abs(attention(query, view)[1:4, 0] - expected)) / jnp.max(jnp.abs(new["value"]))
    assert 0 < error < {"int8": 0.02, "fp8": 0.1}[dtype]
