"""Kernels under JAX's transformations: vmap, checkpoint and shard_map, each against the plain call."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from markers import ELSEWHERE
from matrices import sampled
from numerics import served

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from kernels_pallas.core import interpreted, rows
from kernels_pallas.core.registry import OPERATIONS

CALLS = [
    pytest.param(operation, name, id=f"{operation.name}-{name}", marks=[pytest.mark.slow] * (name == "mosaic_gpu"))
    for operation in OPERATIONS.values()
    for name in operation.implementations
]
# Mosaic GPU's interpreter has ordered effects, which jax.checkpoint refuses: see test_flash_attention.
WITHOUT_EFFECTS = [call for call in CALLS if "mosaic_gpu" not in call.values]


def _loss_of(operation, implementation, case):
    def loss(inputs, others):
        results = operation.function(**inputs, **others, **case.options, implementation=implementation)
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in jax.tree.leaves(results))

    return loss


def _arguments(operation, implementation, seed=0):
    # In float32 where possible: between bfloat16's roundings XLA may keep more digits in one program than in another.
    found = served(operation, implementation)
    case, dtype = next((one for one in found if one[1] == "float32"), found[0])
    arguments = case.draw(dtype, seed)
    inputs = {name: arguments.pop(name) for name in case.differentiable()}
    return case, inputs, arguments


# Of each test other kernels: together they have every one.
MAPPED = sampled(
    CALLS,
    [
        "rotary_embedding-mosaic_tpu",
        "matmul-mosaic_tpu",
        "linear_cross_entropy-triton",
        "flash_attention-triton",
    ],
)
MAPPED_OVER_NOTHING = sampled(
    CALLS,
    [
        "softmax-mosaic_tpu",
        "bias_activation-triton",
        "matmul-triton",
        "linear_cross_entropy-mosaic_tpu",
        "flash_attention-mosaic_gpu",
    ],
)
CHECKPOINTED = sampled(
    WITHOUT_EFFECTS,
    [
        "log_softmax-triton",
        "layer_norm-mosaic_tpu",
        "linear_cross_entropy-mosaic_tpu",
    ],
)


@pytest.mark.parametrize("operation, implementation", MAPPED)
@interpreted()
def test_vmap_of_grad_is_a_loop(operation, implementation):
    case, *first = _arguments(operation, implementation)
    _, *second = _arguments(operation, implementation, seed=1)
    gradient = jax.jit(jax.grad(_loss_of(operation, implementation, case)))
    both = jax.tree.map(lambda *xs: np.stack(xs), first, second)
    wanted = jax.tree.map(lambda *xs: np.stack(xs), gradient(*first), gradient(*second))
    chex.assert_trees_all_close(jax.jit(jax.vmap(gradient))(*both), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operation, implementation", MAPPED_OVER_NOTHING)
@interpreted()
def test_vmap_over_nothing_gives_nothing(operation, implementation):
    case, *arguments = _arguments(operation, implementation)
    none = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), arguments)
    gradients = jax.jit(jax.vmap(jax.grad(_loss_of(operation, implementation, case))))(*none)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, none[0])


@pytest.mark.parametrize("operation, implementation", CHECKPOINTED)
@interpreted()
def test_checkpoint_changes_nothing(operation, implementation):
    case, *arguments = _arguments(operation, implementation)
    loss = _loss_of(operation, implementation, case)
    # Both compiled: only operations that run one by one always round the loss's input to bfloat16 first.
    plain, again = (jax.jit(jax.grad(f))(*arguments) for f in (loss, jax.checkpoint(loss)))
    chex.assert_trees_all_close(plain, again, rtol=1e-6, atol=1e-6)


ROWS, EVERYWHERE = PartitionSpec("data"), PartitionSpec()
# Operations that treat each row by itself, with rows sharded over the devices of a mesh. Mosaic GPU's launches are
# alike for all operations, and attention's are tested.
ROW_OPERATIONS = [
    pytest.param(operation, name, id=f"{operation.name}-{name}")
    for operation in OPERATIONS.values()
    if operation.implementations is rows.IMPLEMENTATIONS or operation is OPERATIONS["rotary_embedding"]
    for name in operation.implementations
    if name != "mosaic_gpu"
]


def _specs(arrays):
    """Return the specs of a case's arrays: sharded by rows if of x's rank; vectors and angles are replicated."""
    rank = max(x.ndim for x in arrays.values())
    return {name: ROWS if x.ndim == rank else EVERYWHERE for name, x in arrays.items()}


def _call(operation, case, **how):
    """Return the operation as a function of all of a case's arrays."""
    return lambda arrays: operation.function(**arrays, **case.options, **how)


def _gradients(call):
    """Return a function from the arrays to their gradients through further mathematics after the call."""
    return jax.grad(lambda arrays: jnp.sum(jnp.sin(call(arrays).astype(jnp.float32))))


SHARDED = sampled(
    ROW_OPERATIONS,
    [
        "rms_norm-triton",
        "gated_activation-mosaic_tpu",
    ],
)
COMPILED = sampled(
    [
        pytest.param(*call.values, check_vma, id=f"{call.id}-{check_vma}")
        for call in ROW_OPERATIONS
        for check_vma in (True, False)
    ],
    ["rms_norm-mosaic_tpu-True", "softmax-mosaic_tpu-True", "layer_norm-triton-False"],
)


@pytest.mark.parametrize("operation, implementation", SHARDED)
@interpreted()
def test_gradients_inside_and_through_shard_map(operation, implementation):
    """Rows are sharded over four devices: the gradient of a replicated operand is the sum over all of them."""
    mesh = Mesh(jax.devices()[:4], ("data",))
    case = operation.used_in("test")[0]
    arrays = case.draw("float32")
    specs = _specs(arrays)
    call = _call(operation, case, implementation=implementation)
    wanted = jax.jit(_gradients(call))(arrays)

    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)  # interpreted kernels require it
    through = over(call, in_specs=(specs,), out_specs=ROWS)
    chex.assert_trees_all_close(jax.jit(_gradients(through))(arrays), wanted, rtol=1e-5, atol=1e-5)

    def inside(arrays):
        found = _gradients(call)(arrays)
        return {name: d if specs[name] == ROWS else jax.lax.psum(d, "data") for name, d in found.items()}

    got = jax.jit(over(inside, in_specs=(specs,), out_specs=specs))(arrays)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)


@ELSEWHERE
@pytest.mark.parametrize("operation, implementation, check_vma", COMPILED)
def test_shard_map_sends_nothing_but_the_sum_of_gradients_of_what_is_replicated(operation, implementation, check_vma):
    """Compiled for four devices. With check_vma JAX sums the gradient inside, otherwise around shard_map."""
    chips = {"triton": "h200-sxm:4", "mosaic_tpu": "tpu-v5e:2x2"}[implementation]
    mesh = Mesh(np.array(targets.devices(Target.parse(chips))), ("data",))
    case = operation.used_in("test")[0]
    specs = _specs(case.structs("bfloat16"))
    arrays = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, x in case.structs("bfloat16").items()
    }
    call = _call(operation, case, implementation=implementation)
    through = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=ROWS, check_vma=check_vma)
    with jax.set_mesh(mesh):
        text = jax.jit(_gradients(through)).lower(arrays).compile().as_text()
    collectives = re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(", text)
    assert collectives == ["all-reduce"] * (EVERYWHERE in specs.values())
