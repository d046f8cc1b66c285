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

from jaxlm.costs.counted import memory
from jaxlm.inference import steps
from jaxlm.inference.cache import cache_shardings, empty_cache
from jaxlm.lowering import collectives, hlo
from jaxlm.lowering.programs import step as lowered_step
from jaxlm.models import tree
from jaxlm.models.positions import cache_causal_mask
from jaxlm.parallel.partition import using_rules
from jaxlm.parallel.rules import DECODE

FAMILIES = {**model_fixtures.FAMILIES, "mixed": model_fixtures.MIXED}
families = pytest.mark.parametrize(
    "family",
    sampled([pytest.param(family, id=name) for name, family in FAMILIES.items()], ["gpt2", "mixed"]),
)


def parts(family, mesh=None):
    model = model_fixtures.model(family)
    graph, _ = tree.abstract(model)
    return model, graph, tree.init(model, 0, mesh or meshes.make())


@families
def test_prefill_and_decode_equal_recomputing(family):
    """Prompts of different lengths in one batch, then token by token."""
    model, graph, parameters = parts(family)
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, model_fixtures.VOCABULARY, (3, 20), dtype=np.int32)
    lengths = np.array([7, 1, 12], np.int32)
    prompts = np.where(np.arange(12)[None] < lengths[:, None], tokens[:, :12], 5)
    expected = [model_fixtures.full_logits(graph, parameters, row) for row in tokens]

    prefill = jax.jit(lambda p, t, n: steps.prefill(graph, p, t, n, empty_cache(model, 3, 24, jnp.float32)))
    decode = jax.jit(chex.assert_max_traces(lambda p, t, c: steps.decode_step(graph, p, t, c), n=1))
    logits, cache = prefill(parameters, prompts, lengths)
    for step in range(6):
        at = lengths + step
        for row in range(3):
            model_fixtures.assert_same_numbers(logits[row], expected[row][at[row] - 1], 1e-5)
        np.testing.assert_array_equal(cache.length, at)
        logits, cache = decode(parameters, tokens[np.arange(3), at], cache)


@pytest.mark.parametrize(
    "family, shape",
    sampled(
        [
            *(pytest.param("llama", shape) for shape in ((1, 1, 8), (2, 2, 2), (8, 1, 1), (1, 2, 4))),
            *(pytest.param("mistral", shape) for shape in ((1, 1, 8), (2, 2, 2))),
        ],
        ["mistral-(2, 2, 2)"],
    ),
    ids=str,
)
def test_any_mesh_gives_the_same_logits(family, shape):
    family = model_fixtures.FAMILIES[family]
    model, graph, parameters = parts(family)
    tokens = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (8, 6), dtype=np.int32)
    lengths = np.full(8, 6, np.int32)

    def two_steps(mesh, parameters):
        lies = cache_shardings(model, 8, 12, mesh)
        with jax.set_mesh(mesh):
            first = jax.jit(
                lambda p, t, n: steps.prefill(graph, p, t, n, empty_cache(model, 8, 12, jnp.float32)),
                out_shardings=(None, lies),
            )
            second = jax.jit(lambda p, t, c: steps.decode_step(graph, p, t, c), out_shardings=(None, lies))
            logits, cache = first(parameters, tokens, lengths)
            key, placement = (x.stored["layers"]["key"].array for x in (cache, lies))
            assert key.sharding.is_equivalent_to(placement, key.ndim)
            assert placement.spec[2] == "tensor"
            after, cache = second(parameters, tokens[:, 0], cache)
        return jax.device_get((logits, after, cache.stored["layers"]["key"].array))

    mesh = meshes.make(*shape)
    _, _, spread = parts(family, mesh)
    *wanted, cached = two_steps(meshes.make(), parameters)
    copies = 2 if shape[2] == 8 else 1  # of the four key/value heads: each device keeps one
    wanted.append(np.repeat(cached, copies, axis=2))
    model_fixtures.assert_same_numbers(two_steps(mesh, spread), tuple(wanted), 1e-5)


def test_a_window_of_all_layers_keeps_its_tokens_alone():
    model, graph, parameters = parts(model_fixtures.MISTRAL)
    cache = empty_cache(model, 2, 24, jnp.float32)
    key = cache.stored["layers"]["key"]
    assert key.array.shape == (3, 2, 4, 5, 4) and key.slot.window == key.size == 5 and key.chunk == 1
    held = jax.tree.leaves(cache.stored)
    work = workload("prefill", model, 2, 24, "float32", kernels="xla")
    assert memory.kv_cache(work) == sum(x.nbytes for x in held)
    tokens, lengths = np.ones((2, 6), np.int32), np.array([6, 3], np.int32)
    _, cache = steps.prefill(graph, parameters, tokens, lengths, cache)
    with pytest.raises(ValueError, match="windows of 5 tokens takes 1 at a time after a prompt, not 6"):
        steps.prefill(graph, parameters, tokens, lengths, cache)


