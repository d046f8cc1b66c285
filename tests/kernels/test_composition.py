"""Kernels under JAX's transformations: vmap, checkpoint and shard_map, each against the plain call."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elsewhere import ELSEWHERE
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.costs.hardware import Target
from jaxlm.lowering import targets
from kernels_pallas import rms_norm
from kernels_pallas.registry import OPERATIONS

CALLS = [
    pytest.param(operation, name, id=f"{operation.name}-{name}", marks=[pytest.mark.slow] * (name == "mosaic_gpu"))
    for operation in OPERATIONS.values()
    for name in operation.implementations
]
# Mosaic GPU's interpreter has ordered effects, which jax.checkpoint refuses: see test_flash_attention.
WITHOUT_EFFECTS = [call for call in CALLS if "mosaic_gpu" not in call.values]


def _loss_of(operation, implementation, case):
    def loss(inputs, others):
        results = operation.function(**inputs, **others, **case.options, implementation=implementation, _interpret=True)
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in jax.tree.leaves(results))

    return loss


def _arguments(operation, implementation, seed=0):
    case, dtype = operation.served(implementation, "test")[0]
    arguments = case.draw(dtype, seed)
    inputs = {name: arguments.pop(name) for name in case.differentiable()}
    return case, inputs, arguments


@pytest.mark.parametrize("operation, implementation", CALLS)
def test_vmap_of_grad_is_a_loop(operation, implementation):
    case, *first = _arguments(operation, implementation)
    _, *second = _arguments(operation, implementation, seed=1)
    gradient = jax.grad(_loss_of(operation, implementation, case))
    both = jax.tree.map(lambda *xs: jnp.stack(xs), first, second)
    wanted = jax.tree.map(lambda *xs: jnp.stack(xs), gradient(*first), gradient(*second))
    chex.assert_trees_all_close(jax.jit(jax.vmap(gradient))(*both), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operation, implementation", WITHOUT_EFFECTS)
def test_checkpoint_changes_nothing(operation, implementation):
    case, *arguments = _arguments(operation, implementation)
    loss = _loss_of(operation, implementation, case)
    # Both compiled: only where operations run one by one is what the loss reads always rounded to bfloat16 first.
    plain, again = (jax.jit(jax.grad(f))(*arguments) for f in (loss, jax.checkpoint(loss)))
    chex.assert_trees_all_close(plain, again, rtol=1e-6, atol=1e-6)


def _norm(implementation, **how):
    """The norm over four devices of a mesh, rows over them, and the mathematics that tests do with it."""
    return functools.partial(rms_norm, implementation=implementation, **how)


def _loss(norm):
    return lambda x, scale: jnp.sum(jnp.sin(norm(x, scale).astype(jnp.float32)))


ROWS, EVERYWHERE = PartitionSpec("data"), PartitionSpec()


@pytest.mark.parametrize("implementation", ["triton", "mosaic_tpu"])
def test_gradients_inside_and_through_shard_map(implementation):
    """Rows over four devices: the gradient of a replicated scale is the sum of all of theirs."""
    mesh = Mesh(jax.devices()[:4], ("data",))
    x, scale = jax.random.normal(jax.random.key(0), (8, 3, 40)), jnp.linspace(0.5, 1.5, 40)
    norm = _norm(implementation, _interpret=True)
    wanted = jax.grad(_loss(norm), argnums=(0, 1))(x, scale)

    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)  # interpreted kernels know of no other way
    through = over(norm, in_specs=(ROWS, EVERYWHERE), out_specs=ROWS)
    got = jax.jit(jax.grad(_loss(through), argnums=(0, 1)))(x, scale)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)

    def inside(x, scale):
        d_x, d_scale = jax.grad(_loss(norm), argnums=(0, 1))(x, scale)
        return d_x, jax.lax.psum(d_scale, "data")

    got = jax.jit(over(inside, in_specs=(ROWS, EVERYWHERE), out_specs=(ROWS, EVERYWHERE)))(x, scale)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)


@ELSEWHERE
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("chips, implementation", [("h200-sxm:4", "triton"), ("tpu-v5e:2x2", "mosaic_tpu")])
def test_shard_map_sends_nothing_but_the_sum_of_the_gradient_of_the_scale(chips, implementation, check_vma):
    """Compiled for four devices. Checked, JAX adds up the gradient inside; unchecked it does so around shard_map."""
    mesh = Mesh(np.array(targets.devices(Target.parse(chips))), ("data",))
    x, scale = jax.ShapeDtypeStruct((8, 16, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.bfloat16)
    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    through = over(_norm(implementation), in_specs=(ROWS, EVERYWHERE), out_specs=ROWS)
    gradient = jax.jit(
        jax.grad(_loss(through), argnums=(0, 1)),
        in_shardings=(NamedSharding(mesh, ROWS), NamedSharding(mesh, EVERYWHERE)),
    )
    with jax.set_mesh(mesh):
        text = gradient.lower(x, scale).compile().as_text()
    collectives = re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(", text)
    assert collectives == ["all-reduce"]
