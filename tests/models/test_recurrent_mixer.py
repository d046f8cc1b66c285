"""A recurrent mixer of one's own: a gated linear recurrence with a matrix per head, and a short convolution.

All that it needs stands in this file. Its states go through packed documents, chunks and the pages of the engine.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import engine_jaxprs
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from engine_fixtures import SMALL, check_pages, prefixes_read
from markers import ELSEWHERE
from matrices import sampled
from workload_fixtures import sections_of, workload

from jaxlm.config import load
from jaxlm.core.errors import InputError
from jaxlm.core.schema import Count
from jaxlm.costs.counted import operations
from jaxlm.costs.counted.cache import kv_cache
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.plan import plan
from jaxlm.inference.engine import Engine
from jaxlm.inference.programs import EnginePrograms
from jaxlm.lowering import report, targets
from jaxlm.models import attention, tree
from jaxlm.models import config as models
from jaxlm.models.cache import LayerCache, Slot
from jaxlm.models.doors import linear
from jaxlm.models.doors.scan import ChunkRows, Recurrence, by_token, last_tokens, scan
from jaxlm.models.logical_axes import HEADS
from jaxlm.models.parameters import Module, normal, param
from jaxlm.models.positions import packed_causal_mask
from jaxlm.models.rows import Auxiliary, RowContext
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import ENGINE
from jaxlm.training.step import TrainStep

TAPS = 3
MATRIX = ("act_heads", "act_head_dim", None)


class GatedLinearConfig(models.AttentionConfig):
    """S ← exp(g)·S + k vᵀ, y = Sᵀ q (Mamba-2, arXiv:2405.21060, with v by a short convolution)."""

    activations: ClassVar = ("query", "key", "value")
    logical_axes: ClassVar = {"num_heads": "heads"}

    kind: Literal["gated_linear"] = "gated_linear"
    num_heads: Count
    head_dim: Count
    chunk: Count = 4


def gated_chunk(states, rows, q_BCNH, k_BCNH, v_BCNH, g_BCN):
    """Compute a chunk in parallel: decays between its tokens, within their documents, and from the state before it."""
    is_token_BC1 = rows.is_token_BC[..., None]
    g_BCN = jnp.where(is_token_BC1, g_BCN, 0.0).astype(jnp.float32)
    k_BCNH = jnp.where(is_token_BC1[..., None], k_BCNH, 0.0)
    document_BC, total_BCN = rows.document_BC, jnp.cumsum(g_BCN, axis=1)
    C = document_BC.shape[1]
    is_read_BCC = (document_BC[:, :, None] == document_BC[:, None, :]) & jnp.tril(jnp.ones((C, C), bool))[None]
    between_BCCN = total_BCN[:, :, None] - total_BCN[:, None, :]
    decay_BCCN = jnp.exp(jnp.where(is_read_BCC[..., None], between_BCCN, -jnp.inf))
    before_BCN = jnp.where((document_BC == 0)[..., None], jnp.exp(total_BCN), 0.0)
    scores_BCCN = jnp.einsum("BiNH,BjNH->BijN", q_BCNH, k_BCNH) * decay_BCCN
    y_BCNH = jnp.einsum("BijN,BjNH->BiNH", scores_BCCN, v_BCNH)
    y_BCNH += jnp.einsum("BiNH,BNHV->BiNV", q_BCNH * before_BCN[..., None], states["matrix"])
    # What the last token sees of each is what is left of it after the chunk: padding decays nothing.
    matrix_BNHV = jnp.einsum("BjNH,BjNV->BNHV", k_BCNH * decay_BCCN[:, -1][..., None], v_BCNH)
    matrix_BNHV += before_BCN[:, -1][..., None, None] * states["matrix"]
    return {"matrix": matrix_BNHV}, y_BCNH.astype(v_BCNH.dtype)


def gated_step(states, q_BNH, k_BNH, v_BNH, g_BN):
    """Compute one token."""
    matrix_BNHV = jnp.exp(g_BN)[..., None, None] * states["matrix"] + k_BNH[..., None] * v_BNH[..., None, :]
    return {"matrix": matrix_BNHV}, jnp.einsum("BNHV,BNH->BNV", matrix_BNHV, q_BNH)


def recurrence(heads: int, width: int, size: int | None) -> Recurrence:
    first = {"matrix": (np.zeros((heads, width, width), np.float32), MATRIX)}
    return Recurrence(gated_chunk, first, HEADS, size) if size else by_token(gated_step, first, HEADS, 4)


class GatedLinear(Module):
    """(the recurrence of x·W_q, x·W_k, convolution(x·W_v) and log σ(x·W_g))·W_o."""

    def __init__(self, model, rngs):
        self.settings = settings = model.attention
        D, N, H, initial = model.d_model, settings.num_heads, settings.head_dim, normal(model.initializer_std)
        self.query = param(rngs, (D, N, H), "embed -> heads head_dim", initial)
        self.key = param(rngs, (D, N, H), "embed -> heads head_dim", initial)
        self.value = param(rngs, (D, N, H), "embed -> heads head_dim", initial)
        self.decay = param(rngs, (D, N), "embed -> heads", initial)
        self.taps = param(rngs, (TAPS, N, H), "channels heads head_dim", normal(0.5))
        self.output = param(rngs, (N, H, D), "heads head_dim -> embed", initial)

    def slots(self) -> dict[str, Slot]:
        N, H = self.settings.num_heads, self.settings.head_dim
        return {
            "matrix": Slot((N, H, H), MATRIX, jnp.dtype("float32"), per="sequence"),
            "tail": Slot((TAPS - 1, N, H), (None, *HEADS[2:]), per="sequence"),
        }

    def __call__(self, x_BTD: jax.Array, rows: RowContext, cache: LayerCache):
        N, H = self.settings.num_heads, self.settings.head_dim
        q_BTNH, k_BTNH, v_BTNH = linear(x_BTD, self.query, self.key, self.value, names=("query", "key", "value"))
        (g_BTN,) = linear(x_BTD, self.decay)
        tail = last_tokens(TAPS - 1, (N, H), HEADS[2:], "tail", v_BTNH.dtype)
        v_BTKNH, cache = cache.scan(rows, tail, (v_BTNH, HEADS))
        v_BTNH = jax.nn.silu(jnp.sum(v_BTKNH * self.taps[...][None, None], axis=2))
        arrays = (q_BTNH * H**-0.5, HEADS), (k_BTNH, HEADS), (v_BTNH, HEADS), (jax.nn.log_sigmoid(g_BTN), HEADS[:3])
        y_BTNH, cache = cache.scan(rows, recurrence(N, H, self.settings.chunk), *arrays)
        (output_BTD,) = linear(y_BTNH, self.output)
        return output_BTD, cache, Auxiliary()


@pytest.fixture(autouse=True, scope="module")
def kind_is_registered():
    attention.register(GatedLinearConfig, GatedLinear)
    yield
    attention.unregister(GatedLinearConfig)


LINEAR = {"kind": "gated_linear", "num_heads": 4, "head_dim": 8}


def model(**changes) -> models.ModelConfig:
    settings = LINEAR | {"chunk": changes.pop("chunk", 4)}
    return model_fixtures.model(attention=settings, position={"kind": "none"}, num_layers=2, **changes)


B, T, N, H = 2, 12, 3, 5


def arrays(rows: int = B) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.normal(size=(rows, T, N, H)), jnp.float32) for _ in range(3))
    return [q, k, v, -jnp.asarray(draw.exponential(size=(rows, T, N)), jnp.float32)]


def through(size, inputs, begins, is_token=None, states=None):
    """Return the outputs and the last state, in chunks of a size, or token by token where it is None."""
    one = recurrence(N, H, size)
    is_token = jnp.ones_like(begins) if is_token is None else is_token
    axed = [(x, HEADS[: x.ndim]) for x in inputs]
    return scan(one, states or one.initial_states(len(begins)), ChunkRows(is_token, begins), *axed)


BEGINNINGS = [(), (0,), (4, 8), (1, 5), (3, 7, 11), (2, 3, 4, 5)]


def test_a_recurrence_is_the_same_in_chunks_of_any_size():
    """In one row after the other, documents begin on the first, the second and the last token of a chunk, and one
    after the other."""
    inputs = arrays(len(BEGINNINGS))
    begins = jnp.asarray([[token in begins_at for token in range(T)] for begins_at in BEGINNINGS])
    expected, state = through(None, inputs, begins)
    for size in (1, 4, 5, 12, 64):
        found, after = through(size, inputs, begins)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
        np.testing.assert_allclose(after["matrix"], state["matrix"], rtol=0, atol=2e-5)


def test_the_backward_pass_keeps_the_states_between_chunks_alone():
    """Not one for each token: of 512 tokens in chunks of 32 it keeps 16, and what one chunk works with."""
    T, N, H, size = 512, 4, 32, 32
    inputs = [jnp.zeros((1, T, N, H))] * 3 + [jnp.zeros((1, T, N))]
    rows = ChunkRows(jnp.ones((1, T), bool), jnp.zeros((1, T), bool))

    def total(*inputs):
        one = recurrence(N, H, size)
        return jnp.sum(scan(one, one.initial_states(1), rows, *((x, HEADS[: x.ndim]) for x in inputs))[0] ** 2)

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3))).lower(*inputs).compile()
    state, arrays = 4 * N * H * H, sum(x.nbytes for x in inputs)
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * arrays + 2 * T // size * state < T * state / 2


@pytest.mark.parametrize("size", [None, 4, 12])
def test_padding_leaves_states_as_they_are(size):
    begins = jnp.zeros((B, T), bool)
    is_token = jnp.arange(T)[None] < jnp.asarray([7, 0])[:, None]
    before = {"matrix": jnp.asarray(np.random.default_rng(9).normal(size=(B, N, H, H)), jnp.float32)}
    found, after = through(size, arrays(), begins, is_token, before)
    whole, expected = through(None, [x[:, :7] for x in arrays()], begins[:, :7], states=before)
    np.testing.assert_allclose(found[0, :7], whole[0], rtol=0, atol=2e-5)
    np.testing.assert_allclose(after["matrix"][0], expected["matrix"][0], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(after["matrix"][1], before["matrix"][1])


# Before and after the first token of a document, between two that begin one after the other, and at the last token.
@pytest.mark.parametrize("cut", sampled(range(1, T), ["1", "3", "7", "8", "11"]))
def test_the_last_tokens_go_on_where_a_row_is_cut(cut):
    """To the bit; a convolution reads nothing of another document, wherever a row is cut."""
    x = arrays()[0]
    begins = jnp.zeros((B, T), bool).at[0, jnp.asarray([1, 6, 7])].set(True)
    tail, axes = last_tokens(2, (N, H), HEADS[2:], "tail", jnp.dtype("float32")), HEADS

    def windows(part, states, padding=0):
        padded = [jnp.pad(a[:, part], [(0, 0), (0, padding)] + [(0, 0)] * (a.ndim - 2)) for a in (x, begins)]
        is_token = jnp.arange(padded[0].shape[1])[None] < jnp.full((B, 1), padded[0].shape[1] - padding)
        return scan(tail, states, ChunkRows(is_token, padded[1]), (padded[0], axes))

    whole, _ = windows(slice(0, T), tail.initial_states(B))
    first, states = windows(slice(0, cut), tail.initial_states(B), padding=3)
    second, _ = windows(slice(cut, T), states)
    np.testing.assert_array_equal(jnp.concatenate([first[:, :cut], second], axis=1), whole)
    ends = [1, 6, 7, T]
    for start, end in zip([0, *ends], ends, strict=False):
        for t in range(start, end):
            expected = [x[0, t - back] if t - back >= start else jnp.zeros((N, H)) for back in (2, 1, 0)]
            np.testing.assert_array_equal(whole[0, t], jnp.stack(expected))


def logits(graph, parameters, tokens, positions):
    from flax import nnx

    module = nnx.merge(graph, parameters)
    hidden, _, _ = module.hidden(tokens, positions, packed_causal_mask(positions))
    return module.logits(hidden)


LENGTHS = [(12,), (1, 11), (4, 8), (5, 3, 4), (3, 4, 4, 1)]


@pytest.mark.parametrize("lengths", sampled(LENGTHS, ["(5, 3, 4)", "(3, 4, 4, 1)"]), ids=str)
def test_a_packed_row_is_each_document_alone(lengths):
    """Forward and gradients; documents begin on each place of a chunk of four."""
    config = model()
    graph, parameters = tree.abstract(config)[0], model_fixtures.parameters(config)
    tokens = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (1, 12), dtype=np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    weights = np.random.default_rng(1).normal(size=(12, model_fixtures.VOCABULARY)).astype(np.float32)

    def packed(parameters):
        found = logits(graph, parameters, tokens, positions)[0]
        return jnp.sum(jnp.sin(found) * weights), found

    def alone(parameters):
        ends = np.cumsum(lengths)
        each = [
            logits(graph, parameters, tokens[:, end - n : end], np.arange(n)[None])[0]
            for n, end in zip(lengths, ends, strict=True)
        ]
        found = jnp.concatenate(each)
        return jnp.sum(jnp.sin(found) * weights), found

    (found, expected) = (jax.jit(jax.value_and_grad(f, has_aux=True))(parameters) for f in (packed, alone))
    np.testing.assert_allclose(found[0][1], expected[0][1], rtol=0, atol=1e-4)
    model_fixtures.assert_same_numbers(found[1], expected[1], 1e-4)


@pytest.mark.parametrize("chunk", sampled([1, 4, 64], ["4"]))  # the other sizes compute the same, as above
def test_no_token_sees_a_later_one_or_another_document(chunk):
    """By gradient of a token's logits with respect to all embeddings."""
    config = model(chunk=chunk)
    graph, parameters = tree.abstract(config)[0], model_fixtures.parameters(config)
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0]])
    tokens = np.arange(10, dtype=np.int32)[None]  # each has an embedding of its own

    @jax.jit
    def seen(token):
        def of(parameters):
            return logits(graph, parameters, tokens, positions)[0, token].sum()

        return jnp.abs(jax.grad(of)(parameters)["embedding"][:10]).max(axis=1)

    for token in range(10):
        first, size = token - positions[0, token], seen(token)  # sums of decays cancel but for rounding
        assert np.flatnonzero(size > 1e-6 * size.max()).tolist() == list(range(first, token + 1))


