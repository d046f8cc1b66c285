import functools

import chex
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import AbstractDevice
from matrices import sampled

from jaxlm.models.doors import rope
from jaxlm.models.logical_axes import HEADS
from jaxlm.models.position_config import LinearScalingConfig, Llama3ScalingConfig, LongRopeScalingConfig, RopeConfig
from jaxlm.models.positions import document_lengths, packed_causal_mask, rope_table
from kernels_pallas.flash_attention import KeyRange, causal_chunks, flash_attention

attend = functools.partial(flash_attention, implementation="xla")


def by_hand(query, key, value, start, end):
    """Equation 1 of Vaswani et al. in numpy float64, query by query, head by head."""
    B, T, N, H = query.shape
    out = np.zeros(query.shape)
    for b in range(B):
        for t in range(T):
            seen = slice(start[b, t], end[b, t])
            for n in range(N):
                k = n // (N // key.shape[2])
                scores = key[b, seen, k].astype(np.float64) @ query[b, t, n].astype(np.float64) / np.sqrt(H)
                if len(scores):
                    weights = np.exp(scores - scores.max())
                    out[b, t, n] = weights / weights.sum() @ value[b, seen, k]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_equals_the_equation(kv_heads):
    draw = np.random.default_rng(0)
    query = draw.normal(size=(2, 7, 6, 8)).astype(np.float32)
    key, value = draw.normal(size=(2, 2, 9, kv_heads, 8)).astype(np.float32)
    start = draw.integers(0, 4, (2, 7)).astype(np.int32)
    end = start + draw.integers(0, 5, (2, 7)).astype(np.int32)  # some see nothing
    assert (start == end).any()
    actual = attend(query, key, value, key_range=KeyRange(jnp.asarray(start), jnp.asarray(end)))
    chex.assert_trees_all_close(actual, by_hand(query, key, value, start, end).astype(np.float32), atol=2e-6)


def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient():
    draw = np.random.default_rng(0)
    query, key, value = (draw.normal(size=(1, 3, 2, 4)).astype(np.float32) for _ in range(3))
    nothing = KeyRange(jnp.zeros((1, 3), jnp.int32), jnp.zeros((1, 3), jnp.int32))

    def total(query, key, value):
        return jnp.sum(attend(query, key, value, key_range=nothing) * 3.0)

    value_, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(query, key, value)
    assert value_ == 0.0
    chex.assert_trees_all_equal(gradients, tuple(map(np.zeros_like, (query, key, value))))


@pytest.mark.parametrize("length", [0, 1, 255, 256, 300, 1000, 5000])
def test_chunks_are_of_some_size_and_leave_nothing_out(length):
    bounds = causal_chunks.bounds(length)
    assert [first for first, _ in bounds] == [0] + [end for _, end in bounds[:-1]] and bounds[-1][1] == length
    assert len(bounds) == 1 if length < 256 else 2 <= len(bounds) <= 8
    assert len(bounds) == 1 or min(end - first for first, end in bounds) >= 128


@pytest.mark.parametrize("length", sampled([7, 256, 300, 1100], ["7", "256", "300"]))
def test_causal_chunks_are_the_whole(length):
    """Packed rows with a window, and rows that see nothing; forward and backward."""
    draw = np.random.default_rng(0)
    query, cotangent = draw.normal(size=(2, 2, length, 4, 8)).astype(np.float32)
    key, value = draw.normal(size=(2, 2, length, 2, 8)).astype(np.float32)
    start, end = packed_causal_mask(jnp.asarray(np.arange(length) % draw.integers(1, length + 1, (2, 1)), jnp.int32))
    key_range = KeyRange(jnp.maximum(start, end - 200), jnp.where(jnp.arange(length)[None] % 5 == 3, start, end))

    @functools.partial(jax.jit, static_argnums=0)
    def both(is_causal):
        out, pull_back = jax.vjp(functools.partial(attend, key_range=key_range, is_causal=is_causal), query, key, value)
        return out, *pull_back(cotangent)

    with jax.set_mesh(meshes.make(devices=jax.devices()[:1])):
        # Sums over keys and queries in another order.
        chex.assert_trees_all_close(both(True), both(False), rtol=1e-5, atol=2e-5)


def test_only_as_many_keys_as_queries_are_causal():
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="the number of keys is 3; it must be 4 like that of queries where is_causal"):
        attend(x, x[:, :3], x[:, :3], is_causal=True)


def test_only_cpus_leave_out_what_causality_hides():
    def scores(mesh):
        x, row = jnp.ones((1, 512, 2, 8)), jnp.zeros((1, 512), jnp.int32)
        with mesh:
            causal = functools.partial(attend, key_range=KeyRange(row, row + 1), is_causal=True)
            text = str(jax.make_jaxpr(causal)(x, x, x))
        return {"whole": "512,512]" in text, "chunks": "128,256]" in text}

    def chip(name, platform):
        device = AbstractDevice(name, 1, platform)
        return jax.sharding.use_abstract_mesh(meshes.abstract(device=device))

    assert scores(jax.set_mesh(meshes.make(devices=jax.devices()[:1]))) == {"whole": False, "chunks": True}
    assert scores(chip("NVIDIA H200", "gpu")) == {"whole": True, "chunks": False}
    assert scores(chip("TPU v5 lite", "tpu")) == {"whole": True, "chunks": False}


