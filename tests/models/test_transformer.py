import functools
import math

import chex
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from flax import nnx
from matrices import sampled

from jaxlm.models import tree
from jaxlm.models.doors import Dropout
from jaxlm.models.embedding import looked_up
from jaxlm.models.execution_config import ExecutionConfig
from jaxlm.models.positions import packed_causal_mask
from kernels_pallas import gated_activation
from kernels_pallas.core.products import einsum_in_float32
from kernels_pallas.core.slopes import activation, soft_capped
from kernels_pallas.flash_attention import KeyRange

FAMILIES = [pytest.param(family, id=name) for name, family in model_fixtures.FAMILIES.items()]
families = pytest.mark.parametrize("family", sampled(FAMILIES, ["gpt2", "gemma"]))
one_family = pytest.mark.parametrize("family", sampled(FAMILIES, ["gemma"]))


def parts(family, **changes):
    model = model_fixtures.model(family, **changes)
    graph, _ = tree.abstract(model)
    return model, graph, model_fixtures.parameters(model)


@functools.partial(jax.jit, static_argnames=("graph", "execution"))
def logits(graph, parameters, tokens, positions, key_range=None, execution=ExecutionConfig(), dropout=Dropout()):
    module = nnx.merge(graph, parameters)
    key_range = key_range or packed_causal_mask(positions)
    hidden, _, _ = module.hidden(tokens, positions, key_range, execution=execution, dropout=dropout)
    return module.logits(hidden)


def rows(length=12, rows=2, seed=0):
    tokens = np.random.default_rng(seed).integers(0, model_fixtures.VOCABULARY, (rows, length), dtype=np.int32)
    return tokens, np.broadcast_to(np.arange(length, dtype=np.int32)[None], tokens.shape)


def hidden(graph, parameters, embedding, tokens, positions):
    """The residual stream as a function of the embedding: with all tokens different, one row of it is one input."""
    module = nnx.merge(graph, {**parameters, "embedding": embedding})
    return module.hidden(tokens, positions, packed_causal_mask(positions))[0]


@functools.partial(jax.jit, static_argnums=0)
def gradient_of_outputs(graph, parameters, positions, weight_T):
    def total(embedding):
        tokens = jnp.arange(positions.shape[1])[None]
        x_BTD = hidden(graph, parameters, embedding, tokens, positions)
        return jnp.sum(jnp.square(x_BTD) * weight_T[None, :, None])

    return jax.grad(total)(parameters["embedding"])


def influence(graph, parameters, positions):
    """Return a function of chosen outputs: the size of their gradient with respect to each input position."""

    def of(chosen):
        weight_T = np.zeros(positions.shape[1], np.float32)
        weight_T[list(chosen)] = 1.0
        gradient = gradient_of_outputs(graph, parameters, positions, weight_T)
        return np.abs(np.asarray(gradient)).sum(axis=1)[: positions.shape[1]]

    return of


@one_family
def test_causality_by_gradient(family):
    """An output has no gradient from any input after it, and some from every input up to it."""
    _, graph, parameters = parts(family)
    influence_of = influence(graph, parameters, np.arange(12)[None])
    for t in (0, 5, 11):
        felt = influence_of([t])
        assert np.all(felt[t + 1 :] == 0.0) and np.all(felt[: t + 1] > 0.0)


@one_family
def test_packed_documents_are_as_if_alone(family):
    _, graph, parameters = parts(family)
    tokens, _ = rows(rows=1)
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    packed = np.asarray(logits(graph, parameters, tokens, positions))
    for start, end in ((0, 5), (5, 8), (8, 12)):
        # Behind it, tokens that are documents of their own: one program for all lengths.
        row, its_positions = np.zeros_like(tokens), np.zeros_like(positions)
        row[:, : end - start], its_positions[:, : end - start] = tokens[:, start:end], np.arange(end - start)
        alone = np.asarray(logits(graph, parameters, row, its_positions))[:, : end - start]
        chex.assert_trees_all_close(packed[:, start:end], alone, rtol=1e-4, atol=1e-4)


@one_family
def test_no_gradient_crosses_a_document_boundary(family):
    _, graph, parameters = parts(family)
    felt = influence(graph, parameters, np.array([[*range(6), *range(6)]]))(range(6, 12))
    assert np.all(felt[:6] == 0.0) and np.all(felt[6:] > 0.0)


@families
def test_padding_behind_a_row_changes_nothing(family):
    _, graph, parameters = parts(family)
    tokens, positions = rows()
    padded = np.pad(tokens, ((0, 0), (0, 5)), constant_values=3)
    padded_positions = np.concatenate([positions, np.broadcast_to(np.arange(5)[None], (2, 5))], axis=1)
    chex.assert_trees_all_close(
        logits(graph, parameters, padded, padded_positions)[:, :12],
        logits(graph, parameters, tokens, positions),
        rtol=1e-4,
        atol=1e-4,
    )


