"""Sequences that devices share: the same numbers in each way, what is sent, and the order of columns."""

import functools
import itertools

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from matrices import sampled

from jaxlm.core.errors import InputError
from jaxlm.models import kernels
from jaxlm.models.doors.context_parallel import SharedSequence, shared_attention
from jaxlm.models.positions import document_lengths, packed_causal_mask, sliding_window_mask
from jaxlm.parallel.columns import balanced_columns, from_column_order, in_column_order
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.rules import TRAIN
from kernels_pallas.core.interpretation import interpreted
from kernels_pallas.flash_attention import flash_attention

WAYS = ("gather", "heads", "ring")
FAMILIES = {**model_fixtures.FAMILIES, "mixture": model_fixtures.MIXTURE}
LAYOUTS = (
    *({"context": n} for n in (2, 4, 8)),
    {"context": 2, "fsdp": 2, "tensor": 2},
    {"context": 4, "tensor": 2},
    {"data": 2, "context": 4},
)


@functools.cache
def on_one_device(family):
    return model_fixtures.first_gradients(model_fixtures.model(FAMILIES[family]), meshes.make())


def heads_divide(family, layout):
    attention = model_fixtures.model(FAMILIES[family]).layers[0].attention
    kv_heads = getattr(attention, "num_kv_heads", attention.num_heads)
    return kv_heads % (layout.get("context", 1) * layout.get("tensor", 1)) == 0


CASES = [
    pytest.param(family, way, layout, id=f"{family}-{way}-{Layout(layout)}")
    for family, way, layout in itertools.product(("llama", "latent", "gemma", "mistral", "mixture"), WAYS, LAYOUTS)
    if way != "heads" or heads_divide(family, layout)
]


@pytest.mark.exhaustive  # a ring of one layer, and what "auto" takes in test_sharding.py, always run
@pytest.mark.parametrize("family, way, layout", CASES)
def test_losses_and_gradients_are_those_of_one_device(family, way, layout):
    """Rows hold several documents. Half of the cases have microbatches and recompute their layers."""
    expected_loss, expected = on_one_device(family)
    more = {"microbatches": 2, "remat": "full"} if way == "ring" else {}
    loss, gradients = model_fixtures.first_gradients(
        model_fixtures.model(FAMILIES[family]), meshes.make(**layout), context_parallel=way, **more
    )
    # The tolerances of DESIGN: sums are added in another order, in float32.
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


T, N, K, H, V = 32, 4, 2, 16, 32
POSITIONS = np.concatenate([np.arange(n) for n in (5, 20, 7)])[None].repeat(2, axis=0)


def attend(way, layout, window=None, reach=None, soft_cap=None, sinks=None):
    """Return attention of arrays in the order of columns, as it is on devices that share the sequence, jitted."""
    shards, mesh = layout["context"], make_mesh(Layout(layout))

    @jax.jit
    def attention(query, key, value):
        arrays = (from_column_order(x, shards) for x in (query, key, value))
        mask = packed_causal_mask(from_column_order(jnp.asarray(POSITIONS), shards))
        mask = mask if window is None else sliding_window_mask(window, mask)
        out = shared_attention(*arrays, mask, sinks, reach=reach, scale=0.5, soft_cap=soft_cap)
        return in_column_order(out, shards)

    def run(function, *arrays):
        with jax.set_mesh(mesh), kernels.using_kernels("auto", True, way):
            return function(attention, *arrays)

    return run


def arrays():
    shapes = (2, T, N, H), (2, T, K, H), (2, T, K, V)
    return [np.random.default_rng(i).standard_normal(shape, np.float32) for i, shape in enumerate(shapes)]


def on_one(query, key, value, window=None, soft_cap=None, sinks=None):
    mask = packed_causal_mask(jnp.asarray(POSITIONS))
    mask = mask if window is None else sliding_window_mask(window, mask)
    return flash_attention(query, key, value, key_range=mask, scale=0.5, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.parametrize("way", sampled(WAYS, ["ring"]))
def test_no_gradient_goes_back_from_a_later_token_or_another_document(way):
    """∂ attention_t / ∂ value_s is none for a later s, and for each earlier one of t's document also from device to
    device."""

    def of_every_token(attention, query, key, value):
        pulled = jax.jit(lambda d: jax.vjp(lambda v: attention(query, key, v), value)[1](d)[0])
        return np.stack([pulled(jnp.zeros((2, T, N, V)).at[:, t].set(1.0)) for t in range(T)])

    gradient_TBSKV = attend(way, {"context": 2})(of_every_token, *map(jnp.asarray, arrays()))
    index, document = np.arange(T), np.cumsum(POSITIONS[0] == 0)
    seen_TS = (index[None] <= index[:, None]) & (document[None] == document[:, None])
    assert (np.any(gradient_TBSKV != 0, axis=(1, 3, 4)) == seen_TS).all()


OPTIONS = {"plain": {}, "capped": {"soft_cap": 2.0}, "sinks": {"sinks": np.linspace(-1, 1, N, dtype=np.float32)}}
OPTIONS["window"] = {"window": 4}


@pytest.mark.parametrize(
    "kernel, options",
    sampled([pytest.param(k, o) for k in (None, "triton") for o in OPTIONS], ["None-window", "None-sinks"]),
)
def test_a_ring_is_attention_on_one_device(kernel, options):
    """A window of 4 keys makes a ring of 4 devices skip one hop. Kernels are interpreted."""
    options, layout = OPTIONS[options], {"context": 2 if kernel else 4}
    own = {**options, "reach": options.get("window")}

    def gradients(attention, *x):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(attention(*x))), (0, 1, 2)))(*x)

    expected = gradients(functools.partial(on_one, **options), *arrays())
    if kernel is None:
        found = attend("ring", layout, **own)(gradients, *arrays())
    else:
        with interpreted(kernel):
            found = attend("ring", layout, **own)(gradients, *arrays())
    model_fixtures.assert_same_numbers(found, expected, 1e-5)