def test_rows_see_their_own_segment_up_to_themselves():
    positions = jnp.array([[0, 1, 2, 0, 1, 0]])
    key_range = packed_causal_mask(positions)
    np.testing.assert_array_equal(key_range.start, [[0, 0, 0, 3, 3, 5]])
    np.testing.assert_array_equal(key_range.end, [[1, 2, 3, 4, 5, 6]])


@functools.partial(jax.jit, static_argnums=1)
def rotated(x, settings, positions):
    return rope(x, HEADS, rope_table(settings, x.shape[-1], positions))


def test_rotary_scores_depend_on_distance_only():
    draw = np.random.default_rng(0)
    query, key = draw.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def score(q_at, k_at):
        turned = (rotated(x, RopeConfig(), np.array([[at]])) for x, at in ((query, q_at), (key, k_at)))
        return np.vdot(*turned)

    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-5)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_rotary_keeps_length_and_position_zero():
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 8)).astype(np.float32)
    turned = rotated(x, RopeConfig(), np.array([[0, 5]]))
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)
    np.testing.assert_array_equal(turned[:, 0], x[:, 0])


def test_rotary_pairs_are_half_a_head_apart():
    x = np.array([[[[1.0, 0.0, 0.0, 0.0]]]], np.float32)
    turned = np.asarray(rotated(x, RopeConfig(theta=100.0), np.array([[1]])))
    np.testing.assert_allclose(turned[0, 0, 0], [np.cos(1.0), 0.0, np.sin(1.0), 0.0], atol=1e-7)


def test_llama3_scaling_keeps_fast_frequencies_and_stretches_slow_ones():
    scaling = Llama3ScalingConfig(factor=8.0, original_context_length=8192)
    plain = RopeConfig(theta=500_000.0)
    stretched = RopeConfig(theta=500_000.0, scaling=scaling)

    def angles(settings):
        table = rope_table(settings, 128, jnp.array([[1]]))
        return np.arctan2(table.sin[0, 0], table.cos[0, 0]).astype(np.float64)

    ratio = angles(stretched) / angles(plain)
    wavelength = 2 * np.pi / angles(plain)
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1.0, rtol=1e-4)
    np.testing.assert_allclose(ratio[wavelength > 8192], 1 / 8, rtol=1e-4)
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(between) and np.all(np.diff(between) < 0) and np.all((between < 1) & (between > 1 / 8))


def test_linear_scaling_makes_steps_of_a_factor_one():
    stretched = RopeConfig(scaling=LinearScalingConfig(factor=8.0))
    positions = jnp.arange(12)[None]
    chex.assert_trees_all_close(rope_table(stretched, 8, 8 * positions), rope_table(RopeConfig(), 8, positions))


def test_lengths_are_those_of_documents_without_padding():
    @jax.jit
    def of_packed(positions):
        return document_lengths(positions, packed_causal_mask(positions))

    @jax.jit
    def of_cached(positions, lengths):  # padding sees nothing
        ends = jnp.where(positions < lengths[:, None], positions + 1, 0)
        return document_lengths(positions, KeyRange(jnp.zeros_like(positions), ends))

    packed = np.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    np.testing.assert_array_equal(of_packed(packed), [[3, 3, 3, 2, 2, 1], [6] * 6])
    lengths = np.array([4, 2, 1])
    found = np.asarray(of_cached(np.broadcast_to(np.arange(4), (3, 4)), lengths))
    for row, length in enumerate(lengths):
        assert set(found[row, :length]) == {int(length)}
    one = np.array([[7], [0]])
    np.testing.assert_array_equal(of_cached(one, one[:, 0] + 1), [[8], [1]])


def test_long_documents_have_factors_of_their_own():
    scaling = {"factor": 4.0, "short_factors": (1.0, 2.0), "long_factors": (1.0, 8.0), "original_context_length": 4}
    settings = RopeConfig(scaling=LongRopeScalingConfig(**scaling, attention_factor=1.0))
    positions = jnp.array([[3]])
    angles = lambda length: np.arctan2(*reversed(rope_table(settings, 4, positions, jnp.array([[length]]))))  # noqa: E731
    np.testing.assert_allclose(angles(4)[0, 0], [3.0, 3.0 / 100 / 2], rtol=1e-6)
    np.testing.assert_allclose(angles(5)[0, 0], [3.0, 3.0 / 100 / 8], rtol=1e-6)
    chex.assert_trees_all_equal(rope_table(settings, 4, positions), rope_table(settings, 4, positions, positions + 1))
