"""Parts of a model that some families have: each is its equation, also packed, cached, on meshes, and is counted."""

import functools

import forced_steps
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from engine_fixtures import SMALL
from flax import nnx
from matrices import sampled
from workload_fixtures import workload

from jaxlm.costs.counted import operations
from jaxlm.costs.jaxpr.count import count
from jaxlm.inference.engine import Engine
from jaxlm.inference.scoring import Scorer
from jaxlm.models import tree
from jaxlm.models.positions import packed_causal_mask
from jaxlm.training.step import TrainStep
from kernels_pallas.core import interpreted
from kernels_pallas.linear_cross_entropy import chunks

T = 20  # tokens of a row


def of(attention=None, **changes):
    """Return the keys of a Llama with changes."""
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 12}
    return {**model_fixtures.LLAMA, "num_layers": 2, "attention": {**heads, **(attention or {})}, **changes}


def scaled(kind, **scaling):
    """Return the keys of a Llama with a scaling of its angles."""
    return of(position={"kind": "rope", "theta": 30.0, "scaling": {"kind": kind, "factor": 3.0, **scaling}})


def pattern(**patch):
    """Return three layers with a window and one without, which is patched."""
    return {"name": "local", "layers": 3}, {"name": "global", "attention": {"window": None}, **patch}


PARTS = {
    "partial": of(position={"kind": "rope", "fraction": 0.5}),
    "reversed": of(position={"kind": "rope", "reversed": True, "fraction": 0.34}),
    "dynamic": scaled("dynamic", original_context_length=4),
    "yarn": scaled("yarn", original_context_length=16, beta_fast=2.0, beta_slow=0.1),
    "yarn, whole": scaled("yarn", original_context_length=16, truncate=False, mscale=0.7, mscale_all_dim=0.3),
    "longrope": scaled(
        "longrope", original_context_length=4, short_factors=[1.0, 1.1, 1.2, 1.5, 2, 3], long_factors=[1, 2, 3, 4, 5, 6]
    ),
    "scaled": of(embedding_scale=3.0, residual_scale=0.22, logit_scale=0.3, logit_soft_cap=2.0),
    "sinks": of({"sinks": True, "window": 5}, num_layers=6, pattern=pattern()),
    "norm of heads after rotation": of({"qk_norm": "head_after_rope", "num_kv_heads": 1}),
    "norm of projections": of({"qk_norm": "projection", "qkv_bias": True}, norm_placement="after"),
    "layer norm of projections": of({"qk_norm": "projection", "num_kv_heads": 1}, norm={"kind": "layer"}),
    "norm without a scale": of(
        {"qk_norm": "head_after_rope"},
        norm={"kind": "rms", "scale": False},
        embedding_norm=True,
        position={"kind": "rope", "reversed": True},
    ),
    "layer norm without parameters": of({"qk_norm": "head"}, norm={"kind": "layer", "scale": False, "bias": False}),
    "norm of embeddings": of(embedding_norm=True, norm={"kind": "layer", "scale": False}),
    "no positions in global layers": of({"window": 5}, num_layers=6, pattern=pattern(position={"kind": "none"})),
    "yarn in global layers": of(
        {"window": 5},
        num_layers=6,
        pattern=pattern(position={"scaling": {"kind": "yarn", "factor": 4.0, "original_context_length": 16}}),
    ),
    "scaled, parallel": of(
        embedding_scale="sqrt_d_model", residual_scale=1.5, norm_placement="both", residual="parallel"
    ),
}

# Keys keep the angles with which they were written: dynamic ones differ from those of a full pass.
CACHED = [name for name in PARTS if name != "dynamic"]


FEW = ["reversed", "yarn", "scaled", "sinks", "norm of projections", "no positions in global layers"]


def over(*kept):
    """Parametrise a test over these parts, and over all in the exhaustive suite."""
    return pytest.mark.parametrize("name", sampled(list(PARTS), list(kept)))


