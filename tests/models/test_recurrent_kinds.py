"""The recurrent kinds of [model.attention]: alone against the papers in NumPy, and in hybrids with attention."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import engine_jaxprs
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from engine_fixtures import SMALL, check_pages, prefixes_read
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from markers import ELSEWHERE
from matrices import sampled
from model_fixtures import DELTA, MAMBA, silu
from workload_fixtures import sections_of, workload

from jaxlm.config import load
from jaxlm.costs.counted import operations
from jaxlm.costs.counted.cache import kv_cache
from jaxlm.costs.counted.traced import traced_work
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import count
from jaxlm.inference.cache_memory import CacheSize
from jaxlm.inference.engine import Engine
from jaxlm.inference.programs import EnginePrograms
from jaxlm.inference.settings import EngineSettings
from jaxlm.inference.step_shapes import TILE, StepShape
from jaxlm.lowering import hlo, launched_kernels, report, targets
from jaxlm.lowering.argument_reads import argument_reads
from jaxlm.models import tree
from jaxlm.models.attention import attention
from jaxlm.models.cache import OwnTokens
from jaxlm.models.doors import Dropout
from jaxlm.models.doors.scan import ChunkRows, _FlatChunk, scan
from jaxlm.models.kernels import using_kernels
from jaxlm.models.logical_axes import HEADS
from jaxlm.models.recurrences.delta_rule import gated_delta_rule as delta_rule
from jaxlm.models.recurrences.state_space import state_space
from jaxlm.models.rows import RowContext
from jaxlm.parallel.rules import ENGINE
from jaxlm.training.step import TrainStep
from kernels_pallas.flash_attention import KeyRange

KINDS = {
    "gated_delta": DELTA,
    "short_convolution": {"kind": "short_convolution", "bias": True},
    "mamba2": MAMBA,
    "mamba2 of one group": {**MAMBA, "num_groups": 1, "gate": "after_norm", "time_limits": (0.2, 1.5)},
}
GATED = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "output_gate": "sigmoid", "qk_norm": "head"}
NONE = {"kind": "none"}
# Three recurrent layers to one of attention, whose heads are rotated by a quarter and gated, as in Qwen3-Next.
HYBRIDS = {
    "gated_delta": ({"name": "delta", "layers": 3, "attention": DELTA}, {"name": "full"}),
    "others": (
        {"name": "convolution", "attention": {"kind": "short_convolution"}},
        {"name": "mamba", "attention": MAMBA},
        {"name": "mamba_of_one", "attention": {**MAMBA, "num_groups": 1}},
        {"name": "full"},
    ),
    # Layers of one part each, as in Nemotron-H.
    "of one part": (
        {"name": "mamba", "attention": MAMBA, "feed_forward": NONE},
        {"name": "mlp", "attention": NONE, "feed_forward": {"activation": "relu_squared", "gated": False}},
        {"name": "full", "feed_forward": NONE, "position": {"kind": "none"}},
    ),
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
        name = path[0].key
        size = 1.0 if leaf.ndim < 2 or name == "output_norm" else 0.3 if name.endswith("taps") else 0.2
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


def short_convolution(p, x_TD):
    value, input_gate, gate = (x_TD @ p[name] + p[f"{name}_bias"] for name in ("value", "input_gate", "gate"))
    y_TD = convolved(input_gate * value, p["taps"]) + p["taps_bias"]
    return (gate * y_TD) @ p["output"] + p["output_bias"]


def mamba2(p, x_TD, groups=2, before_norm=True, limits=(0, np.inf)):
    def product(name):
        return np.tensordot(x_TD, p[name], 1) + p[f"{name}_bias"]

    q, k, v = (
        silu(convolved(product(name), p[f"{name}_taps"]) + p[f"{name}_taps_bias"]) for name in ("query", "key", "value")
    )
    q, k = (np.repeat(x, v.shape[1] // groups, axis=1) for x in (q, k))
    time = np.clip(softplus(x_TD @ p["time"] + p["time_bias"]), *limits)
    decay = np.exp(-np.exp(p["log_rate"]) * time)
    state, outputs = np.zeros((v.shape[1], q.shape[2], v.shape[2])), []
    for t in range(len(x_TD)):
        state = state * decay[t, :, None, None] + np.einsum("nh,nv->nhv", k[t], time[t, :, None] * v[t])
        outputs.append(np.einsum("nhv,nh->nv", state, q[t]) + p["skip"][:, None] * v[t])
    y, gate = np.stack(outputs), silu(product("gate"))
    y = y * gate if before_norm else y
    y = rms(y.reshape(len(y), groups, -1), 1.0).reshape(y.shape) * p["output_norm/scale"]
    return np.tensordot(y if before_norm else y * gate, p["output"], 2) + p["output_bias"]


REFERENCES = {
    "gated_delta": gated_delta,
    "short_convolution": short_convolution,
    "mamba2": mamba2,
    "mamba2 of one group": partial(mamba2, groups=1, before_norm=False, limits=(0.2, 1.5)),
}

# Documents begin on the first, the second and the last token of a chunk, and one has a single token.
LENGTHS = [CHUNK, CHUNK + 1, 1, CHUNK - 3, 9]
POSITIONS = np.concatenate([np.arange(n) for n in LENGTHS])
ENDS = np.cumsum(LENGTHS)
T, D = int(ENDS[-1]), 32


def inputs() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(T, D)), jnp.float32)


@pytest.mark.parametrize("kind", sampled(KINDS, ["gated_delta", "short_convolution", "mamba2"]))
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


@pytest.mark.parametrize("kind", sampled(KINDS, ["mamba2"]))
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


# Matrices that XLA for GPUs would merge, beside those with one number per head.
WIDE = {
    "gated_delta": {"kind": "gated_delta", "num_key_heads": 16, "num_value_heads": 16, "key_dim": 64, "value_dim": 64},
    "mamba2": {"kind": "mamba2", "num_heads": 16, "head_dim": 64, "state_dim": 64, "num_groups": 16},
}

REFUSED = [
    (DELTA | {"num_key_heads": 3}, "num_key_heads = 3 does not divide model.attention.num_value_heads = 4"),
    (DELTA | {"taps": 1}, "taps"),
    (MAMBA | {"num_groups": 3}, "num_groups = 3 does not divide model.attention.num_heads = 4"),
    (MAMBA | {"time_limits": (0.5, 0.1)}, "must be a lower and a higher limit"),
    ({"kind": "short_convolution", "window": 3}, "window"),
]


def test_a_layer_has_attention_or_a_feed_forward_layer():
    for changes, says in (
        (
            {"attention": NONE, "feed_forward": NONE},
            'model.attention.kind = "none" and model.feed_forward.kind = "none"',
        ),
        ({"feed_forward": NONE, "residual": "parallel"}, "needs attention and a feed-forward layer side by side"),
    ):
        with pytest.raises(ValueError, match=says):
            model_fixtures.model(**changes)
        with pytest.raises(ValueError, match=says.replace("model.", "model.pattern\\[0\\].")):
            model_fixtures.model(pattern=({"name": "alone", **changes},))


@pytest.mark.parametrize("table, says", REFUSED, ids=range(len(REFUSED)))
def test_a_section_that_cannot_be_is_refused(table, says):
    with pytest.raises(ValueError, match=says):
        model_fixtures.model(attention=table, position={"kind": "none"})


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
@pytest.mark.parametrize("remat", sampled(REMATS, ["full"]), ids=str)
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


@pytest.mark.parametrize(
    "kind, sequence", sampled([pytest.param("prefill", 75), pytest.param("decode", 32)], ["prefill-75"])
)
@pytest.mark.parametrize("name", HYBRIDS)
def test_an_engine_s_steps_are_counted_to_the_last_flop(name, kind, sequence):
    work = workload(kind, hybrid(name, context_length=128), 3, sequence, dtype="float32", kernels="xla")
    expected = sum(step.matmul_flops for step in engine_jaxprs.costs(work))
    assert sum(op.times * op.flops for op in operations.step(work)) == expected
    assert kv_cache(work) == engine_jaxprs.cache_bytes(work)


@pytest.mark.parametrize("exact", [True, False])
def test_an_engine_on_a_cpu_that_need_not_be_exact_reads_prompts_in_chunks(exact):
    """To be exact it takes the rows one by one."""
    settings = replace(SMALL, exact=exact)
    programs = EnginePrograms.of(hybrid("gated_delta"), meshes.make(), jnp.dtype("float32"), settings)
    cache = CacheSize(settings.page, tuple(9 for _ in programs.layout.groups))
    shape = programs.shapes.all()[-1]
    trips = re.findall(r"length=(\d+)", str(programs.step(shape, cache).trace().jaxpr))
    assert (str(shape.rows) in trips) == exact


@pytest.mark.exhaustive
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"data": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", HYBRIDS)
def test_the_engine_draws_what_the_full_pass_draws(name, sizes, exact):
    """Also from prefixes that it finds, and after preemptions."""
    config = hybrid(name, context_length=160)
    graph, _ = tree.abstract(config)
    parameters = tree.init(config, 0, mesh := meshes.make(**sizes))
    layout = EnginePrograms.of(config, mesh, jnp.dtype("float32"), SMALL).layout
    each = (layout.page_bytes(group, jnp.dtype("float32"), mesh, ENGINE) for group in range(2))
    engine = Engine(config, parameters, mesh, replace(SMALL, cache_bytes=11 * sum(each), exact=exact))
    draw = np.random.default_rng(0)
    long, *others = (draw.integers(0, model_fixtures.VOCABULARY, n).tolist() for n in (100, 1, 33, 64, 96))

    texts = partial(prefixes_read, engine, graph, parameters)
    texts(*others)
    texts(long)
    assert texts(long) == [96]
    texts(long[:70] + others[0])  # the state there, in the middle of a text, may have gone by now
    assert texts(long[:70] + others[1]) == [64]
    check_pages(engine)


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["gated_delta", "mamba2"])
def test_an_engine_s_step_reads_weights_once_and_keeps_no_states(kind):
    """XLA for GPUs neither copies weights to merge products, nor holds the new states of layers until the last."""
    mesh, settings = meshes.make(1, 1, 1, devices=targets.devices(Target.parse("h200-sxm:1"))), EngineSettings(slots=8)
    models = [
        model_fixtures.model(num_layers=n, d_model=512, attention=WIDE[kind], position={"kind": "none"}) for n in (2, 4)
    ]

    def compiled(model):
        programs = EnginePrograms.of(model, mesh, jnp.dtype("bfloat16"), settings)
        cache = CacheSize(settings.page, tuple(9 for _ in programs.layout.groups))
        return programs.step(StepShape(8, 0, TILE), cache).compile()

    fewer, more = map(compiled, models)
    temporaries = [each.memory_analysis().temp_size_in_bytes for each in (fewer, more)]
    assert temporaries[1] - temporaries[0] < 8 * 16 * 64 * 64 * 4  # the states of one layer
    programs = [hlo.parse(each.as_text(), trips=1) for each in (fewer, more)]
    reads = [each for each in argument_reads(programs[1]) if "attention" in each.name]
    matrices = [each for each in reads if each.name.startswith("parameters") and each.bytes > 1 << 19]
    assert len(matrices) == 4 * 5 and not any(each.copied for each in matrices)
    # States are counted as often as the program moves them: the bytes of two layers.
    moved = [sum(each.bytes * each.count for each in launched_kernels.kernels(program)) for program in programs]
    works = [workload("decode", model, 8, 100, platform="gpu") for model in models]
    counted = [sum(op.times * max(op.least_bytes, op.most_bytes) for op in operations.step(work)) for work in works]
    assert moved[1] - moved[0] == pytest.approx(counted[1] - counted[0], rel=0.1)


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["gated_delta", "mamba2"])
def test_the_bytes_of_chunks_are_those_of_the_fused_program(kind):
    """With gradients, in XLA's program for a GPU, without its copies of arrays between chunks."""
    B, N, H, tokens = 8, 16, 64, 4 * CHUNK
    skip = jnp.ones(N), ("heads",)
    recurrence = delta_rule(N, H, H) if kind == "gated_delta" else state_space(N, H, H, skip)
    function, weights = _FlatChunk(recurrence.chunk, ("matrix",), 5, 5 + len(recurrence.weights)), recurrence.weights

    def shapes(tokens):
        per_token = [((B, tokens, N, H), "bfloat16")] * 3 + [((B, tokens, N), "float32")] * 2
        states = [((B, N, H, H), "float32")]
        return per_token + [((N,), "float32")] * len(weights) + states + [((B, tokens), "bool")] * 2

    work = traced_work(function, tuple(shapes(CHUNK)), tuple(range(6 + len(weights))), checkpointed=True)
    counted = tokens // CHUNK * sum(each.bytes for each in work.values())

    def run(*arrays):
        states = {"matrix": arrays[-3]}
        inputs = [(x, HEADS[: x.ndim]) for x in arrays[:5]]
        of_weights = recurrence._replace(weights=tuple((x, ("heads",)) for x in arrays[5:-3]))
        y, after = scan(of_weights, states, ChunkRows(*arrays[-2:]), *inputs)
        return y, after["matrix"]

    def both(*arrays):
        results, pull_back = jax.vjp(lambda *x: run(*x, *arrays[-2:]), *arrays[:-2])
        return results, pull_back(results)

    mesh = meshes.make(1, 1, 1, devices=targets.devices(Target.parse("h200-sxm:1")))
    whole = NamedSharding(mesh, PartitionSpec())
    structs = [jax.ShapeDtypeStruct(*each, sharding=whole) for each in shapes(tokens)]
    with jax.set_mesh(mesh), using_kernels("xla"):
        compiled = jax.jit(both).lower(*structs).compile()
    program = hlo.parse(compiled.as_text(), trips=tokens // CHUNK)
    assert 0.7 < counted / sum(each.bytes * each.count for each in launched_kernels.kernels(program)) < 1.05


FILE = """
[model]
base = "quickstart"
vocab_size = 512
context_length = 512
num_layers = 2

[model.position]
fraction = 0.25

[model.attention]
num_heads = 4
head_dim = 64
output_gate = "sigmoid"

[[model.pattern]]
name = "recurrent"
attention = { %s }

[[model.pattern]]
name = "full"

[training]
batch = 8
sequence = 256
"""
SIZES = {
    "gated_delta": 'kind = "gated_delta", num_key_heads = 4, num_value_heads = 8, key_dim = 32, value_dim = 64',
    "mamba2": 'kind = "mamba2", num_heads = 8, head_dim = 32, state_dim = 64, num_groups = 2',
    "short_convolution": 'kind = "short_convolution"',
}


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("workload_kind", ["train", "prefill", "decode"])
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("target", ["h200-sxm:4", "tpu-v5e:2x2"])
def test_the_compiled_step_has_the_counted_flops(target, kind, workload_kind, tmp_path):
    """In training and for prompts by kernels of linear attention, which declare their FLOPs."""
    file, target = tmp_path / "mine.toml", Target.parse(target)
    file.write_text(FILE % SIZES[kind])
    mesh = meshes.make(2, 1, 2, devices=targets.devices(target))
    found = report.compile(load(file, [], workload_kind), workload_kind, target, mesh, False).report
    assert found.flops == found.counted_flops
