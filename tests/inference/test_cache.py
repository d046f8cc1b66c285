"""The protocol between mixers and caches, on a mixer and a cache that are made here."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import forced_steps
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from engine_fixtures import SMALL, check_pages, prefixes_read
from flax import nnx

from jaxlm.inference.engine import Engine
from jaxlm.inference.programs import EnginePrograms
from jaxlm.models import attention, tree
from jaxlm.models.cache import NoCache, Slot
from jaxlm.models.doors import Dropout
from jaxlm.models.doors.scan import ChunkRows, by_token, scan
from jaxlm.models.grouped_query_config import GroupedQueryAttentionConfig
from jaxlm.models.parameters import Module, normal, param, stack
from jaxlm.models.rows import Auxiliary, RowContext
from jaxlm.models.views import CacheView
from jaxlm.parallel.rules import ENGINE
from kernels_pallas.flash_attention import KeyRange

LAYERS, WIDTH, LATENT = 3, 32, 6


AXES = ("batch", "sequence", "act_embed")
DECAY = by_token(
    lambda states, latent_BC: ({"state": (state_BC := 0.9 * states["state"] + latent_BC)}, state_BC),
    {"state": (np.full(LATENT, 0.5, np.float32), ("act_embed",))},
    AXES,
)


class LatentRecurrence(Module):
    """A mixer with a latent per token, of which it reads the mean, and a float32 state per sequence, which decays."""

    def __init__(self, model, rngs):
        self.down = param(rngs, (WIDTH, LATENT), "embed -> channels", normal(0.2))
        self.up = param(rngs, (LATENT, WIDTH), "channels -> embed", normal(0.2))

    def slots(self):
        state = Slot((LATENT,), ("act_embed",), jnp.dtype("float32"), per="sequence")
        return {"latent": Slot((LATENT,), ("act_embed",)), "state": state}

    def __call__(self, x_BTD, rows, cache):
        latent_BTC = x_BTD @ self.down[...]

        states_BTC, cache = cache.scan(rows, DECAY, (latent_BTC, AXES))
        cache = cache.update(rows, latent=latent_BTC)
        seen = cache.view()
        index_S = jnp.arange(seen.arrays["latent"].shape[1])[None, None]
        mask_BTS = (seen.key_range.start[..., None] <= index_S) & (index_S < seen.key_range.end[..., None])
        mean_BTC = (
            jnp.einsum("BTS,BSC->BTC", mask_BTS, seen.arrays["latent"]) / jnp.maximum(mask_BTS.sum(2), 1)[..., None]
        )
        return jnp.tanh((mean_BTC + states_BTC) @ self.up[...]), cache, Auxiliary()


class GrowingLayer(NamedTuple):
    """One layer of a cache whose arrays grow with each update."""

    slots: dict
    arrays: dict
    index: int
    key_range: object = None

    def update(self, rows, **new):
        arrays = dict(self.arrays)
        for name, x in new.items():
            grows = self.slots[name].per == "token" and name in arrays
            arrays[name] = jnp.concatenate([arrays[name], x], axis=1) if grows else x
        return self._replace(arrays=arrays, key_range=rows.key_range)

    def scan(self, rows, recurrence, *inputs):
        before = {name: self.arrays[name] for name in recurrence.first}
        outputs, states = scan(recurrence, before, ChunkRows(rows.is_token_BT, rows.begins_BT), *inputs)
        return outputs, self._replace(arrays={**self.arrays, **states})

    def view(self):
        return CacheView({name: x for name, x in self.arrays.items() if name != "state"}, self.key_range)


class GrowingCache(NamedTuple):
    """A cache with arrays of their own for each layer."""

    slots: dict
    layers: tuple
    length: int = 0

    def layer(self, entry, index):
        return GrowingLayer(self.slots, self.layers[index], index)

    def put(self, entry, layer):
        return self._replace(layers=(*self.layers[: layer.index], layer.arrays, *self.layers[layer.index + 1 :]))

    def advance(self, lengths_B):
        return self._replace(length=self.length + int(lengths_B[0]))


def through(layers, cache, x_BTD, start, scan):
    """Carry x through the stacked layers, in a loop or layer by layer."""
    graph, stacked = nnx.split(layers)
    B, T, _ = x_BTD.shape
    positions = jnp.broadcast_to(start + jnp.arange(T)[None], (B, T))
    rows = RowContext(positions, KeyRange(jnp.zeros_like(positions), positions + 1), None, Dropout())

    def body(carry, layer):
        x, cache = carry
        parameters, index = layer
        y, of_layer, _ = nnx.merge(graph, parameters)(x, rows, cache.layer("layers", index))
        return (x + y, cache.put("layers", of_layer)), None

    if scan:
        (x_BTD, cache), _ = jax.lax.scan(body, (x_BTD, cache), (stacked, jnp.arange(LAYERS)))
    else:
        for i in range(LAYERS):
            (x_BTD, cache), _ = body((x_BTD, cache), (jax.tree.map(lambda x, i=i: x[i], stacked), i))
    return x_BTD, cache.advance(jnp.full(B, T))


def test_a_mixer_reads_any_cache_as_it_reads_its_own_tokens():
    layers = stack(lambda rngs: LatentRecurrence(None, rngs), LAYERS, nnx.Rngs(0))
    slots = layers.slots()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, WIDTH)), jnp.float32)
    expected, _ = through(layers, NoCache(), x, 0, scan=True)
    start = jnp.full((2, LATENT), 0.5)
    cache = GrowingCache(slots, tuple({"state": start} for _ in range(LAYERS)))
    read = 0
    for T in (4, 1, 2):  # a prompt, a token, and a chunk
        y, cache = through(layers, cache, x[:, read : read + T], read, scan=False)
        np.testing.assert_allclose(y, expected[:, read : read + T], rtol=1e-5, atol=1e-6)
        read += T
    assert np.all(np.asarray(cache.length) == 7)


@pytest.fixture
def new_mixer(monkeypatch):
    """The module of grouped-query attention is the one above."""
    monkeypatch.setitem(attention._REGISTRY._makers, GroupedQueryAttentionConfig, LatentRecurrence)
    monkeypatch.setattr(tree, "_abstract", tree._abstract.__wrapped__)  # the kind has another module here alone


@pytest.mark.usefixtures("new_mixer")
def test_a_new_mixer_is_decoded():
    """Prompts of different lengths: padding leaves the state as it is."""
    model = model_fixtures.model()
    graph, _ = tree.abstract(model)
    parameters = tree.init(model, 0, meshes.make())
    tokens = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (2, 12), dtype=np.int32)
    expected = [model_fixtures.full_logits(graph, parameters, row) for row in tokens]
    same = partial(model_fixtures.assert_same_numbers, relative=1e-5)
    forced_steps.assert_reads_as_the_full_pass(model, parameters, tokens, [6, 3], expected, same)


@pytest.mark.usefixtures("new_mixer")
def test_the_engine_keeps_the_state_of_each_sequence():
    """Prompts of several chunks and of one token, found prefixes and lost pages: all go on from the right state."""
    model = model_fixtures.model(context_length=160, num_layers=2)
    graph, _ = tree.abstract(model)
    parameters = tree.init(model, 0, mesh := meshes.make())
    # Of the two groups tokens need 5 pages of a sequence and states 3; there is room for two.
    layout = EnginePrograms.of(model, mesh, jnp.dtype("float32"), SMALL).layout
    assert layout.groups == (None, 2)
    tokens, states = (layout.page_bytes(group, jnp.dtype("float32"), mesh, ENGINE) for group in range(2))
    engine = Engine(model, parameters, mesh, replace(SMALL, cache_bytes=11 * tokens + 11 * states))
    draw = np.random.default_rng(0)
    long, *others = (draw.integers(0, model_fixtures.VOCABULARY, n).tolist() for n in (100, 1, 33, 64, 96, 50, 20, 60))

    texts = partial(prefixes_read, engine, graph, parameters)
    texts(*others)
    assert engine.preemptions
    texts(long)
    assert texts(long) == [96]
    texts(long[:70] + others[0])  # the state there, in the middle of a text, may have gone by now
    assert texts(long[:70] + others[1]) == [64]
    check_pages(engine)
    assert engine.pages_held == 0