@functools.cache
def parts(name):
    """Return a model, its graph and parameters, no norm of which is 1."""
    model = model_fixtures.model(PARTS[name])
    draw = np.random.default_rng(1)

    def loud(path, leaf):
        is_vector = path[-1].key.endswith(("scale", "bias", "sinks"))
        return leaf + draw.uniform(-0.4, 0.6, leaf.shape).astype(np.float32) if is_vector else leaf

    parameters = jax.tree_util.tree_map_with_path(loud, model_fixtures.parameters(model))
    return model, tree.abstract(model)[0], parameters


@functools.partial(jax.jit, static_argnums=0)
def logits(graph, parameters, tokens, positions):
    module = nnx.merge(graph, parameters)
    return module.logits(module.hidden(tokens, positions, packed_causal_mask(positions))[0])


def frequencies(position, width, length):
    """Return the angle of each pair at position 1, and what multiplies cos and sin, by the published formulas."""
    theta, scaling, pairs = position.theta, position.scaling, np.arange(0, width, 2)
    if scaling is None:
        return theta ** (-pairs / width), 1.0
    factor, original = scaling.factor, scaling.original_context_length
    if scaling.kind == "dynamic":
        longer = max(length, original)
        theta *= (factor * longer / original - (factor - 1)) ** (width / (width - 2))
        return theta ** (-pairs / width), 1.0
    if scaling.kind == "longrope":
        factors = scaling.long_factors if length > original else scaling.short_factors
        return 1 / (np.array(factors) * theta ** (pairs / width)), np.sqrt(1 + np.log(factor) / np.log(original))

    def dimension(rotations):
        return width * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    factors = [0.1 * slope * np.log(factor) + 1 for slope in (scaling.mscale, scaling.mscale_all_dim)]
    return (1 - ramp + ramp / factor) * theta ** (-pairs / width), factors[0] / factors[1]