def test_hops_that_nobody_sees_are_skipped():
    """A chunk has 4 columns: its first token sees a window's others in the chunks before it."""
    reached = {1: [0], 2: [0, 1, 7], 5: [0, 1, 7], 6: [0, 1, 2, 6, 7], None: list(range(8))}
    for reach, hops in reached.items():
        assert SharedSequence(8, 8, 4, 4, reach).hops == hops
    for reach in range(1, 40):  # against every pair of columns
        columns = balanced_columns(64, 8).reshape(8, 8)
        seen = {
            hop
            for hop, i in itertools.product(range(8), range(8))
            if np.any((0 <= (d := columns[i][:, None] - columns[(i - hop) % 8])) & (d < reach))
        }
        assert SharedSequence(8, 8, 4, 4, reach).hops == sorted(seen)


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_each_shard_has_as_many_scores_as_another(shards):
    columns = balanced_columns(48, shards)
    assert sorted(columns) == list(range(48))
    assert len({int(np.sum(part + 1)) for part in np.split(columns, shards)}) == 1
    whole = jnp.asarray(columns)[None, :, None]
    assert (in_column_order(whole, shards)[0, :, 0] == np.arange(48)).all()
    assert (from_column_order(in_column_order(whole, shards), shards) == whole).all()


def test_batches_lie_in_balanced_columns_and_lengths_follow_them():
    from jaxlm.parallel.batches import put_batch

    host, mesh = {**model_fixtures.batch(), "reference": np.zeros((8, 2), np.float32)}, meshes.make(context=4)
    with jax.set_mesh(mesh):
        placed = put_batch(host, mesh)
        columns = balanced_columns(model_fixtures.CONTEXT, 4)
        for name in ("tokens", "targets", "segments", "positions"):
            np.testing.assert_array_equal(placed[name], host[name][:, columns])
        np.testing.assert_array_equal(placed["reference"], host["reference"])
        lengths = jax.jit(lambda p: document_lengths(p, packed_causal_mask(p)))(placed["positions"])
    positions = jnp.asarray(host["positions"])
    np.testing.assert_array_equal(lengths, document_lengths(positions, packed_causal_mask(positions))[:, columns])


def test_a_packed_row_has_the_losses_and_gradients_of_its_documents_alone():
    model, length = model_fixtures.model(num_layers=1), model_fixtures.CONTEXT
    draw, cuts = np.random.default_rng(3), (0, 11, 18, length)
    tokens, targets = draw.integers(0, model_fixtures.VOCABULARY, (2, length), dtype=np.int32)
    spans = list(itertools.pairwise(cuts))
    packed = np.zeros((2, length), np.int32)
    alone = {name: np.zeros((3, length), np.int32) for name in ("tokens", "targets", "segments")}
    for i, (begin, end) in enumerate(spans):
        packed[:, begin:end] = np.full(end - begin, i + 1), np.arange(end - begin)
        for name, row in (("tokens", tokens), ("targets", targets), ("segments", np.ones(length, np.int32))):
            alone[name][i, : end - begin] = row[begin:end]
    alone["positions"] = np.tile(np.arange(length, dtype=np.int32), (3, 1))
    row = {"tokens": tokens[None], "targets": targets[None], "segments": packed[:1], "positions": packed[1:]}
    results = []
    for rows, mesh, way in ((alone, meshes.make(), "auto"), (row, meshes.make(context=4), "ring")):
        options = {"rows": rows, "batch": len(rows["tokens"]), "context_parallel": way}
        results.append(model_fixtures.first_gradients(model, mesh, **options))
    (expected_loss, expected), (loss, gradients) = results
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


def test_a_ring_is_chosen_where_blocks_hide_it_and_otherwise_what_sends_least():
    assert SharedSequence(16, 8192, 16, 1, None).way("auto") == "ring"  # Llama 3.1 405B at 131,072, tensor 8
    assert SharedSequence(2, 1024, 8, 8, None).way("auto") == "gather"  # as many bytes as heads
    assert SharedSequence(4, 1024, 8, 8, None).way("auto") == "heads"
    assert SharedSequence(4, 1024, 8, 2, None).way("auto") == "gather"


def test_heads_that_devices_cannot_share_are_refused():
    with pytest.raises(InputError, match=r"mesh.context = 4 does not divide the 8 heads of queries and the 2 of keys"):
        SharedSequence(4, 1024, 8, 2, None).way("heads")


def test_rules_give_the_sequence_to_one_mesh_axis():
    """The ring's permutations are over it."""
    assert TRAIN.over("sequence") == ("context",)
