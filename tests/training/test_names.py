"""Operation names in the compiled step: each has the path of its parameter in the tree."""

import re

import jax
import meshes
import model_fixtures
import pytest
from matrices import sampled

from jaxlm.models import tree
from jaxlm.training.step import TrainStep

# Products of two activations; they belong to the layer that makes them.
ATTENTION = re.compile(r"layers/attention/BK")


def products(family, **training):
    """The op_name of every product in the compiled training step, without the marks of transformations."""
    mesh = meshes.make()
    with jax.set_mesh(mesh):
        steps = TrainStep(
            model_fixtures.model(model_fixtures.FAMILIES[family]),
            *model_fixtures.sections(**training),
            model_fixtures.optimization(),
        ).jitted(mesh)
        text = steps.train.lower(jax.eval_shape(steps.init), model_fixtures.batch()).compile().as_text()
    lines = [line for line in text.splitlines() if re.search(r"= \S+ (dot|convolution|custom-call)\(", line)]
    names = [re.search(r'op_name="([^"]*)"', line)[1] for line in lines if "dot_general" in line or " dot(" in line]
    return [re.sub(r"\w+\(|\)", "", name) for name in names]


@pytest.mark.parametrize(
    "family, settings",
    sampled(
        [
            pytest.param(family, settings)
            for family in ("llama", "gpt2", "latent")
            for settings in ({}, {"scan_layers": False}, {"remat": "full", "microbatches": 2})
        ],
        ["gpt2-{'scan_layers': False}", "llama-{'remat': 'full', 'microbatches': 2}"],
    ),
    ids=str,
)
def test_every_product_with_a_parameter_carries_its_path(family, settings):
    model = model_fixtures.model(model_fixtures.FAMILIES[family])
    _, abstract = tree.abstract(model)
    matrices = {path for path, parameter in tree.paths(tree.dimensions(abstract)).items() if parameter.inputs}
    multiplied = matrices - {"positions"} - ({"embedding"} if "unembedding" in matrices else set())
    found = {path: 0 for path in multiplied}
    for name in products(family, **settings):
        owners = [path for path in multiplied if f"/{path}/" in name]
        assert len(owners) == 1 or (not owners and ATTENTION.search(name)), name
        for path in owners:
            found[path] += 1
    # Forward, and two products backward.
    assert min(found.values()) >= 3, found


def test_a_part_is_named_by_the_attribute_that_holds_it():
    for path, variable in jax.tree_util.tree_leaves_with_path(
        tree.abstract(model_fixtures.model())[1], is_leaf=lambda x: hasattr(x, "get_metadata")
    ):
        assert variable.get_metadata()["name"] == jax.tree_util.keystr(path[-1:], simple=True)
