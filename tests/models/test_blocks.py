"""The forms of a block, by where norms stand and what the feed-forward layer reads: each is its equation."""

import functools

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
from jaxlm.models import tree
from jaxlm.models.positions import packed_causal_mask
from jaxlm.training.step import TrainStep

FORMS = [pytest.param(form, id="-".join(form.values())) for form in model_fixtures.BLOCKS]


def parts(form, **changes):
    """Return a model, its graph and parameters, no norm of which is 1."""
    model = model_fixtures.model(**form, **changes)
    draw = np.random.default_rng(1)

    def loud(path, leaf):
        return leaf * draw.uniform(0.5, 1.5, leaf.shape).astype(np.float32) if path[-1].key == "scale" else leaf

    parameters = jax.tree_util.tree_map_with_path(loud, model_fixtures.parameters(model))
    return model, tree.abstract(model)[0], parameters


@functools.partial(jax.jit, static_argnums=0)
def residual(graph, parameters, tokens):
    """Return the stream after the last layer."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return nnx.merge(graph, parameters).residual(tokens, positions, packed_causal_mask(positions))[0]


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def rotated(x):
    angle = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    cos, sin = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]
    first, second = np.split(x, 2, -1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(x, p):
    query, key, value = (np.einsum("btd,dnh->btnh", x, p[name]) for name in ("query", "key", "value"))
    query, key = rotated(query), np.repeat(rotated(key), 2, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    mixed = np.einsum("bnts,bsnh->btnh", model_fixtures.softmax(scores), np.repeat(value, 2, axis=2))
    return np.einsum("btnh,nhd->btd", mixed, p["output"])


def feed_forward(x, p):
    return (model_fixtures.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def block(x, p, norm_placement, residual):
    """One layer, from the equations, in the precision of its parameters."""

    def norm(name, x):
        return rms_norm(x, p[name]["scale"])

    def attended(x):
        if norm_placement == "before":
            return attention(norm("attention_norm", x), p["attention"])
        if norm_placement == "after":
            return norm("attention_post_norm", attention(x, p["attention"]))
        return norm("attention_post_norm", attention(norm("attention_norm", x), p["attention"]))

    def fed(x):
        before = "attention_norm" if residual == "parallel_shared_norm" else "feed_forward_norm"
        if norm_placement == "before":
            return feed_forward(norm(before, x), p["feed_forward"])
        if norm_placement == "after":
            return norm("feed_forward_post_norm", feed_forward(x, p["feed_forward"]))
        return norm("feed_forward_post_norm", feed_forward(norm(before, x), p["feed_forward"]))

    if residual == "sequential":
        x = x + attended(x)
        return x + fed(x)
    return x + attended(x) + fed(x)


@pytest.mark.parametrize(
    "form",
    sampled(FORMS, ["before-parallel", "after-sequential", "both-parallel_shared_norm"]),
)
def test_a_block_is_its_equation(form):
    model, graph, parameters = parts(form)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (2, 12), dtype=np.int32)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters)
    expected = exact["embedding"][tokens]
    for i in range(model.num_layers):
        expected = block(expected, jax.tree.map(lambda leaf, i=i: leaf[i], exact["layers"]), **form)
    model_fixtures.assert_same_numbers(residual(graph, parameters, tokens), expected, 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_block_has_the_norms_that_it_reads(form):
    paths = tree.paths(tree.shapes(tree.abstract(model_fixtures.model(**form))[1]))
    norms = {path.split("/")[1] for path in paths if path.startswith("layers/") and "norm" in path}
    before = {"attention_norm", "feed_forward_norm"} - (
        {"feed_forward_norm"} if form["residual"] == "parallel_shared_norm" else set()
    )
    after = {"attention_post_norm", "feed_forward_post_norm"}
    assert norms == {"before": before, "after": after, "both": before | after}[form["norm_placement"]]


@pytest.mark.parametrize(
    "form",
    sampled(FORMS, ["before-parallel_shared_norm"]),
)
def test_causality_by_gradient(form):
    """An output has no gradient from any input after it, and some from every input up to it."""
    _, graph, parameters = parts(form)
    tokens = jnp.arange(12)[None]

    @jax.jit
    def felt(weight_T):
        def total(embedding):
            x_BTD = residual(graph, {**parameters, "embedding": embedding}, tokens)
            return jnp.sum(jnp.square(x_BTD) * weight_T[None, :, None])

        return jnp.abs(jax.grad(total)(parameters["embedding"])).sum(axis=1)[:12]

    for t in (0, 5, 11):
        by_input = np.asarray(felt(np.eye(12, dtype=np.float32)[t]))
        assert np.all(by_input[t + 1 :] == 0.0) and np.all(by_input[: t + 1] > 0.0)


@pytest.mark.exhaustive  # tests/models/test_lora.py has mixed layers on a mesh
@pytest.mark.parametrize("form", FORMS)
def test_losses_and_gradients_do_not_depend_on_the_mesh(form):
    model = model_fixtures.model(**form, num_layers=2)
    expected_loss, expected = model_fixtures.first_gradients(model, meshes.make())
    loss, gradients = model_fixtures.first_gradients(model, meshes.make(2, 2, 2))
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


@pytest.mark.parametrize(
    "form, remat",
    sampled(
        [
            pytest.param(form.values[0], remat, id=f"{form.id}-{remat if isinstance(remat, str) else 'some'}")
            for form in FORMS
            for remat in ("none", "full", ("query", "attention", "up"))
        ],
        ["before-parallel_shared_norm-some", "after-parallel-some", "both-sequential-some"],
    ),
)
def test_a_block_is_counted_to_the_last_flop(form, remat):
    model = model_fixtures.model(**form)
    steps = TrainStep(
        model, *model_fixtures.sections(remat=remat, dtype="bfloat16", kernels="xla"), model_fixtures.optimization()
    )
    shape = jax.ShapeDtypeStruct((8, model_fixtures.CONTEXT), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), shape)
    read = count(steps.train, jax.eval_shape(steps.init), batch)
    ops = operations.step(workload("train", model, 8, model_fixtures.CONTEXT, remat=remat, kernels="xla"))
    assert sum(op.times * op.flops for op in ops) == read.matmul_flops


def test_a_shared_norm_must_be_there():
    with pytest.raises(ValueError, match='norm_placement = "after" has none there; set model.residual to "parallel"'):
        model_fixtures.model(norm_placement="after", residual="parallel_shared_norm")