EXECUTIONS = [
    ExecutionConfig(remat="none", scan_layers=True),
    ExecutionConfig(remat="none", scan_layers=False),
    ExecutionConfig(remat="full", scan_layers=True),
    ExecutionConfig(remat="full", scan_layers=False),
    ExecutionConfig(remat=("query", "key", "value"), scan_layers=True),
    ExecutionConfig(remat=("attention", "up", "gate"), scan_layers=False),
]


@pytest.mark.parametrize(
    "family, executions",
    sampled(
        [
            pytest.param(family, which, id=f"{family}-{len(which)}")
            for family in ("llama", "gpt2")
            for which in (EXECUTIONS, [EXECUTIONS[i] for i in (0, 5)])
        ],
        ["gpt2-2"],
    ),
)
def test_execution_changes_neither_loss_nor_gradients(family, executions):
    _, graph, parameters = parts(model_fixtures.FAMILIES[family], num_layers=2)
    tokens, positions = rows()

    def loss(parameters, execution):
        return jnp.mean(jnp.square(logits(graph, parameters, tokens, positions, execution=execution)))

    results = [jax.jit(jax.value_and_grad(loss), static_argnums=1)(parameters, e) for e in executions]
    for result in results[1:]:
        model_fixtures.assert_same_numbers(result, results[0], 1e-5)


def saved_bytes(graph, parameters, execution):
    """Activations held between forward and backward pass, the parameters left out."""
    tokens, positions = rows(length=32, rows=8)
    _, back = jax.eval_shape(
        lambda p: jax.vjp(lambda p: jnp.sum(logits(graph, p, tokens, positions, execution=execution)), p), parameters
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(back))


def test_remat_keeps_what_its_name_says():
    model, graph, parameters = parts(model_fixtures.LLAMA)
    none, full, up = (
        saved_bytes(graph, parameters, ExecutionConfig(remat=remat)) for remat in ("none", "full", ("up",))
    )
    assert full < up < none
    # Naming `up` keeps [B, T, F] in float32 per layer, and nothing else.
    assert up - full == model.num_layers * 8 * 32 * model.feed_forward.d_ff * 4


def test_grouped_heads_equal_repeated_ones():
    grouped, graph, parameters = parts(model_fixtures.LLAMA)
    _, full_graph, _ = parts({**model_fixtures.LLAMA, "attention": {"num_heads": 8, "num_kv_heads": 8}})
    repeated = jax.tree.map(lambda x: x, parameters)
    for name in ("key", "value"):
        repeated["layers"]["attention"][name] = np.repeat(parameters["layers"]["attention"][name], 2, axis=2)
    tokens, positions = rows()
    chex.assert_trees_all_close(
        logits(graph, parameters, tokens, positions),
        logits(full_graph, repeated, tokens, positions),
        rtol=1e-4,
        atol=1e-4,
    )


def layer_norm(x, scale, bias=0.0):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias


def mixture(scores, v):
    """softmax(scores [B, N, T, S]) · v [B, S, N, H], as [B, T, N, H]."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_gpt2_equals_its_equations_in_numpy():
    model, graph, parameters = parts(model_fixtures.GPT2)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters)
    # Biases are zero at first; give them values, so that a forgotten one shows.
    draw = np.random.default_rng(1)
    for path, leaf in tree.paths(p).items():
        if path.endswith("bias"):
            leaf += draw.normal(size=leaf.shape)
    tokens, positions = rows()
    x = p["embedding"][tokens] + p["positions"][positions]
    causal = np.tril(np.ones((12, 12), bool))
    for i in range(model.num_layers):
        layer = jax.tree.map(lambda a, i=i: a[i], p["layers"])
        a, f = layer["attention"], layer["feed_forward"]
        h = layer_norm(x, **layer["attention_norm"])
        q, k, v = (np.einsum("btd,dnh->btnh", h, a[n]) + a[f"{n}_bias"] for n in ("query", "key", "value"))
        scores = np.where(causal, np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(4), -np.inf)
        mixed = mixture(scores, v)
        x = x + np.einsum("btnh,nhd->btd", mixed, a["output"]) + a["output_bias"]
        h = layer_norm(x, **layer["feed_forward_norm"]) @ f["up"] + f["up_bias"]
        x = x + gelu(h) @ f["down"] + f["down_bias"]
    expected = layer_norm(x, **p["final_norm"]) @ p["embedding"].T
    actual = logits(graph, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), p), tokens, positions)
    model_fixtures.assert_same_numbers(actual, expected, 1e-5)


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * (1 + scale)


def turned(x, base, factor):
    """Rotary positions 0, 1, … of x [B, T, N, H], of which `factor` steps are one."""
    angle = np.arange(x.shape[1])[:, None] / factor * base ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def capped(x, cap):
    return cap * np.tanh(x / cap)


def test_gemma_equals_its_equations_in_numpy():
    """Everything that Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786) add to Llama, in one model."""
    model, graph, parameters = parts(model_fixtures.GEMMA)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters)
    draw = np.random.default_rng(1)
    for path, leaf in tree.paths(p).items():
        if path.endswith("scale"):
            assert np.all(leaf == 0)
            leaf += draw.normal(size=leaf.shape) / 2
    tokens, positions = rows()
    behind = np.arange(12)[:, None] - np.arange(12)[None]
    x = p["embedding"][tokens] * np.sqrt(32)
    for i in range(model.num_layers):
        layer = jax.tree.map(lambda a, i=i: a[i], p["layers"])
        a, f = layer["attention"], layer["feed_forward"]
        if i % 2:
            seen, angles = behind >= 0, (10_000.0, 8.0)
        else:
            seen, angles = (0 <= behind) & (behind < 5), (100.0, 1.0)
        h = rms_norm(x, **layer["attention_norm"])
        q, k, v = (np.einsum("btd,dnh->btnh", h, a[n]) for n in ("query", "key", "value"))
        q, k = (turned(rms_norm(y, **a[f"{n}_norm"]), *angles) for n, y in (("query", q), ("key", k)))
        k, v = (np.repeat(y, 2, axis=2) for y in (k, v))
        scores = np.where(seen, capped(0.5 * np.einsum("btnh,bsnh->bnts", q, k), 3.0), -np.inf)
        mixed = mixture(scores, v)
        x = x + rms_norm(np.einsum("btnh,nhd->btd", mixed, a["output"]), **layer["attention_post_norm"])
        h = rms_norm(x, **layer["feed_forward_norm"])
        made = (gelu(h @ f["gate"]) * (h @ f["up"])) @ f["down"]
        x = x + rms_norm(made, **layer["feed_forward_post_norm"])
    expected = capped(rms_norm(x, **p["final_norm"]) @ p["embedding"].T, 4.0)
    actual = logits(graph, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), p), tokens, positions)
    model_fixtures.assert_same_numbers(actual, expected, 1e-5)


def test_logits_are_float32_whatever_the_parameters_are():
    _, graph, parameters = parts(model_fixtures.QWEN3)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters)
    tokens, positions = rows()
    out = logits(graph, half, tokens, positions)
    assert out.dtype == jnp.float32
    # bfloat16 has 8 bits: its logits correlate with the exact ones, and are not them.
    exact = logits(graph, parameters, tokens, positions)
    assert np.corrcoef(out.ravel(), exact.ravel())[0, 1] > 0.99 and not np.array_equal(out, exact)


def test_dropout_drops_the_share_it_says_and_keeps_the_mean():
    x = jnp.ones((64, 64))
    dropped = Dropout(0.25, jax.random.key(0))(x, 0)
    np.testing.assert_allclose(np.mean(dropped == 0), 0.25, atol=0.03)  # 4,096 draws: four sigma
    np.testing.assert_allclose(dropped[dropped != 0], 1 / 0.75)
    assert not np.array_equal(dropped, Dropout(0.25, jax.random.key(0))(x, 1))
    chex.assert_trees_all_equal(Dropout(0.25)(x, 0), x)


def test_a_window_is_only_another_interval():
    """Sliding windows need no code in the model: a start that follows the query is one."""
    _, graph, parameters = parts(model_fixtures.LLAMA, num_layers=1)
    tokens, positions = rows(rows=1)
    window = KeyRange(jnp.maximum(positions - 2, 0), positions + 1)
    changed = tokens.copy()
    changed[0, 0] = (tokens[0, 0] + 1) % model_fixtures.VOCABULARY
    before, after = (logits(graph, parameters, t, positions, window) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, 3:], after[:, 3:])
    assert not np.array_equal(before[:, :3], after[:, :3])


def test_the_float32_product_has_the_gradients_of_einsum():
    draw = np.random.default_rng(0)
    a, b, weight = (jnp.asarray(draw.normal(size=s), jnp.bfloat16) for s in ((2, 5, 3), (2, 7, 3), (2, 5, 7)))

    def total(product, a, b):
        return jnp.sum(product("nqh,nkh->nqk", a, b).astype(jnp.float32) * weight.astype(jnp.float32))

    def exact(subscripts, a, b):
        return jnp.einsum(subscripts, a.astype(jnp.float32), b.astype(jnp.float32))

    assert einsum_in_float32("nqh,nkh->nqk", a, b).dtype == jnp.float32
    chex.assert_trees_all_close(einsum_in_float32("nqh,nkh->nqk", a, b), exact("nqh,nkh->nqk", a, b), rtol=1e-6)
    ours, theirs = (jax.grad(total, argnums=(1, 2))(product, a, b) for product in (einsum_in_float32, exact))
    assert {g.dtype for g in ours} == {jnp.dtype(jnp.bfloat16)}
    # The weights are bfloat16 numbers, so the cotangent is exact; what differs is one rounding of the result.
    chex.assert_trees_all_close(ours, theirs, rtol=2**-7)


def test_the_gradient_of_a_row_that_is_looked_up_often_is_a_float32_sum():
    """In bfloat16 a sum of thousands stands still once it is 256 times what is added."""
    index = np.zeros((4, 1024), np.int32)
    index[:, ::4] = 5
    x_BTD = jnp.asarray(np.random.default_rng(0).uniform(size=(4, 1024, 8)), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(dtype):
        table = jnp.ones((1, 6, 8), dtype)
        return jax.grad(lambda table: jnp.sum(looked_up(table, index) * x_BTD.astype(dtype)))(table)

    exact, narrow = gradient(jnp.float32), gradient(jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow, exact, rtol=2**-8)  # the last rounding


@pytest.mark.parametrize(
    "parts, mesh",
    sampled(
        [pytest.param(parts, mesh) for parts in (1, 2, 4) for mesh in ((1, 1, 1), (2, 1, 2), (1, 2, 4))],
        ["1-(2, 1, 2)", "2-(1, 1, 1)", "4-(1, 2, 4)"],
    ),
    ids=str,
)
def test_every_part_of_a_table_has_the_gradients_of_its_rows(parts, mesh):
    index = jax.random.randint(jax.random.key(0), (4, 24), -5, 21)  # rows are 0 to 15: others are the nearest
    x_BTD = jax.random.normal(jax.random.key(1), (4, 24, 8), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(dtype):
        table = jnp.ones((parts, 16 // parts, 8), dtype)
        return jax.grad(lambda table: jnp.sum(looked_up(table, index) * x_BTD.astype(dtype)))(table)

    exact = gradient(jnp.float32)
    with jax.set_mesh(meshes.make(*mesh)):
        narrow = gradient(jnp.bfloat16)
    # Each device rounds, and so does their sum.
    np.testing.assert_allclose(narrow.astype(jnp.float32), exact, atol=2**-7 * np.abs(exact).max())


def test_gelu_is_x_times_the_normal_distribution():
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    exact = np.array([v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x.astype(float)])
    np.testing.assert_allclose(activation("gelu", jnp.asarray(x)), exact, rtol=1e-6, atol=6 * 2**-24)


def is_kept(function, *x):
    """Shape and dtype of what the gradient of a function of arrays keeps."""
    _, pull_back = jax.vjp(function, *x)
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(pull_back) if leaf.shape]


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu_squared"])
def test_an_activation_keeps_one_array_of_each_operand_for_its_gradient(name):
    """In the dtype of its operand, though it is computed in float32."""
    x = jnp.linspace(-3, 3, 64, dtype=jnp.bfloat16)
    assert is_kept(functools.partial(activation, name), x) == [((64,), x.dtype)]
    assert is_kept(functools.partial(gated_activation, activation=name, implementation="xla"), x, x[::-1]) == 2 * [
        ((64,), x.dtype)
    ]


def test_a_soft_cap_keeps_one_array_for_its_gradient():
    x = jnp.linspace(-3, 3, 64)
    assert is_kept(lambda x: soft_capped(x, 2.0), x) == [((64,), x.dtype)]
    np.testing.assert_allclose(soft_capped(x, 2.0), 2 * np.tanh(x / 2), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda x: soft_capped(x, 2.0)))(x), np.cosh(x / 2) ** -2, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu", "relu_squared"])
def test_a_gate_by_xla_is_the_reference(name, dtype):
    """Its gradients round the slopes, and then the product."""
    gate, up, weight = (jax.random.normal(key, (256,), dtype) for key in jax.random.split(jax.random.key(0), 3))
    gated = functools.partial(gated_activation, activation=name)
    (ours, our_back), (theirs, their_back) = (
        jax.vjp(functools.partial(gated, implementation=implementation), gate, up)
        for implementation in ("xla", "reference")
    )
    rtol = {jnp.float32: 1e-5, jnp.bfloat16: 2**-7}[dtype]
    chex.assert_trees_all_close(ours, theirs, rtol=1e-6, atol=1e-6)  # kernels compute GELU otherwise
    chex.assert_trees_all_close(our_back(weight), their_back(weight), rtol=rtol, atol=1e-6)
