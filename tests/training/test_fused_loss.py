"""A training step whose loss is computed without its logits equals one with them."""

import functools

import jax
import meshes
import model_fixtures
import numpy as np
import pytest
from matrices import sampled

from jaxlm.models import kernels as kernel_choice
from jaxlm.parallel.batches import put_batch
from jaxlm.training.step import TrainStep
from kernels_pallas.core import interpreted
from kernels_pallas.linear_cross_entropy import chunks


@pytest.fixture
def fused(monkeypatch):
    """The loss alone, by XLA on this CPU; 16 tokens at a time where a device has all labels."""

    def plain(operation, *operands, **options):
        return operation(*(x for x, _ in operands), implementation="reference", **options)

    monkeypatch.setattr(kernel_choice, "run", plain)
    monkeypatch.setattr(chunks, "LOGITS", 16 * model_fixtures.VOCABULARY)
    with interpreted("chunked"):
        yield


def one_step(family, mesh=(1, 1, 1), microbatches=1, kernels="auto"):
    """Metrics of a step, and its gradients: half of Adam's first moment after one update."""
    settings = model_fixtures.sections(z_loss=1e-2, microbatches=microbatches, kernels=kernels)
    optimization = model_fixtures.optimization(clip_norm=1e9, beta1=0.5)
    model = model_fixtures.model(model_fixtures.FAMILIES[family])
    (metrics,), state = model_fixtures.run_steps(
        model, settings, [model_fixtures.batch()], meshes.make(*mesh), optimization
    )
    return {name: metrics[name] for name in ("loss", "z_loss", "grad_norm")}, state.optimizer[1][0].mu


@functools.cache
def with_logits(family):
    return one_step(family, kernels="xla")


@pytest.mark.parametrize(
    "family, mesh, microbatches",
    sampled(
        [
            pytest.param("llama", (1, 1, 1), 1),
            pytest.param("llama", (2, 2, 2), 1),
            pytest.param("gpt2", (2, 2, 2), 2),
            pytest.param("gpt2", (1, 4, 2), 1),
            pytest.param("llama", (1, 1, 8), 2),
            pytest.param("gemma", (1, 2, 4), 1),
        ],
        ["gpt2-(2, 2, 2)-2"],
    ),
    ids=str,
)
def test_a_step_without_logits_is_one_with_them(fused, family, mesh, microbatches):
    """Unembeddings [D, V] and tied [V, D], with a soft cap; labels over tensor, channels over fsdp, sums over data
    outside the loop."""
    metrics, gradients = one_step(family, mesh, microbatches, kernels="auto")
    expected_metrics, expected = with_logits(family)
    # The tolerances of DESIGN: sums are added in another order, in float32.
    model_fixtures.assert_same_numbers(metrics, expected_metrics, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


def holds_logits(choice, which):
    """Return whether an array of tokens × labels is in the jaxpr of a step."""
    steps = TrainStep(model_fixtures.model(), *model_fixtures.sections(kernels=choice), model_fixtures.optimization())
    state, batch = jax.eval_shape(steps.init), model_fixtures.batch()
    arguments = (state, batch) if which == "train" else (state.parameters, batch)
    with jax.set_mesh(meshes.make()):
        text = str(jax.make_jaxpr(getattr(steps, which))(*arguments))
    return (
        f"f32[8,{model_fixtures.CONTEXT},{model_fixtures.VOCABULARY}]" in text
        or f"f32[{8 * model_fixtures.CONTEXT},{model_fixtures.VOCABULARY}]" in text
    )


@pytest.mark.parametrize("which", ["train", "evaluate"])
def test_no_logits_are_in_the_step(fused, which):
    assert holds_logits("xla", which)
    assert not holds_logits("auto", which)


def test_evaluation_without_logits(fused):
    batch, mesh = model_fixtures.batch(), meshes.make(2, 2, 2)
    with jax.set_mesh(mesh):
        sums, parameters = [], model_fixtures.placed(model_fixtures.model(), mesh)
        for choice in ("xla", "auto"):
            steps = TrainStep(
                model_fixtures.model(), *model_fixtures.sections(kernels=choice), model_fixtures.optimization()
            ).jitted(mesh)
            sums.append(steps.evaluate(parameters, put_batch(batch, mesh)))
    np.testing.assert_allclose(sums[1][0], sums[0][0], rtol=1e-5)
    assert sums[1][1] == sums[0][1]
