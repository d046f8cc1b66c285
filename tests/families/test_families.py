"""Families against transformers: the same config.json and weights give the same logits, tokens and gradients.

The fixtures (`make_fixtures.py`) hold what transformers computed in float64. A tolerance is relative to the largest
logit, and is set by the measured noise of float32.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import jax
import jax.numpy as jnp
import loud
import meshes
import numpy as np
import pytest
from matrices import sampled
from mutations import mutations
from running import logits, save

from jaxlm import api
from jaxlm.families import table
from jaxlm.families.directory import PublishedModel, write
from jaxlm.families.family import families
from jaxlm.families.settings import config_of, model_of
from jaxlm.inference.settings import EngineSettings
from jaxlm.models import tree
from jaxlm.parallel.rules import TRAIN

NAMES = loud.names()
QUICK = ["gpt2", "llama3_1", "gemma3"]
each = pytest.mark.parametrize("name", sampled(NAMES, QUICK))


@cache
def directory(name, variant):
    """A Hugging Face directory with the weights of a fixture."""
    facts, _ = loud.read(name)
    return save(Path(mkdtemp(prefix=f"{name}-{variant}-")), facts["config"], loud.weights(facts, variant))


@cache
def loaded(name, variant):
    """The model and its parameters, float32 on one device."""
    published = PublishedModel(directory(name, variant))
    return published.model, published.load(meshes.make(1, 1, 1), TRAIN, "float32")


@pytest.fixture
def on_one_device():
    with jax.set_mesh(meshes.make(1, 1, 1)):
        yield


uses_one_device = pytest.mark.usefixtures("on_one_device")


def error(facts, arrays, variant, model, parameters):
    """The largest error of a logit, relative to the largest logit."""
    given = np.asarray(logits(model, parameters, facts["sequences"]))[:, facts["positions"]]
    return np.abs(given - arrays[variant]).max() / facts["largest"][variant]


@each
def test_names_and_configuration_are_those_that_transformers_writes(name):
    facts, _ = loud.read(name)
    model = model_of(facts["config"], name)
    assert model_of(facts["old_config"], name) == model
    expected = table.tensors(model, families()[facts["config"]["model_type"]].rules)
    assert {key: list(held.shape) for key, held in expected.items()} == facts["tensors"]
    assert tree.parameter_count(model) == facts["parameters"]


@each
@pytest.mark.parametrize("variant", loud.VARIANTS)
@uses_one_device
def test_logits_are_those_of_transformers(name, variant):
    facts, arrays = loud.read(name)
    found = error(facts, arrays, variant, *loaded(name, variant))
    assert found <= facts["tolerance"], f"{found:.1e}, and float32 has {facts['noise'][variant]:.1e}"


@each
@uses_one_device
def test_packed_documents_are_as_if_alone(name):
    facts, arrays = loud.read(name)
    if facts["packed"] is None:
        pytest.skip("rotary positions depend on the length of a sequence")
    documents = facts["packed"]["documents"]
    tokens, positions = [sum(documents, [])], [sum([[*range(len(each))] for each in documents], [])]
    given = np.asarray(logits(*loaded(name, "loud"), tokens, positions))[0, facts["packed"]["positions"]]
    assert np.abs(given - arrays["packed"]).max() / facts["largest"]["loud"] <= facts["tolerance"]


@pytest.mark.parametrize("name", sampled(NAMES, ["llama3_1"]))
def test_greedy_tokens_with_the_cache_are_those_of_transformers(name):
    facts, _ = loud.read(name)
    if facts["greedy"] is None:
        pytest.skip("rotary positions depend on the length of a sequence")
    model = api.load(
        directory(name, "loud"), ["execution.dtype=float32", "mesh.fsdp=1"], engine=EngineSettings(slots=1)
    )
    (told,) = model.generate([facts["greedy"]["prompt"]], 64, temperature=0.0)
    assert list(told.token_ids) == facts["greedy"]["tokens"]


@pytest.mark.parametrize(
    "name", sampled([name for name in NAMES if loud.read(name)[0].get("gradient_tensors")], ["olmo2", "gpt_neox"])
)
@uses_one_device
def test_gradients_are_those_of_transformers(name):
    facts, arrays = loud.read(name)
    model, parameters = loaded(name, "loud")
    tokens = jnp.asarray(facts["sequences"])
    cotangent = loud.normals("cotangent", (*tokens.shape, model.vocab_size)).astype(np.float32)
    gradients = jax.grad(lambda parameters: jnp.sum(logits(model, parameters, tokens) * cotangent))(parameters)
    expected = table.tensors(model, families()[facts["config"]["model_type"]].rules)
    stored = table.unwritten(expected, gradients, dict.fromkeys(expected, np.dtype(np.float32)))
    for key, (norm, *products) in zip(facts["gradient_tensors"], arrays["gradients"], strict=True):
        x = stored[key].make().astype(np.float64)
        assert abs(np.linalg.norm(x) - norm) <= 1e-4 * norm, key
        for i, product in enumerate(products):
            probe = loud.normals(f"{key} probe {i}", x.shape)
            assert abs(np.sum(x * probe) - product) <= 1e-4 * norm * np.sqrt(x.size), key


@each
def test_an_export_is_what_was_read(name, tmp_path):
    published = PublishedModel(directory(name, "loud"))
    _, parameters = loaded(name, "loud")
    kept = {"config.json": (published.folder / "config.json").read_bytes()}
    write(tmp_path / "out", published.model, parameters, published.dtypes(), kept, lambda line: None)
    back = PublishedModel(tmp_path / "out")
    assert back.stored.keys() == published.stored.keys() and back.config == published.config
    for key, tensor in published.stored.items():
        np.testing.assert_array_equal(tensor.read(), back.stored[key].read())
    written = config_of(published.model, published.family)
    assert model_of(written, name).layers == published.model.layers


@cache
def right(name, variant):
    """The error of the right model."""
    return error(*loud.read(name), variant, *loaded(name, variant))


CASES = [
    pytest.param(name, key, id=f"{name}-{key}")
    for name in NAMES
    for key in mutations(model_of(loud.read(name)[0]["config"], name))
]


def with_initial(model, kept):
    """Parameters of a model: these where it has them in this shape, others as they are initialised."""
    initial = tree.init(model, 0, meshes.make(1, 1, 1))

    def leaf(path, x):
        known = kept.get(jax.tree_util.keystr(path, simple=True, separator="/"), x)
        return known if known.shape == x.shape else x

    return jax.tree_util.tree_map_with_path(leaf, initial)


@pytest.mark.parametrize(
    ("name", "key"),
    sampled(CASES, [f"llama3_1-position.{key}" for key in ("kind", "reversed", "scaling", "scaling.factor")]),
)
@uses_one_device
def test_a_fixture_notices_every_option(name, key):
    """A model with another value of the option is 30 times further off than the right one, and beyond the tolerance."""
    facts, arrays = loud.read(name)
    seen = {}
    for variant in loud.VARIANTS:
        model, parameters = loaded(name, variant)
        changed = mutations(model)[key]
        filled = with_initial(changed, tree.paths(parameters))
        seen[variant] = error(facts, arrays, variant, changed, filled), right(name, variant)
        if seen[variant][0] >= max(30 * seen[variant][1], 3 * facts["tolerance"]):
            return
    raise AssertionError(f"loud and quiet: {seen}")