MESHES = [{"tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]


@pytest.mark.parametrize("mesh", sampled(MESHES, lambda mesh: len(mesh) == 3), ids=str)
def test_losses_and_gradients_do_not_depend_on_the_mesh(mesh):
    expected_loss, expected = model_fixtures.first_gradients(model(), meshes.make())
    loss, gradients = model_fixtures.first_gradients(model(), meshes.make(**mesh))
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


REMATS = ("none", "full", ("query", "key"))


@pytest.mark.parametrize("chunk", [4, 64], ids=["several chunks", "one chunk"])
@pytest.mark.parametrize("remat", REMATS, ids=str)
def test_it_is_counted_to_the_last_flop(remat, chunk):
    """A chunk is counted in the jaxpr of its function, forward, backward and where it runs again."""
    work = workload("train", model(chunk=chunk), 8, 16, dtype="float32", remat=remat, kernels="xla")
    steps = TrainStep(work.model, *sections_of(work), work.optimizer)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), jax.ShapeDtypeStruct((8, 16), jnp.int32))
    expected = count(steps.train, jax.eval_shape(steps.init), batch)
    found = Counter()
    for op in operations.step(work):
        found[op.phase] += op.times * op.flops
    assert sum(found.values()) == expected.matmul_flops
    assert found["backward"] == expected.backward.matmul_flops
    assert found["rematerialised"] == expected.rematerialised.matmul_flops


