"""Kernels in the model: a training step with them, interpreted, is one without, on one device and on eight."""

import functools

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from jax.sharding import AbstractDevice
from launches import launches
from matrices import sampled

from jaxlm.models import kernels
from jaxlm.training.step import TrainStep
from kernels_pallas.core import interpreted


@pytest.fixture
def kernels_asked_for(monkeypatch):
    """Kernels run although this is a CPU; returns how often one was asked for."""
    asked = []
    run = kernels.on_each_device

    def counted(function, *operands, **options):
        asked.append(function)
        return run(function, *operands, **options)

    monkeypatch.setattr(kernels, "on_each_device", counted)
    with interpreted("triton"):
        yield asked


# Heads as wide as the kernel for attention takes; two layers have both kinds of Gemma's.
FAMILIES = {
    name: {**family, "num_layers": 2, "attention": {**family["attention"], "head_dim": 16}}
    for name, family in model_fixtures.FAMILIES.items()
}


@functools.cache
def plain(family, packed):
    return step(family, (1, 1, 1), packed, kernels="xla")


def step(family, mesh, packed, kernels):
    """Loss, and the first moment, which is the gradient by a factor, of one step."""
    settings, batch = (
        model_fixtures.sections(microbatches=2 if mesh[0] > 1 else 1, kernels=kernels),
        model_fixtures.batch(),
    )
    if not packed:
        rows, length = batch["tokens"].shape
        positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        batch |= {"segments": np.ones_like(positions), "positions": positions}
    (metrics,), state = model_fixtures.run_steps(
        model_fixtures.model(FAMILIES[family]), settings, [batch], meshes.make(*mesh)
    )
    return metrics["loss"], state.optimizer[1][0].mu


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, mesh, packed",
    sampled(
        [
            pytest.param("qwen3", (1, 1, 1), True),
            pytest.param("qwen3", (1, 1, 1), False),
            pytest.param("qwen3", (2, 2, 2), True),
            pytest.param("qwen3", (1, 2, 4), False),
            pytest.param("gpt2", (1, 4, 2), True),
            pytest.param("gemma", (2, 2, 2), True),
        ],
        ["gemma-(2, 2, 2)-True"],
    ),
    ids=str,
)
def test_a_step_with_kernels_equals_one_without(family, mesh, packed, kernels_asked_for):
    """Qwen 3 has every kernel: norms of the stream and of heads, of which two are shared by four, also where each is on
    a device of its own; rotary; attention; gated. Gemma has windows in some layers, soft caps, norms behind blocks."""
    loss, gradients = step(family, mesh, packed, kernels="auto")
    assert kernels_asked_for
    wanted_loss, wanted = plain(family, packed)
    model_fixtures.assert_same_numbers(loss, wanted_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, wanted, 1e-4)


@pytest.mark.parametrize(
    "chip, tensor",
    sampled(
        [pytest.param(*of) for of in (("NVIDIA H200", 1), ("NVIDIA H200", 4), ("TPU v5 lite", 1), ("cpu", 1))],
        ["NVIDIA H200-4", "TPU v5 lite-1", "cpu-1"],
    ),
)
def test_the_chip_and_the_switch_decide(chip, tensor):
    """Qwen 3 has four norms, two rotations and a gate in its layer and one norm behind, each forward and backward, and
    attention, whose backward pass is two kernels on a GPU, also where two key/value heads are on four devices."""
    device = AbstractDevice(chip, 1, {"N": "gpu", "T": "tpu"}.get(chip[0], "cpu"))
    mesh = meshes.abstract(tensor=tensor, device=device)

    def kernels_of_a_step(kernels):
        model = model_fixtures.model(FAMILIES["qwen3"])
        steps = TrainStep(model, *model_fixtures.sections(kernels=kernels), model_fixtures.optimization())
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32), model_fixtures.batch())
        with jax.sharding.use_abstract_mesh(mesh):
            return len(list(launches(jax.make_jaxpr(steps.train)(jax.eval_shape(steps.init), batch))))

    assert kernels_of_a_step(kernels="xla") == 0
    assert kernels_of_a_step(kernels="auto") == {"N": 2 * (7 + 1) + 3, "T": 2 * (7 + 1) + 2, "c": 0}[chip[0]]
