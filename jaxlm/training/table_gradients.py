"""The order in memory of the dimensions of tables' gradients on a TPU.

A TPU keeps an array in whole tiles of 8 × 128 numbers, and lets those dimensions lie innermost that fill tiles best:
of a part [V, D / N] of a table often the V columns of its transpose, where D / N is no multiple of 128. The gradient of
a look-up is made row by row. Left to itself, libtpu updates the table row by row too: from before the loss to the
update it keeps copies of the parameter and its moments in float32, in tiles that are partly empty.
"""

import jax
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from jaxlm.models import tree as model_tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.tree import Dimensions, Tree
from jaxlm.parallel.collectives import on_each_device
from jaxlm.parallel.partition import shards_of
from kernels_pallas.core import target


def as_stored(gradients: Tree, tree: nnx.State, model: ModelConfig) -> Tree:
    """Return the gradients of the parameters of a model's abstract tree, those of look-ups in tables [V, D] in the
    order of dimensions in which the device of the mesh around stores the table.

    A tied embedding's is the gradient of a product too, which libtpu makes in that order by itself.
    """
    if target.platform() != "tpu" or model.tied_embeddings:
        return gradients

    def turned(gradient: jax.Array, of: Dimensions) -> jax.Array:
        if not of.looked_up or not stored_by_columns(_local_shape(of)):
            return gradient
        return on_each_device(_by_columns, (gradient, of.axes))

    return jax.tree.map(turned, gradients, model_tree.dimensions(tree))


def _by_columns(part: jax.Array) -> jax.Array:
    """Return a device's part in the order of columns, made from one by rows: XLA would turn the whole gradient before
    its reduction over devices."""
    by_rows = with_layout_constraint(part, Layout((0, 1)))
    return with_layout_constraint(by_rows, Layout((1, 0)))


def stored_by_columns(shape: tuple[int, int]) -> bool:
    """Return whether a TPU stores a float32 array [rows, columns] column by column: where whole tiles take less so."""
    rows, columns = shape
    return _in_tiles(columns, rows) < _in_tiles(rows, columns)


def _local_shape(of: Dimensions) -> tuple[int, int]:
    first, second = zip(of.axes, of.shape, strict=True)
    return of.shape[0] // shards_of(*first), of.shape[1] // shards_of(*second, after=[first])


def _in_tiles(rows: int, columns: int) -> int:
    """Return the numbers of whole tiles of 8 × 128; of up to four rows, of 4, 2 or 1 × 128."""
    high = next(high for high in (1, 2, 4, 8) if rows <= high or high == 8)
    return -(-rows // high) * high * -(-columns // 128) * 128