@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
def test_it_is_planned(kind):
    """On each device its part of the heads and their states, and the slots whole."""
    whole, shared = (
        plan(workload(kind, model(), 16, 32, layout=layout), Target.parse(f"h200-sxm:{layout.size}"))
        for layout in (Layout(), Layout(tensor=4))
    )
    assert whole.flops == shared.flops
    whole_bytes, shared_bytes = (each.memory.total - each.memory.slots for each in (whole, shared))
    assert whole_bytes > 2 * shared_bytes and whole.memory.slots == shared.memory.slots
    device = [sum(op.times * op.flops for op in operations.step(each.work)) for each in (whole, shared)]
    assert device[0] == 4 * device[1]
    if kind == "decode":  # a matrix and a tail for each head and layer of a sequence, whatever it holds, and of padding
        assert whole.memory.kv_cache == (16 + 1) * 2 * 4 * (8 * 8 * 4 + 2 * 8 * 2) == 4 * shared.memory.kv_cache
        with pytest.raises(InputError, match="which the state of a recurrent layer cannot"):
            plan(workload(kind, model(), 16, 32, drafts=2), Target.parse("h200-sxm:1"))


@pytest.mark.parametrize("kind, sequence", [("prefill", 32), ("prefill", 75), ("decode", 32)])
def test_an_engine_s_steps_are_counted_to_the_last_flop(kind, sequence):
    """Tiles of a prompt carry their states one after the other, in chunks; sequences that decode together."""
    work = workload(kind, model(chunk=8, context_length=128), 3, sequence, dtype="float32", kernels="xla")
    expected = sum(step.matmul_flops for step in engine_jaxprs.costs(work))
    assert sum(op.times * op.flops for op in operations.step(work)) == expected
    assert kv_cache(work) == engine_jaxprs.cache_bytes(work)