def rotated(x, position, length):
    if position.kind == "none":
        return x
    width = int(x.shape[-1] * position.fraction)
    frequency, factor = frequencies(position, width, length)
    angle = (np.arange(x.shape[1])[:, None] * frequency)[None, :, None]
    cos, sin = factor * np.cos(angle), factor * np.sin(angle) * (-1 if position.reversed else 1)
    first, second, rest = np.split(x, [width // 2, width], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def norm(settings, x, p, there=True, dimensions=1):
    """Return the norm of x over its last dimensions, if it is there, with the parameters that there are."""
    if not there:
        return x
    over, p = tuple(range(-dimensions, 0)), p or {}
    if settings.kind == "layer":
        x = x - np.mean(x, over, keepdims=True)
    y = x / np.sqrt(np.mean(x**2, over, keepdims=True) + 1e-5) * p.get("scale", 1.0)
    return y + p.get("bias", 0.0)


def q_or_k_rotated(x, p, block):
    kind, length = block.attention.qk_norm, x.shape[1]
    if kind == "head_after_rope":
        return norm(block.norm, rotated(x, block.position, length), p)
    return rotated(norm(block.norm, x, p, kind != "none", 2 if kind == "projection" else 1), block.position, length)


def attention(x, p, block):
    query, key, value = (np.einsum("btd,dnh->btnh", x, p[name]) for name in ("query", "key", "value"))
    if "query_bias" in p:
        query, key, value = query + p["query_bias"], key + p["key_bias"], value + p["value_bias"]
    query, key = (q_or_k_rotated(y, p.get(f"{name}_norm"), block) for y, name in ((query, "query"), (key, "key")))
    key, value = (np.repeat(y, query.shape[2] // y.shape[2], axis=2) for y in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    seen = np.tri(x.shape[1], dtype=bool)
    seen = seen if block.window is None else seen & ~np.tri(x.shape[1], k=-block.window, dtype=bool)
    scores = np.where(seen, scores, -np.inf)
    if "sinks" in p:
        sinks = np.broadcast_to(p["sinks"][None, :, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, sinks], axis=-1)
    weights = model_fixtures.softmax(scores)[..., : x.shape[1]]
    return np.einsum("bnts,bsnh,nhd->btd", weights, value, p["output"], optimize=True)


def feed_forward(x, p):
    return (model_fixtures.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def layer(x, p, block):
    before, after = block.norm_placement != "after", block.norm_placement != "before"

    def attended(x):
        made = attention(norm(block.norm, x, p.get("attention_norm"), before), p["attention"], block)
        return norm(block.norm, made, p.get("attention_post_norm"), after)

    def fed(x):
        made = feed_forward(norm(block.norm, x, p.get("feed_forward_norm"), before), p["feed_forward"])
        return norm(block.norm, made, p.get("feed_forward_post_norm"), after)

    m = block.residual_scale
    if block.residual == "parallel":
        return x + m * attended(x) + m * fed(x)
    x = x + m * attended(x)
    return x + m * fed(x)


def written_out(model, parameters, tokens):
    """Return the logits of rows that are a document each, from the equations, in float64."""
    parameters = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters)
    factor = model.embedding_scale
    x = parameters["embedding"][tokens] * (np.sqrt(model.d_model) if factor == "sqrt_d_model" else factor)
    x = norm(model.norm, x, parameters.get("embedding_norm"), model.embedding_norm)
    for i, block in enumerate(model.layers):
        p = jax.tree.map(lambda leaf, i=i: leaf[i], parameters["layers"])
        x = layer(x, p, block)
    scores = model.logit_scale * (norm(model.norm, x, parameters.get("final_norm")) @ parameters["unembedding"])
    return scores if model.logit_soft_cap is None else model.logit_soft_cap * np.tanh(scores / model.logit_soft_cap)


def rows(count=2, length=T):
    tokens = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (count, length), dtype=np.int32)
    return tokens, np.broadcast_to(np.arange(length, dtype=np.int32)[None], tokens.shape)


@pytest.mark.parametrize("name", sampled(list(PARTS), [*FEW, "longrope", "norm of embeddings"]))
def test_a_part_is_its_equation(name):
    model, graph, parameters = parts(name)
    tokens, positions = rows()
    expected = written_out(model, parameters, tokens)
    model_fixtures.assert_same_numbers(logits(graph, parameters, tokens, positions), expected, 1e-5)


@over("yarn", "norm of projections", "no positions in global layers")
def test_packed_documents_are_as_if_alone(name):
    _, graph, parameters = parts(name)
    tokens, _ = rows(1)
    cuts = [(0, 3), (3, T - 3), (T - 3, T)]
    packed = np.concatenate([np.arange(end - start) for start, end in cuts])[None]
    found = np.asarray(logits(graph, parameters, tokens, packed))
    for start, end in cuts:
        # Behind it, tokens that are documents of their own: one program for all lengths.
        alone, positions = np.zeros_like(tokens), np.zeros_like(packed)
        alone[:, : end - start], positions[:, : end - start] = tokens[:, start:end], packed[:, start:end]
        expected = np.asarray(logits(graph, parameters, alone, positions))[:, : end - start]
        model_fixtures.assert_same_numbers(found[:, start:end], expected, 1e-5)


@pytest.mark.parametrize("name", sampled(CACHED, ["longrope", "no positions in global layers"]))
def test_an_engine_reads_what_the_full_pass_does(name):
    """Prompts of several lengths, and nine more tokens."""
    model, graph, parameters = parts(name)
    tokens, positions = rows(3)
    expected = np.asarray(logits(graph, parameters, tokens, positions))
    lengths = np.array([5, 7, 11], np.int32)  # all beyond an original context of 4
    same = functools.partial(model_fixtures.assert_same_numbers, relative=1e-5)
    forced_steps.assert_reads_as_the_full_pass(model, parameters, np.asarray(tokens)[:, :20], lengths, expected, same)


@pytest.mark.parametrize(
    ("name", "tensor"),
    sampled(
        [pytest.param(n, t) for n in ("partial", "norm of projections", "norm without a scale") for t in (1, 2)],
        ["norm of projections-2"],
    ),
)
def test_kernels_compute_what_xla_does(name, tensor):
    """Heads are as wide as the kernel for attention takes; devices that share heads leave the norm of all to XLA."""
    model = model_fixtures.model({**PARTS[name], "attention": {**PARTS[name]["attention"], "head_dim": 16}})
    (graph, _), mesh = tree.abstract(model), meshes.make(tensor=tensor, devices=jax.devices()[:tensor])
    parameters = model_fixtures.placed(model, mesh)
    tokens, positions = rows()
    with jax.set_mesh(mesh):
        expected = logits(graph, parameters, tokens, positions)
        with interpreted("triton"):
            found = logits(graph, parameters, tokens, positions)
    model_fixtures.assert_same_numbers(found, expected, 1e-5)


@pytest.mark.exhaustive  # tests/lowering/test_report.py counts the norm of projections on a mesh
@over("norm of projections")
def test_losses_and_gradients_do_not_depend_on_the_mesh(name):
    model = model_fixtures.model(PARTS[name])
    expected_loss, expected = model_fixtures.first_gradients(model, meshes.make())
    loss, gradients = model_fixtures.first_gradients(model, meshes.make(2, 2, 2))
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


@over("yarn", "scaled", "norm of projections")
def test_a_part_is_counted_to_the_last_flop(name):
    model = model_fixtures.model(PARTS[name])
    sections = model_fixtures.sections(remat="full", dtype="bfloat16", kernels="xla")
    made = TrainStep(model, *sections, model_fixtures.optimization())
    shape = jax.ShapeDtypeStruct((8, model_fixtures.CONTEXT), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), shape)
    read = count(made.train, jax.eval_shape(made.init), batch)
    ops = operations.step(workload("train", model, 8, model_fixtures.CONTEXT, remat="full", kernels="xla"))
    assert sum(op.times * op.flops for op in ops) == read.matmul_flops


def test_scaled_logits_have_the_same_loss_where_they_are_not_held(monkeypatch):
    """In chunks, as kernels compute it."""
    model, graph, parameters = parts("scaled")
    tokens, _ = rows()
    hidden = jax.random.normal(jax.random.key(0), (*tokens.shape, model.d_model))

    def loss(hidden, parameters):
        return nnx.merge(graph, parameters).cross_entropy(hidden, tokens, tokens > 0)["loss"]

    def by_logits(hidden, parameters):
        logprobs = jax.nn.log_softmax(nnx.merge(graph, parameters).logits(hidden))
        at_target = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(tokens > 0, at_target, 0.0))

    def both(loss):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, parameters)

    expected = both(by_logits)
    monkeypatch.setattr(chunks, "LOGITS", 16 * model.vocab_size)
    with interpreted("chunked"):
        model_fixtures.assert_same_numbers(both(loss), expected, 1e-5)


