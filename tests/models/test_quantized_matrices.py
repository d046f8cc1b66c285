"""Models whose matrices are quantised: what they compute, what they keep, and adapters beside them."""

from functools import partial

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from flax import nnx
from matrices import sampled
from workload_fixtures import workload

from jaxlm.costs.counted.memory import memory
from jaxlm.costs.plan import parameter_counts
from jaxlm.costs.serving import token_cost
from jaxlm.models import lora, tree
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.positions import packed_causal_mask
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.quantizing import Quantizer
from jaxlm.parallel.batches import put_batch
from jaxlm.parallel.rules import TRAIN
from jaxlm.training.step import TrainStep

FORMS = [Quantization("int8"), Quantization("int4", 32), Quantization("fp8"), Quantization("mxfp4", 32)]
W8A8 = Quantization("w8a8")
MODELS = {
    "gpt2": model_fixtures.FAMILIES["gpt2"],
    "latent": model_fixtures.FAMILIES["latent"],
    "mixture": {**model_fixtures.MIXTURE, "feed_forward": {**model_fixtures.MIXTURE["feed_forward"], "d_ff": 32}},
    "mixed": {**model_fixtures.MIXED, "num_layers": 3},
}


def quantized(model, form, mesh=None):
    mesh = mesh or meshes.make()
    return Quantizer(model, form, mesh, TRAIN, None).tree(jax.device_put(model_fixtures.parameters(model)))


def widened(model, form, parameters):
    """Return the parameters of the model with each quantised matrix as float32 numbers."""
    return tree.parameters(lora.widen(nnx.merge(tree.abstract(model, quantized=form)[0], parameters)))


