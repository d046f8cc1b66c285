"""Every kind that a configuration may name is known to all parts that need it.

The kinds are read from the schema, so a new one is tested here too: a failure names the table that lacks it.
"""

import math
from typing import get_args

import jax
import jax.numpy as jnp
import model_fixtures
import numpy as np
import pytest
from flax import nnx
from workload_fixtures import workload

from jaxlm.core.schema import kind_of, sections_in
from jaxlm.costs.counted import memory, operations, traffic
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.jaxpr.count import count
from jaxlm.models import tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.feed_forward_config import Activation
from jaxlm.models.norms import norm
from jaxlm.training.config import OptimizerConfig
from jaxlm.training.optimizer import optimizer
from jaxlm.training.schedules import schedule
from kernels_pallas import gated_activation
from kernels_pallas.core import activations
from kernels_pallas.core.slopes import activation
from kernels_pallas.gated_activation import costs as gated_costs

SCHEDULES = tuple(sections_in(OptimizerConfig.model_fields["schedule"].annotation))
NORMS = tuple(map(kind_of, sections_in(ModelConfig.model_fields["norm"].annotation)))
ACTIVATIONS = get_args(Activation)


def both_ways(forward):
    """Return a function with the same arguments: its results, and the gradients with the results as cotangents."""

    def run(*arguments):
        y, pull_back = jax.vjp(forward, *arguments)
        return y, pull_back(y)

    return run


def is_counted(model):
    """Assert that a model's tree can be built and a step counted, with kernels and without."""
    for kernels in ("xla", "auto"):
        work = workload("train", model, 8, model_fixtures.CONTEXT, kernels=kernels)
        assert sum(op.times * op.elementwise for op in operations.step(work)) > 0
        assert memory.memory(work).parameters > 4 * tree.parameter_count(model)


@pytest.mark.parametrize("kind", model_fixtures.OPTIMIZERS)
def test_an_optimizer_holds_what_is_counted(kind):
    model = model_fixtures.model(model_fixtures.GPT2)  # biases, gains, tables and matrices
    parameters = tree.abstract(model)[1]
    held = jax.eval_shape(optimizer(model_fixtures.optimization(kind=kind), parameters).init, tree.shapes(parameters))
    work = workload("train", model, 8, model_fixtures.CONTEXT, optimizer=kind, kernels="xla")
    numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(held) if leaf.ndim)  # all but counts of updates
    assert memory.memory(work).optimizer == memory.trained(work).optimizer == 4 * numbers
    assert any(op.phase == "optimizer" for op in operations.step(work)) and list(traffic.collectives(work)) == []


@pytest.mark.parametrize("section", SCHEDULES, ids=kind_of)
def test_a_schedule_begins_at_its_peak(section):
    end = {"decay_steps": 10} if "decay_steps" in section.model_fields else {}  # as the steps of a run fill it in
    assert schedule(section(**end), peak=2.0)(0) == 2.0
    assert schedule(section(warmup_steps=4, **end), peak=2.0)(2) == 1.0


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_counted(kind):
    """FLOPs agree within a fifth."""
    model = model_fixtures.model(norm={"kind": kind})
    is_counted(model)
    graph, scale = nnx.split(norm(model, nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((8, model_fixtures.CONTEXT, model.d_model), jnp.float32)
    counted = count(both_ways(lambda scale, x: nnx.merge(graph, scale)(x)), scale, x)
    work = workload("train", model, 8, model_fixtures.CONTEXT, "float32", kernels="xla")
    step = device_step(work)
    use = next(use for use in step.recording.uses if use.scope.endswith("attention_norm"))
    part = next(operations.passes(step, use))
    assert part.forward.flops + part.backward.flops == pytest.approx(counted.flops, rel=0.2)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_computed_and_counted(name):
    for gated in (False, True):
        is_counted(model_fixtures.model(feed_forward={"d_ff": 48, "activation": name, "gated": gated}))
    x = jnp.linspace(-4, 4, 101)
    np.testing.assert_allclose(activation(name, x), activations.REFERENCE[name](x), rtol=1e-5, atol=1e-6)
    # A kernel recomputes what the reference saves, and selections by `where` do not count as FLOPs.
    counted = count(both_ways(lambda *x: gated_activation(*x, activation=name, implementation="reference")), x, x).flops
    if name == "gelu":  # the slope of erf, 2 π^(-1/2) exp(-x²), for which JAX 0.12 takes 14 FLOPs a number
        counted -= count(jax.vmap(jax.grad(jax.lax.erf)), x).flops - 4 * len(x)
    assert counted <= sum(cost.flops for cost in gated_costs(x, x, activation=name)) <= 2.5 * counted


def test_kernels_have_the_activations_of_models_and_no_others():
    for table in (activations.REFERENCE, activations.KERNEL, activations.FLOPS, activations.TRANSCENDENTALS):
        assert table.keys() == set(ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_pytorchs(name):
    torch = pytest.importorskip("torch")
    from kernels_pallas.bench import pytorch

    x = np.linspace(-4, 4, 101, dtype=np.float32)
    found = pytorch.ACTIVATIONS[name](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, activations.REFERENCE[name](jnp.asarray(x)), rtol=1e-5, atol=1e-6)