def test_scores_of_continuations_are_of_scaled_logits():
    model, graph, parameters = parts("scaled")
    tokens, positions = rows()
    expected = jax.nn.log_softmax(logits(graph, parameters, tokens, positions))[:, :-1]
    expected = jnp.take_along_axis(expected, tokens[:, 1:, None], axis=-1)[..., 0].sum(axis=1)
    pairs = [(row[:1], row[1:]) for row in tokens.tolist()]
    found = dict(Scorer(Engine(model, parameters, meshes.make(), SMALL))(pairs))
    model_fixtures.assert_same_numbers(jnp.array([found[i].logprob for i in range(len(pairs))]), expected, 1e-5)


@pytest.mark.exhaustive
def test_layers_with_and_without_positions_train():
    """Three layers of a kind and one of another keep their parameters in one stack."""
    model = model_fixtures.model(PARTS["no positions in global layers"])
    assert [block.position.kind for block in model.layers] == [*["rope"] * 3, "none", *["rope"] * 2]
    assert not [path for path in tree.paths(tree.shapes(tree.abstract(model)[1])) if "global" in path]
    metrics, _ = model_fixtures.run_steps(model, model_fixtures.sections(), [model_fixtures.batch()] * 8)
    assert metrics[-1]["loss"] < 0.9 * metrics[0]["loss"]
