"""The recurrent kinds of [model.attention]: alone against the papers in NumPy, and in hybrids with attention."""

from collections import Counter
from dataclasses import replace

import engine_jaxprs
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from engine_fixtures import SMALL, check_pages
from flax import nnx
from markers import ELSEWHERE
from matrices import sampled
from model_fixtures import silu
from workload_fixtures import sections_of, workload

from jaxlm.config import load
from jaxlm.costs.counted import operations
from jaxlm.costs.counted.cache import kv_cache
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import count
from jaxlm.inference.engine import Engine
from jaxlm.inference.programs import EnginePrograms
from jaxlm.inference.requests import Request, Sampling
from jaxlm.lowering import report, targets
from jaxlm.models import tree
from jaxlm.models.attention import attention
from jaxlm.models.cache import OwnTokens
from jaxlm.models.doors import Dropout
from jaxlm.models.rows import RowContext
from jaxlm.parallel.rules import ENGINE
from jaxlm.training.step import TrainStep
from kernels_pallas.flash_attention import KeyRange

# Keys and values have sizes of their own, and two value heads share a key.
DELTA = {"kind": "gated_delta", "num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 12}
KINDS = {"gated_delta": DELTA}
GATED = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "output_gate": "sigmoid", "qk_norm": "head"}
# Three recurrent layers to one of attention, whose heads are rotated by a quarter and gated, as in Qwen3-Next.
HYBRIDS = {
    "gated_delta": ({"name": "delta", "layers": 3, "attention": DELTA}, {"name": "full"}),
}
CHUNK = 64


def hybrid(name: str, **changes):
    position = {"kind": "rope", "fraction": 0.25}
    return model_fixtures.model(num_layers=4, pattern=HYBRIDS[name], position=position, attention=GATED, **changes)


def layer(kind: str):
    """Return a layer and its drawn parameters."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: attention(config(kind), nnx.Rngs(0))))
    draw = np.random.default_rng(1)

    def drawn(path, leaf):
        size = 1.0 if leaf.ndim < 2 else 0.3 if path[0].key.endswith("taps") else 0.2
        return jnp.asarray(size * draw.standard_normal(leaf.shape), jnp.float32)

    return graph, jax.tree_util.tree_map_with_path(drawn, abstract)


def config(kind: str):
    return model_fixtures.model(attention=KINDS[kind], position={"kind": "none"})


def rows_of(positions: np.ndarray, padding: np.ndarray | None = None) -> RowContext:
    return RowContext(
        jnp.asarray(positions), KeyRange(jnp.asarray(positions), jnp.asarray(positions + 1)), None, Dropout(), padding
    )


def through(graph, parameters, x_BTD, rows):
    return nnx.merge(graph, parameters)(x_BTD, rows, OwnTokens())[0]


def softplus(x):
    return np.log1p(np.exp(x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, scale, epsilon=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale


def convolved(x_TC, taps_KC):
    """Return the causal convolution of each channel: the last tap is of the token itself."""
    padded = np.concatenate([np.zeros((len(taps_KC) - 1, *x_TC.shape[1:])), x_TC])
    return sum(padded[i : i + len(x_TC)] * tap for i, tap in enumerate(taps_KC))


def gated_delta(p, x_TD):
    """Return the layer's output for one document, token by token, in float64."""
    q, k, v = (silu(convolved(np.tensordot(x_TD, p[name], 1), p[f"{name}_taps"])) for name in ("query", "key", "value"))
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    share = v.shape[1] // k.shape[1]
    q, k = (np.repeat(unit(x), share, axis=1) for x in (q, k))
    decay = np.exp(-np.exp(p["log_rate"]) * softplus(x_TD @ p["time"] + p["time_bias"]))
    beta = sigmoid(x_TD @ p["beta"])
    state, outputs = np.zeros((v.shape[1], q.shape[2], v.shape[2])), []
    for t in range(len(x_TD)):
        state = state * decay[t, :, None, None]
        found = np.einsum("nhv,nh->nv", state, k[t])
        state = state + np.einsum("nh,nv->nhv", k[t], beta[t, :, None] * (v[t] - found))
        outputs.append(np.einsum("nhv,nh->nv", state, q[t] * q.shape[2] ** -0.5))
    gate = silu(np.tensordot(x_TD, p["gate"], 1))
    return np.tensordot(rms(np.stack(outputs), p["output_norm/scale"]) * gate, p["output"], 2)