def test_layers_with_a_window_keep_its_tokens_and_others_all():
    model = model_fixtures.model(model_fixtures.GEMMA)
    cache = empty_cache(model, 2, 24, jnp.float32)
    assert {name: slots["key"].array.shape for name, slots in cache.stored.items()} == {
        "local": (2, 2, 4, 5, 8),
        "global": (1, 2, 4, 24, 8),
    }
    work = workload("decode", model, 2, 24, "float32", kernels="xla")
    assert memory.kv_cache(work) == sum(x.nbytes for x in jax.tree.leaves(cache.stored))


CHUNKS = [
    pytest.param(name, chunk, mesh, id=f"{name}-{chunk}-{mesh}")
    for name in ("mistral", "mixed")
    for chunk in (1, 2, 4, 20)
    for mesh in ((), (2, 1, 2))
]


@pytest.mark.parametrize("family, chunk, mesh", sampled(CHUNKS, ["mistral-2-()"]))
def test_chunks_that_are_appended_equal_recomputing(family, chunk, mesh):
    """Prompts, then chunks with other numbers of tokens in each sequence: rings go round their windows."""
    model, graph, parameters = parts(FAMILIES[family])
    tokens = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (4, 32), dtype=np.int32)
    expected = [model_fixtures.full_logits(graph, parameters, row) for row in tokens]

    @jax.jit
    def append(parameters, cache, chunk_BT, length_B):
        cache = empty_cache(model, 4, 32, jnp.float32, chunk) if cache is None else cache
        positions_BT = cache.length[:, None] + jnp.arange(chunk_BT.shape[1])[None]
        seen = cache_causal_mask(positions_BT, cache.length + length_B)
        module = nnx.merge(graph, parameters)
        hidden_BTD, cache, _ = module.hidden(chunk_BT, positions_BT, seen, cache=cache)
        return module.logits(hidden_BTD), cache.advance(length_B)

    placed, (_, _, parameters) = meshes.make(*mesh), parts(FAMILIES[family], meshes.make(*mesh))
    read, draw, cache = np.zeros(4, np.int32), np.random.default_rng(1), None
    for T in (7, *[chunk] * 9):
        if max(read) + T > 32:
            break
        given = draw.integers(1, min(T, 12) + 1, 4).astype(np.int32)
        rows = np.stack([row[at : at + T] for row, at in zip(tokens, read, strict=True)])
        with jax.set_mesh(placed), using_rules(DECODE):
            found, cache = append(parameters, cache, rows, given)
        for row in range(4):
            last = slice(read[row], read[row] + given[row])
            model_fixtures.assert_same_numbers(found[row, : given[row]], expected[row][last], 1e-5)
        read += given
    np.testing.assert_array_equal(cache.length, read)
    rings = [slots["key"] for slots in cache.stored.values() if slots["key"].slot.window]
    assert [key.size for key in rings] == [min(32, key.slot.window + chunk - 1) for key in rings]
    with jax.set_mesh(placed), pytest.raises(ValueError, match=rf"takes {chunk} at a time after a prompt, not 21"):
        append(parameters, cache, tokens[:, :21], given)


@pytest.mark.parametrize("sizes", sampled([(1, 8, 1), (1, 1, 8), (1, 2, 4), (2, 2, 2)], ["(2, 2, 2)"]), ids=str)
def test_decoding_sends_no_weights(sizes):
    """Under the rules of decoding what moves is a token's activations, whatever axes the mesh has."""
    model = model_fixtures.model(d_model=256, attention={"num_heads": 8}, vocab_size=512)
    experiment = model_fixtures.experiment(model, batch=8)
    mesh = meshes.make(*sizes)
    program = hlo.parse(lowered_step(experiment, "decode", mesh).trace().lower().compile().as_text())
    smallest = 4 * model.d_model * model.attention.num_heads * model.attention.head_dim // mesh.size
    sent = collectives.collectives(program, dict(mesh.shape))
    assert all(c.bytes < smallest for c in sent), sent
    assert sent or mesh.shape["tensor"] == 1
