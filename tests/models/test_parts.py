"""Parts of a block that some families have: each is its equation, also in pieces, packed, cached, on meshes, counted."""

import functools

import chex
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from flax import nnx
from matrices import sampled
from workload_fixtures import workload

from jaxlm.costs.counted import operations
from jaxlm.costs.jaxpr.count import count
from jaxlm.inference import steps
from jaxlm.inference.cache import empty_cache
from jaxlm.models import tree
from jaxlm.models.positions import packed_causal_mask
from jaxlm.training.step import make_steps

T = 20  # tokens of a row


def of(attention=None, **changes):
    """Return the keys of a Llama with changes."""
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 12}
    return {**model_fixtures.LLAMA, "num_layers": 2, "attention": {**heads, **(attention or {})}, **changes}


PARTS = {
    "partial": of(position={"kind": "rope", "fraction": 0.5}),
    "reversed": of(position={"kind": "rope", "reversed": True, "fraction": 0.34}),
}


def over(*kept):
    """Parametrise a test over these parts, and over all in the exhaustive suite."""
    return pytest.mark.parametrize("name", sampled(list(PARTS), list(kept)))


def parts(name):
    """Return a model, its graph and parameters, no norm of which is 1."""
    model = model_fixtures.model(PARTS[name])
    draw = np.random.default_rng(1)

    def loud(path, leaf):
        return leaf + draw.uniform(-0.4, 0.6, leaf.shape).astype(np.float32) if path[-1].key == "scale" else leaf

    parameters = jax.tree_util.tree_map_with_path(loud, tree.init(model, 0, meshes.make()))
    return model, tree.abstract(model)[0], parameters


@functools.partial(jax.jit, static_argnums=0)
def logits(graph, parameters, tokens, positions):
    module = nnx.merge(graph, parameters)
    return module.logits(module.hidden(tokens, positions, packed_causal_mask(positions))[0])


def frequencies(position, width, length):
    """Return the angle of each pair at position 1, and what multiplies cos and sin."""
    return position.theta ** (-np.arange(0, width, 2) / width), 1.0


def rotated(x, position, length):
    if position.kind == "none":
        return x
    width = int(x.shape[-1] * position.fraction)
    frequency, factor = frequencies(position, width, length)
    angle = (jnp.arange(x.shape[1])[:, None] * frequency)[None, :, None]
    cos, sin = factor * jnp.cos(angle), factor * jnp.sin(angle) * (-1 if position.reversed else 1)
    first, second, rest = jnp.split(x, [width // 2, width], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def norm(x, p):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * p["scale"]


def attention(x, p, block):
    query, key, value = (jnp.einsum("btd,dnh->btnh", x, p[name]) for name in ("query", "key", "value"))
    query, key = (rotated(y, block.position, x.shape[1]) for y in (query, key))
    key, value = (jnp.repeat(y, query.shape[2] // y.shape[2], axis=2) for y in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / jnp.sqrt(query.shape[-1])
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh,nhd->btd", jax.nn.softmax(scores), value, p["output"])


def feed_forward(x, p):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def written_out(model, parameters, tokens):
    """Return the logits of rows that are a document each, from the equations."""
    x = parameters["embedding"][tokens]
    for i, block in enumerate(model.layers):
        p = jax.tree.map(lambda leaf, i=i: leaf[i], parameters["layers"])
        x = x + attention(norm(x, p["attention_norm"]), p["attention"], block)
        x = x + feed_forward(norm(x, p["feed_forward_norm"]), p["feed_forward"])
    return norm(x, parameters["final_norm"]) @ parameters["unembedding"]


def rows(count=2, length=T):
    tokens = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (count, length), dtype=np.int32)
    return jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_its_equation(name):
    model, graph, parameters = parts(name)
    tokens, positions = rows()
    with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(written_out, model))(parameters, tokens)
    model_fixtures.assert_same_numbers(logits(graph, parameters, tokens, positions), expected, 1e-5)


@pytest.mark.parametrize("name", PARTS)
def test_packed_documents_are_as_if_alone(name):
    _, graph, parameters = parts(name)
    tokens, _ = rows(1)
    cuts = [(0, 3), (3, T - 3), (T - 3, T)]
    packed = jnp.concatenate([jnp.arange(end - start) for start, end in cuts])[None]
    found = logits(graph, parameters, tokens, packed)
    for start, end in cuts:
        alone = logits(graph, parameters, tokens[:, start:end], packed[:, start:end])
        model_fixtures.assert_same_numbers(found[:, start:end], alone, 1e-5)


@over("partial")
def test_prefill_and_decode_are_the_full_pass(name):
    """Prompts of several lengths, and nine more tokens; no row passes an original context."""
    model, graph, parameters = parts(name)
    tokens, positions = rows(3)
    expected = logits(graph, parameters, tokens, positions)
    lengths = np.array([5, 1, 11], np.int32)
    prompts = jnp.where(jnp.arange(11)[None] < lengths[:, None], tokens[:, :11], 7)
    prefill = jax.jit(lambda p, t, n: steps.prefill(graph, p, t, n, empty_cache(model, 3, T, jnp.float32)))
    decode = jax.jit(chex.assert_max_traces(lambda p, t, c: steps.decode_step(graph, p, t, c), n=1))
    found, cache = prefill(parameters, prompts, lengths)
    for at in range(9):
        model_fixtures.assert_same_numbers(found, expected[np.arange(3), lengths - 1 + at], 1e-5)
        found, cache = decode(parameters, tokens[np.arange(3), lengths + at], cache)


@over("partial")
def test_losses_and_gradients_do_not_depend_on_the_mesh(name):
    model = model_fixtures.model(PARTS[name])
    expected_loss, expected = model_fixtures.first_gradients(model, meshes.make())
    loss, gradients = model_fixtures.first_gradients(model, meshes.make(2, 2, 2))
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_counted_to_the_last_flop(name):
    model = model_fixtures.model(PARTS[name])
    training = model_fixtures.training(remat="full", dtype="bfloat16", kernels="xla")
    made = make_steps(model, training, model_fixtures.optimization())
    shape = jax.ShapeDtypeStruct((8, model_fixtures.CONTEXT), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), shape)
    read = count(made.train, jax.eval_shape(made.init), batch)
    ops = operations.step(workload("train", model, 8, model_fixtures.CONTEXT, remat="full", kernels="xla"))
    assert sum(op.times * op.flops for op in ops) == read.matmul_flops