REFERENCES = {"gated_delta": gated_delta}

# Documents begin on the first, the second and the last token of a chunk, and one has a single token.
LENGTHS = [CHUNK, CHUNK + 1, 1, CHUNK - 3, 9]
POSITIONS = np.concatenate([np.arange(n) for n in LENGTHS])
ENDS = np.cumsum(LENGTHS)
T, D = int(ENDS[-1]), 32


def inputs() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(T, D)), jnp.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_row_is_each_document_alone(kind):
    """Forward, and the gradients of the input and of all parameters. Alone, documents are rows with padding."""
    graph, parameters = layer(kind)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(T, D)), jnp.float32)
    at = [np.arange(end - n, end) for n, end in zip(LENGTHS, ENDS, strict=True)]

    def packed(parameters, x_TD):
        return through(graph, parameters, x_TD[None], rows_of(POSITIONS[None]))[0]

    def alone(parameters, x_TD):
        most = max(LENGTHS)
        padded = jnp.stack([jnp.pad(x_TD[each], [(0, most - len(each)), (0, 0)]) for each in at])
        position_BT = np.tile(np.arange(most), (len(at), 1))
        rows = rows_of(position_BT, position_BT >= np.array(LENGTHS)[:, None])
        y_BTD = through(graph, parameters, padded, rows)
        return jnp.concatenate([y_TD[:n] for y_TD, n in zip(y_BTD, LENGTHS, strict=True)])

    def both(f):
        def total(*operands):
            y_TD = f(*operands)
            return jnp.sum(jnp.sin(y_TD) * weights), y_TD

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(parameters, inputs())

    ((_, found), of_found), ((_, expected), of_expected) = both(packed), both(alone)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    model_fixtures.assert_same_numbers(of_found, of_expected, 2e-5)
    flat = {"/".join(map(str, path)): np.asarray(x, np.float64) for path, x in nnx.to_flat_state(parameters)}
    for each in at:
        reference = REFERENCES[kind](flat, np.asarray(inputs()[each], np.float64))
        np.testing.assert_allclose(found[each], reference, rtol=0, atol=2e-5 * np.abs(reference).max())


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_a_later_one_or_another_document(kind):
    """By gradient of a token's output with respect to all inputs."""
    graph, parameters = layer(kind)

    @jax.jit
    def seen(token):
        def of(x_TD):
            return through(graph, parameters, x_TD[None], rows_of(POSITIONS[None]))[0][token].sum()

        return jnp.abs(jax.grad(of)(inputs())).max(axis=1)

    for token in (5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 2 * CHUNK + 2, 3 * CHUNK - 2, T - 1):
        size = seen(token)  # sums of decays cancel but for rounding
        read = set(np.flatnonzero(size > 1e-6 * size.max()).tolist())
        assert read <= set(range(token - POSITIONS[token], token + 1))
        assert read >= set(range(token - min(POSITIONS[token], 2), token + 1))