FILE = """
[model]
vocab_size = 512
context_length = 512
num_layers = 2
d_model = 256

[model.norm]
kind = "rms"

[model.position]
kind = "none"

[model.attention]
kind = "gated_linear"
num_heads = 4
head_dim = 64
chunk = 64

[model.feed_forward]
kind = "dense"
d_ff = 512
activation = "silu"

[training]
batch = 8
sequence = 512
"""


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, overrides",
    [("train", []), ("train", ["execution.scan_layers=true"]), ("prefill", []), ("decode", [])],
    ids=["train", "train-loop", "prefill", "decode"],
)
def test_the_compiled_step_has_the_counted_flops(kind, overrides, tmp_path):
    """And nearly the counted memory: in a model as small as this the float32 parts that XLA adds up after a product,
    which are not counted, are a tenth."""
    file, target = tmp_path / "mine.toml", Target.parse("h200-sxm:4")
    file.write_text(FILE)
    mesh = meshes.make(2, 1, 2, devices=targets.devices(target))
    found = report.compile(load(file, overrides, kind), kind, target, mesh, False).report
    assert found.flops == found.counted_flops
    if kind != "prefill":  # of a prompt's tiles XLA keeps more than is counted
        assert found.plan.memory.total == pytest.approx(found.memory.peak, rel=0.1)


