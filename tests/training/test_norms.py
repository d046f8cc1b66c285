import jax
import meshes
import model_fixtures
import numpy as np
import optax
import pytest

from jaxlm.models import tree
from jaxlm.parallel.batches import put_batch

pytestmark = pytest.mark.usefixtures("programs_once")


def norms_at_first(mesh):
    """Norms of the first step, which is not taken."""
    with jax.set_mesh(mesh):
        compiled = model_fixtures.jitted(
            model_fixtures.model(), model_fixtures.sections(), mesh, model_fixtures.optimization()
        )
        state = compiled.begin(model_fixtures.placed(model_fixtures.model(), mesh))
        return jax.device_get(compiled.norms(state, put_batch(model_fixtures.batch(), mesh)))


def measured(watch=(), **training):
    """(norms of the watched steps, metrics of each step, final state)."""
    mesh = meshes.make()
    with jax.set_mesh(mesh):
        compiled = model_fixtures.jitted(
            model_fixtures.model(), model_fixtures.sections(**training), mesh, model_fixtures.optimization()
        )
        norms, metrics = [], []
        state = compiled.begin(model_fixtures.placed(model_fixtures.model(), mesh))
        for step in range(3):
            batch = put_batch(model_fixtures.batch(seed=step), mesh)
            if step in watch:
                norms.append(jax.device_get(compiled.norms(state, batch)))
            state, now = compiled.train(state, batch)
            metrics.append(jax.device_get(now))
        return norms, metrics, jax.device_get(state)


@pytest.mark.parametrize(
    "training",
    [pytest.param({}, marks=pytest.mark.exhaustive), {"microbatches": 4, "dropout": 0.2}],
    ids=str,
)
def test_norms_are_those_of_the_step_and_looking_changes_no_bit(training):
    norms, watched, state = measured(watch=(0, 2), **training)
    _, metrics, unwatched = measured(**training)
    for a, b in zip(jax.tree.leaves((watched, state)), jax.tree.leaves((metrics, unwatched)), strict=True):
        np.testing.assert_array_equal(a, b)
    for row, step in zip(norms, (0, 2), strict=True):
        total = np.sqrt(sum(np.sum(np.square(norm)) for norm in row["gradient"].values()))
        np.testing.assert_allclose(total, metrics[step]["grad_norm"], rtol=1e-5)


def test_stacked_parameters_have_a_norm_per_layer():
    row = norms_at_first(meshes.make())
    _, abstract = tree.abstract(model_fixtures.model())
    assert row["gradient"].keys() == tree.paths(tree.shapes(abstract)).keys()
    for path, norm in row["gradient"].items():
        assert norm.shape == ((3,) if path.startswith("layers/") else ()), path
    assert row["residual"].shape == (3,) and (row["residual"] > 0).all()


def test_norms_are_the_same_on_a_mesh():
    one, eight = norms_at_first(meshes.make()), norms_at_first(meshes.make(data=2, fsdp=2, tensor=2))
    model_fixtures.assert_same_numbers(eight, one, 1e-4)


def test_a_layer_that_adds_nothing_leaves_the_residual_stream_as_it_was():
    mesh = meshes.make()
    with jax.set_mesh(mesh):
        compiled = model_fixtures.jitted(
            model_fixtures.model(), model_fixtures.sections(), mesh, model_fixtures.optimization()
        )
        parameters = model_fixtures.parameters(model_fixtures.model())
        parameters["layers"]["attention"]["output"] *= 0
        parameters["layers"]["feed_forward"]["down"] *= 0
        state = compiled.begin(jax.device_put(parameters))
        batch = model_fixtures.batch()
        row = compiled.norms(state, put_batch(batch, mesh))
    read = parameters["embedding"][batch["tokens"][batch["segments"] > 0]]
    np.testing.assert_allclose(row["residual"], [np.sqrt(np.mean(np.square(read)))] * 3, rtol=1e-5)
    assert optax.tree.norm(row["gradient"]) > 0