@partial(jax.jit, static_argnums=0)
def hidden(graph, parameters):
    module = nnx.merge(graph, parameters)
    tokens = jnp.asarray(model_fixtures.batch(rows=2)["tokens"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return module.hidden(tokens, positions, packed_causal_mask(positions))[0]


def assert_close(found, expected, tolerance):
    np.testing.assert_allclose(found, expected, atol=tolerance * float(np.abs(expected).max()))


CASES = [pytest.param(name, form, id=f"{name}-{form}") for name in MODELS for form in FORMS]
KEPT = ["gpt2-int8", "latent-int4 in groups of 32", "mixed-mxfp4 in groups of 32", "mixture-fp8"]


@pytest.mark.parametrize("name, form", sampled(CASES, KEPT))
def test_a_model_computes_what_its_numbers_times_their_scales_do(name, form):
    """In float32 to the order of sums. Routers, tables and norms stay as they are."""
    model = model_fixtures.model(MODELS[name])
    parameters = quantized(model, form)
    wide, plain = widened(model, form, parameters), model_fixtures.parameters(model)
    graph, _ = tree.abstract(model)
    expected = np.asarray(hidden(graph, wide))
    assert_close(np.asarray(hidden(tree.abstract(model, quantized=form)[0], parameters)), expected, 2e-5)
    paths = tree.paths(parameters)
    kept = {path for path in tree.paths(plain) if path in paths}
    declared = tree.paths(tree.dimensions(tree.abstract(model)[1]))
    inputs = {path: np.prod([d.shape[i] for i in d.inputs]) for path, d in declared.items()}
    for path, d in declared.items():
        is_of_layers, is_odd = d.projection and "routes" not in d.axes, inputs[path] % 32 > 0
        assert (path in kept) == (not is_of_layers or (form.kind in ("int4", "mxfp4") and is_odd)), path
    errors = {path: np.abs(tree.paths(wide)[path] - x).max() for path, x in tree.paths(plain).items()}
    assert all((error == 0) == (path in kept) for path, error in errors.items())


@pytest.mark.parametrize("tied", [True, False])
def test_rows_are_rounded_beside_the_weights_of_int8(tied):
    """And those of the unembedding, whose losses are of the same logits. A tied embedding stays as it is."""
    model = model_fixtures.model(model_fixtures.FAMILIES["gpt2"], tied_embeddings=tied)
    parameters, of_int8 = quantized(model, W8A8), quantized(model, FORMS[0])
    graph, _ = tree.abstract(model, quantized=W8A8)
    found = np.asarray(hidden(graph, parameters))
    module, targets = nnx.merge(graph, parameters), jnp.asarray(model_fixtures.batch(rows=2)["tokens"])
    logits = np.asarray(jax.nn.log_softmax(module.logits(jnp.asarray(found))))
    losses = -np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(module.token_losses(jnp.asarray(found), targets, targets >= 0), losses, atol=2e-5)
    expected = np.asarray(hidden(tree.abstract(model, quantized=FORMS[0])[0], of_int8))
    unembedding, table = parameters.pop("unembedding"), of_int8["embedding"].T if tied else of_int8.pop("unembedding")
    jax.tree.map(np.testing.assert_array_equal, parameters, of_int8)
    step = np.asarray(unembedding["scales"])
    assert (np.abs(np.asarray(table) - unembedding["values"] * step) <= 0.501 * step).all()
    # Rounding a row changes each number by up to 1/254 of the largest; 0.014 was measured after all layers.
    assert 0.002 < np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < 0.03


@pytest.mark.parametrize("form", sampled([*FORMS, W8A8], ["int4 in groups of 32"]), ids=str)
def test_devices_compute_what_one_does(form):
    """Whose shards have equal bits. tensor = 4 divides neither the groups of 64 inputs nor 2 key/value heads.

    Of w8a8 each rounds its part of a row: the difference is one of rounding, 0.041 as it was measured.
    """
    model = model_fixtures.model(model_fixtures.QWEN3, d_model=64, num_layers=2)
    graph, whole = tree.abstract(model, quantized=form)[0], quantized(model, form)
    expected = np.asarray(hidden(graph, whole))
    mesh = meshes.make(1, 2, 4)
    with jax.set_mesh(mesh):
        parts = quantized(model, form, mesh)
        found = np.asarray(hidden(graph, parts))
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    assert_close(found, expected, 0.08 if form == W8A8 else 2e-5)


@pytest.mark.parametrize("form", sampled([*FORMS, W8A8], ["int4 in groups of 32"]), ids=str)
@pytest.mark.parametrize("sizes", sampled([(1, 2, 4), (2, 2, 2)], ["(1, 2, 4)"]), ids=str)
def test_devices_compute_experts_as_one_does(sizes, form):
    """tensor = 4 divides the 16 inputs of `down` and no group of them: each device then has all."""
    keys = {**model_fixtures.MIXTURE["feed_forward"], "d_ff": 64}
    model = model_fixtures.model(model_fixtures.MIXTURE, num_layers=2, feed_forward=keys)
    graph, whole = tree.abstract(model, quantized=form)[0], quantized(model, form)
    expected = np.asarray(hidden(graph, whole))
    mesh = meshes.make(*sizes)
    with jax.set_mesh(mesh):
        found = np.asarray(hidden(graph, quantized(model, form, mesh)))
    assert_close(found, expected, 0.08 if form == W8A8 else 2e-5)


@pytest.mark.parametrize("form", [*FORMS, W8A8], ids=str)
def test_memory_and_reads_are_those_of_the_leaves(form):
    model = model_fixtures.model(model_fixtures.LLAMA, d_model=64)
    keys = {"quantize": form.kind, "quantize_group": form.group or "all"}
    work = workload("decode", model, 2, 32, page=32, platform="gpu", **keys)
    shapes = tree.shapes(tree.abstract(model, quantized=form)[1], "bfloat16")
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    plain = workload("decode", model, 2, 32, page=32, platform="gpu")
    whole = sum(2 * x.size for x in jax.tree.leaves(tree.shapes(tree.abstract(model)[1])))
    assert memory(work).parameters == size < memory(plain).parameters == whole
    assert token_cost(plain, None).read_bytes - token_cost(work, None).read_bytes == whole - size
    assert parameter_counts(work) == parameter_counts(plain)


def test_adapters_are_trained_beside_quantised_matrices():
    """Losses are those of the widened base, and differ from those of the base itself by what rounding changes."""
    model, form = model_fixtures.model(num_layers=2), FORMS[0]
    adapted = LoraConfig(rank=4, targets=("*/attention/*", "*/down"))
    parameters = quantized(model, form)
    bases = {"int8": parameters, "none": widened(model, form, parameters), "plain": model_fixtures.parameters(model)}
    losses = {}
    for name, base in bases.items():
        mesh, sections = meshes.make(), model_fixtures.sections(quantize="int8" if name == "int8" else "none")
        with jax.set_mesh(mesh):
            step = TrainStep(model, *sections, model_fixtures.optimization(), lora=adapted)
            steps = step.jitted(mesh)
            under = tree.under_adapters(base, tree.targets(model, adapted))
            state = steps.begin(jax.device_put(jax.device_get(under), step.shardings(mesh).base))
            losses[name] = []
            for seed in range(3):
                state, metrics = steps.train(state, put_batch(model_fixtures.batch(seed=seed), mesh))
                losses[name].append(float(metrics["loss"]))
            jax.tree.map(np.testing.assert_array_equal, state.base, under)
            if name == "int8":
                whole = tree.joined(state.parameters, state.base)
                expected = np.asarray(hidden(tree.abstract(model, adapted, quantized=form)[0], whole))
                merged = tree.merged(model, adapted, whole, mesh, TRAIN, form)
                assert_close(np.asarray(hidden(tree.abstract(model)[0], merged)), expected, 2e-5)
    np.testing.assert_allclose(losses["int8"], losses["none"], rtol=1e-5)
    difference = np.abs(np.subtract(losses["int8"], losses["plain"])).max()
    assert 0 < difference < 1e-2


def test_targets_are_of_stacks_also_where_each_layer_is_by_itself():
    """An engine unrolls the layers, of which a mixed model has several stacks."""
    model = model_fixtures.model(MODELS["mixed"])
    stacks = nnx.merge(*tree.abstract(model)).groups.stacks
    first, _ = stacks[0]
    form = Quantization("int8", targets=(f"layers/{first}/feed_forward/*", "*/query"))
    trees = [tree.abstract(model, unrolled=each, quantized=form)[1] for each in (False, True)]
    stacked, apart = ({path for path in tree.paths(tree.shapes(each)) if path.endswith("/values")} for each in trees)
    of_first = {path for path in stacked if path.startswith(f"layers/{first}/")}
    assert len(stacks) > 1 and any("/feed_forward/" in path for path in of_first)
    assert {path.rpartition("/query/")[1] for path in stacked - of_first} == {"/query/"}
    expected = {
        path.replace(f"layers/{name}/", f"layers/{layer}/", 1)
        for name, layers in stacks
        for layer in layers
        for path in stacked
        if path.startswith(f"layers/{name}/")
    }
    assert apart == expected