@pytest.mark.parametrize("sizes", sampled([{}, {"tensor": 2}, {"data": 2, "tensor": 2}], ["{}"]), ids=str)
def test_the_engine_goes_on_from_found_prefixes_and_after_preemptions(sizes):
    """Layers of the recurrence and of attention in turn: one takes pages of states, the other of tokens."""
    pattern = ({"name": "state", "attention": LINEAR | {"chunk": 8}}, {"name": "full"})
    config = model_fixtures.model(context_length=160, num_layers=2, position={"kind": "none"}, pattern=pattern)
    graph, _ = tree.abstract(config)
    parameters = tree.init(config, 0, mesh := meshes.make(**sizes))
    layout = EnginePrograms.of(config, mesh, jnp.dtype("float32"), SMALL).layout
    assert sorted(layout.groups, key=str) == [2, None]
    each = (layout.page_bytes(group, jnp.dtype("float32"), mesh, ENGINE) for group in range(2))
    engine = Engine(config, parameters, mesh, replace(SMALL, cache_bytes=11 * sum(each)))
    draw = np.random.default_rng(0)
    long, *others = (draw.integers(0, model_fixtures.VOCABULARY, n).tolist() for n in (100, 1, 33, 64, 96, 50, 20, 60))

    texts = partial(prefixes_read, engine, graph, parameters)
    texts(*others)
    assert engine.preemptions or "data" in sizes  # each shard has room of its own
    texts(long)
    assert texts(long) == [96]
    texts(long[:70] + others[0])  # the state there, in the middle of a text, may have gone by now
    assert texts(long[:70] + others[1]) == [64]
    check_pages(engine)
