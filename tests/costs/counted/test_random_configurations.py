"""Random configurations: what is counted is what their programs have, to the last FLOP and byte."""

import math
import platform
import random
import sys

import engine_jaxprs
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import pytest
import random_configurations
from matrices import sampled
from workload_fixtures import sections_of

from jaxlm.core.schema import Section
from jaxlm.costs.counted import cache, memory, operations
from jaxlm.costs.counted.parameters import parameters
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import JaxprCost, count
from jaxlm.costs.workload import Workload
from jaxlm.lowering import report, targets
from jaxlm.models import kernels, tree
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.mesh import make_mesh
from jaxlm.training.optimizer import optimizer
from jaxlm.training.step import TrainStep

# Seeds that between them draw every optimizer, form of a block, kind of norm, position, activation, rematerialisation,
# step and chip that the first thirty draw.
QUICK = (0, 1, 2, 4, 7, 8, 15, 16, 17, 20, 24, 28)


def read(work: Workload) -> list[JaxprCost]:
    """Return the cost of the jaxpr of a training step on one device, or of each step of an engine."""
    if work.kind != "train":
        return engine_jaxprs.costs(work)
    mesh = meshes.abstract(device=engine_jaxprs.CHIPS[work.platform])
    with jax.sharding.use_abstract_mesh(mesh), kernels.using_kernels(work.execution.kernels):
        steps = TrainStep(work.model, *sections_of(work), work.optimizer)
        ids = jax.ShapeDtypeStruct((work.batch, work.sequence), jnp.int32)
        batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), ids)
        return [count(steps.train, jax.eval_shape(steps.init), batch)]


@pytest.mark.parametrize("seed", sampled(range(1000), set(map(str, QUICK))))
def test_counted_is_what_the_program_has(seed):
    work = random_configurations.step(random.Random(seed))
    steps, ops = read(work), operations.step(work)
    products, of_kernels = (sum(getattr(step, name) for step in steps) for name in ("matmul_flops", "kernel_flops"))
    assert sum(op.times * op.flops for op in ops if not op.kernel) == products
    assert sum(op.times * (op.flops + op.elementwise) for op in ops if op.kernel) == of_kernels
    abstract = tree.abstract(work.model)[1]
    numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree.shapes(abstract)))
    assert sum(math.prod(d.shape) for d in parameters(work.model).values()) == numbers
    if work.kind == "train":
        state = jax.eval_shape(optimizer(work.optimizer, abstract).init, tree.shapes(abstract))
        held = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state) if leaf.ndim)
        assert memory.trained(work).optimizer == held + 4 * numbers * work.average
    else:
        assert cache.kv_cache(work) == engine_jaxprs.cache_bytes(work)


def test_the_draw_reaches_every_option():
    """Every value of every key of a layer, every kind of step, and models with several stacks of parameters."""
    quick = [random_configurations.step(random.Random(seed)) for seed in QUICK]
    assert {work.kind for work in quick} == {"train", "prefill", "decode"}
    assert {work.platform for work in quick} == set(engine_jaxprs.CHIPS)
    assert {work.optimizer.kind for work in quick if work.kind == "train"} == set(model_fixtures.OPTIMIZERS)
    works = [random_configurations.step(random.Random(seed)) for seed in range(300)]
    seen = {(key, str(value)) for work in works for block in work.model.layers for key, value in _leaves(block)}
    for name in ("norm", "position", "attention", "feed_forward", "norm_placement", "residual"):
        assert len({value for key, value in seen if key.startswith(name)}) >= 3
    assert {work.kind for work in works} == {"train", "prefill", "decode"}
    assert {work.optimizer.kind for work in works} == set(model_fixtures.OPTIMIZERS)
    assert any(path.startswith("layers/third/") for work in works for path in parameters(work.model))


def _leaves(section):
    for key, value in section:
        if isinstance(value, Section):
            yield from ((f"{key}.{name}", leaf) for name, leaf in _leaves(value))
        else:
            yield key, value


CHIPS_OF = {"gpu": "h200-sxm:8", "tpu": "tpu-v5p:2x2x2"}
LAYOUTS = (
    *({"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}, {"tensor": 8}, {"data": 8}),
    {"data": 2, "fsdp": 2, "tensor": 2},
)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
def test_compiled_programs_are_as_counted():
    """Twenty steps compiled for GPUs and TPUs: every FLOP is read, and memory is within a tenth for 18 of them."""
    errors = {}
    for seed in range(20):
        draw = random.Random(f"compiled {seed}")
        work = random_configurations.step(draw, random_configurations.LARGE)
        target = Target.parse(CHIPS_OF[("gpu", "tpu")[seed % 2]])
        mesh = make_mesh(Layout(draw.choice(LAYOUTS)), targets.devices(target))
        execution, training = sections_of(work)
        settings = execution.model_dump() | training.model_dump()
        experiment = model_fixtures.experiment(work.model, work.optimizer, **settings)
        found = report.compile(experiment, work.kind, target, mesh, False).report
        assert found.flops == found.counted_flops, (seed, work)
        errors[seed] = found.plan.memory.total / found.memory.peak - 1
    assert sum(abs(error) <= 0.1 for error in errors.values()) >= 18, errors
