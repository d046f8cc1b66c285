"""Muon over declared matrices, one per layer, each orthogonalised whole on one device.

`optax.contrib.scale_by_muon` can be told which dimensions are inputs and outputs, but then GSPMD partitions each
iteration: 208 collectives for the 7 matrices of a Llama layer on data 2 × fsdp 2 × tensor 2; here there are 38.
"""

import math

import jax
import jax.numpy as jnp
import optax

from jaxlm.models.tree import Dimensions, Tree
from jaxlm.parallel.collectives import map_whole
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Rules, together
from jaxlm.training.config import MuonConfig
from jaxlm.training.optimizer_cost import OptimizerMove, OptimizerProduct, UpdateCost

# Jordan et al. 2024, "Newton-Schulz iteration": a·X + b·(XXᵀ)X + c·(XXᵀ)²X takes singular values from far below 1 to
# between 0.68 and 1.13 in five iterations.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Approximately the root mean square of AdamW's updates (arXiv:2502.16982, section 2.2).
_ADAM_RMS = 0.2


def scale_by_muon_and_adam(settings: MuonConfig, dimensions: Tree) -> optax.GradientTransformation:
    """Return orthogonal directions for the matrices inside the layers, and Adam's for every other parameter.

    A projection is one matrix [inputs, outputs], with heads and head dim flattened: orthogonalising per head would be
    another optimizer.
    """
    kinds = jax.tree.map(lambda d: "muon" if d.projection else "adam", dimensions)

    def orthogonal(updates: Tree) -> Tree:
        # Parameters that optax masked out stay as they are.
        return jax.tree.map(
            lambda d, u: _of_layers(d, u, settings.iterations) if d.projection else u, dimensions, updates
        )

    muon = optax.chain(
        optax.trace(settings.momentum, settings.nesterov), optax.stateless(lambda updates, _: orthogonal(updates))
    )
    adam = optax.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon)
    return optax.partition({"muon": muon, "adam": adam}, kinds)


def _of_layers(d: Dimensions, update: jax.Array, iterations: int) -> jax.Array:
    """Return 0.2 · √max(inputs, outputs) times the orthogonal part of each layer's matrix, in its shape and layout; of
    each expert's in a mixture."""
    rows, columns = (math.prod(d.shape[axis] for axis in side) for side in sorted((d.inputs, d.outputs)))

    def orthogonal(x: jax.Array) -> jax.Array:
        matrices = orthogonalize(x.reshape(-1, rows, columns), iterations)
        return (matrices * (_ADAM_RMS * math.sqrt(max(rows, columns)))).reshape(x.shape)

    own = len(d.stack)
    stacked = update.reshape(-1, *d.shape[own:])
    axes = d.axes[0] if own == 1 else None
    return map_whole(orthogonal, stacked, axes, *d.axes[own:]).reshape(d.shape)


def update_cost(settings: MuonConfig, d: Dimensions, layout: Layout, rules: Rules) -> UpdateCost:
    """Return the cost of an update: none of Adam's, and for a matrix the products of the iterations.

    Updates move until each matrix is whole on one device, and back (`jaxlm.parallel.collectives.map_whole`): one axis
    after the other goes to the stack, which is padded to the number of devices. Along an axis that shards a matrix that
    is an all-to-all; along others a device keeps its shard, and gathers afterwards.
    """
    if not d.projection:
        return UpdateCost()
    short, long = sorted(math.prod(d.shape[i] for i in side) for side in (d.inputs, d.outputs))
    stack = math.prod(d.shape[i] for i in d.stack)
    each = math.ceil(stack / layout.size)
    sizes = (short, long, short), (short, short, short), (short, short, long)
    products = tuple(OptimizerProduct(settings.iterations, each, *size) for size in sizes)
    moves, elements = [], rules.stored(d.axes, d.shape, layout) // stack * each * layout.size
    sharding = together(rules.placed(d.axes, d.shape, layout))
    for axis, size in reversed(list(layout.items())):
        if size > 1 and axis in sharding:
            moves.append(OptimizerMove("all-to-all", axis, 2, elements))
        else:
            moves.append(OptimizerMove("all-gather", axis, 1, elements))
            elements //= size
    return UpdateCost(products, tuple(moves))


def orthogonalize(x_MIO: jax.Array, iterations: int) -> jax.Array:
    """Return approximately UVᵀ of each matrix UΣVᵀ, float32 [M, I, O]. Newton-Schulz iteration with Jordan's
    coefficients takes singular values to between 0.68 and 1.13, except those below 1/485 of the Frobenius norm.

    Products run at the backend's default precision: bfloat16 on a TPU, as in the original.
    """
    if x_MIO.shape[1] > x_MIO.shape[2]:  # XXᵀ has the size of the shorter side
        return jnp.swapaxes(orthogonalize(jnp.swapaxes(x_MIO, 1, 2), iterations), 1, 2)
    a, b, c = _COEFFICIENTS
    x = x_MIO / (jnp.linalg.norm(x_MIO, axis=(1, 2), keepdims=True) + 1e-7)
    for _ in range(iterations):
        square = jnp.einsum("MIO,MJO->MIJ", x, x)
        x = a * x + jnp.einsum("MIJ,MJO->MIO", b * square + c * square @ square, x)
    return x