MESHES = [{"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 2}]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", HYBRIDS)
def test_losses_and_gradients_do_not_depend_on_the_mesh(name, mesh):
    expected_loss, expected = model_fixtures.first_gradients(hybrid(name), meshes.make())
    loss, gradients = model_fixtures.first_gradients(hybrid(name), meshes.make(**mesh))
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    # Some queries are short before they are divided by their lengths: chunks of another size are 1e-4 apart too.
    model_fixtures.assert_same_numbers(gradients, expected, 2e-4)


REMATS = ("none", "full", ("query", "gate"))


@pytest.mark.parametrize("sequence", sampled([16, 160], ["160"]), ids=["one chunk", "several chunks"])
@pytest.mark.parametrize("remat", sampled(REMATS, ["none", "full"]), ids=str)
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_step_is_counted_to_the_last_flop(name, remat, sequence):
    work = workload("train", hybrid(name), 8, sequence, dtype="float32", remat=remat, kernels="xla")
    steps = TrainStep(work.model, *sections_of(work), work.optimizer)
    batch = dict.fromkeys(
        ("tokens", "targets", "segments", "positions"), jax.ShapeDtypeStruct((8, sequence), jnp.int32)
    )
    expected = count(steps.train, jax.eval_shape(steps.init), batch)
    found = Counter()
    for op in operations.step(work):
        found[op.phase] += op.times * op.flops
    assert sum(found.values()) == expected.matmul_flops
    assert found["backward"] == expected.backward.matmul_flops
    assert found["rematerialised"] == expected.rematerialised.matmul_flops


@pytest.mark.parametrize("kind, sequence", [("prefill", 75), ("decode", 32)])
@pytest.mark.parametrize("name", HYBRIDS)
def test_an_engine_s_steps_are_counted_to_the_last_flop(name, kind, sequence):
    work = workload(kind, hybrid(name, context_length=128), 3, sequence, dtype="float32", kernels="xla")
    expected = sum(step.matmul_flops for step in engine_jaxprs.costs(work))
    assert sum(op.times * op.flops for op in operations.step(work)) == expected
    assert kv_cache(work) == engine_jaxprs.cache_bytes(work)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"data": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", HYBRIDS)
def test_the_engine_draws_what_the_full_pass_draws(name, sizes):
    """Also from prefixes that it finds, and after preemptions."""
    config = hybrid(name, context_length=160)
    graph, _ = tree.abstract(config)
    parameters = tree.init(config, 0, mesh := meshes.make(**sizes))
    layout = EnginePrograms.of(config, mesh, jnp.dtype("float32"), SMALL).layout
    each = (layout.page_bytes(group, jnp.dtype("float32"), mesh, ENGINE) for group in range(2))
    engine = Engine(config, parameters, mesh, replace(SMALL, cache_bytes=11 * sum(each)))
    draw = np.random.default_rng(0)
    long, *others = (draw.integers(0, model_fixtures.VOCABULARY, n).tolist() for n in (100, 1, 33, 64, 96))

    def texts(*prompts):
        """Check what is drawn after prompts, and return how much of each was found in the cache."""
        asked = {engine.submit(Request(prompt, 48, Sampling(temperature=0.0))): prompt for prompt in prompts}
        drawn, cached = {id: [] for id in asked}, {}
        for event in engine.run():
            drawn[event.id].append(event.token.id)
            cached[event.id] = event.cached
        for id, prompt in asked.items():
            expected = model_fixtures.full_logits(graph, parameters, prompt + drawn[id], 160)
            assert drawn[id] == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        return [cached[id] for id in asked]

    texts(*others)
    texts(long)
    assert texts(long) == [96]
    assert texts(long[:70] + others[0]) == [64]
    check_pages(engine)


FILE = """
[model]
base = "quickstart"
vocab_size = 512
context_length = 512
num_layers = 4

[model.position]
fraction = 0.25

[model.attention]
num_heads = 4
head_dim = 64
output_gate = "sigmoid"

[[model.pattern]]
name = "recurrent"
layers = 3
attention = { %s }

[[model.pattern]]
name = "full"

[training]
batch = 8
sequence = 512
"""
SIZES = {"gated_delta": 'kind = "gated_delta", num_key_heads = 4, num_value_heads = 8, key_dim = 32, value_dim = 64'}


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("workload_kind", ["train", "prefill", "decode"])
@pytest.mark.parametrize("kind", SIZES)
def test_the_compiled_step_has_the_counted_flops(kind, workload_kind, tmp_path):
    file, target = tmp_path / "mine.toml", Target.parse("h200-sxm:4")
    file.write_text(FILE % SIZES[kind])
    mesh = meshes.make(2, 1, 2, devices=targets.devices(target))
    found = report.compile(load(file, [], workload_kind), workload_kind, target, mesh, False).report
    assert found.flops == found.counted_flops
