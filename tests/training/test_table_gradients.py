"""The order of dimensions of tables' gradients on TPUs that are not here."""

import re

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import pytest
from markers import ELSEWHERE
from matrices import sampled

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from jaxlm.lowering.programs import step_programs
from jaxlm.models import tree
from jaxlm.training import table_gradients

pytestmark = ELSEWHERE
CHIPS = "tpu-v5e:2x2", "tpu-v5p:2x2x1", "tpu-v6e:2x2", "tpu-v7x:1x1x1"


@pytest.mark.parametrize("chips", sampled(CHIPS, ["tpu-v5e:2x2"]))
def test_a_table_is_stored_by_columns_where_libtpu_stores_it_so(chips):
    device = targets.devices(Target.parse(chips))[0]
    for rows in (1, 3, 8, 100, 500, 1024, 50257, 128256, 201088):
        for columns in (1, 2, 3, 5, 16, 45, 64, 100, 128, 130, 180, 256, 288, 360, 1024, 2880):
            order = str(device.client.get_default_layout(jnp.dtype("float32"), (rows, columns), device))
            by_columns = table_gradients.stored_by_columns((rows, columns))
            assert order.startswith("{0,1" if by_columns else "{1,0"), (rows, columns)


def on_four():
    return meshes.make(fsdp=4, devices=targets.devices(Target.parse("tpu-v5e:2x2")))


@pytest.mark.parametrize(("d_model", "tied", "constraints"), [(64, False, 2), (512, False, 0), (64, True, 0)])
def test_only_a_table_that_is_stored_by_columns_has_its_gradient_turned(d_model, tied, constraints):
    model = model_fixtures.model(vocab_size=1024, d_model=d_model, tied_embeddings=tied)
    abstract = tree.abstract(model)[1]
    with jax.set_mesh(on_four()):
        turned = jax.jit(lambda gradients: table_gradients.as_stored(gradients, abstract, model))
        assert turned.lower(tree.shapes(abstract)).as_text().count("LayoutConstraint") == constraints


@pytest.mark.exhaustive
@pytest.mark.parametrize("microbatches", [1, 2])
def test_an_update_copies_no_numbers_of_a_table_that_is_stored_by_columns(microbatches):
    """Each of four devices stores [4096, 180] of the table [4096, 720]."""
    model = model_fixtures.model(num_layers=1, vocab_size=4096, d_model=720)
    experiment = model_fixtures.experiment(model, dtype="bfloat16", microbatches=microbatches)
    text = step_programs(experiment, "train", on_four()).step.compile().as_text()
    part = r"f32\[4096,180\]"
    assert re.search(rf"{part}\{{0,1:\S* parameter", text)
    assert not re.search(rf"{part}\{{1,0:\S* copy\(", text)
    assert not re.search(r"\[(\d,)?4096,720\]\S* all-gather\(", text)  # nor is the reduced gradient gathered for it
