"""Logits: the unembedding of the normalised residual."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models.doors import quantized_linear
from jaxlm.models.doors.cost import DoorCost, DoorProduct, Local, Product, Workspace
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.gather import gather
from jaxlm.models.logical_axes import GATHERED, Axes
from jaxlm.models.parameters import axes_of
from jaxlm.models.quantized_matrix import QuantizedMatrix
from jaxlm.parallel.partition import is_sharded
from kernels_pallas.linear_cross_entropy import xla
from kernels_pallas.linear_cross_entropy.xla import soft_capped

LOGITS: Axes = (*GATHERED[:2], "act_vocab")


def logits(hidden_BTD: jax.Array, table: nnx.Param | QuantizedMatrix, soft_cap: float | None) -> jax.Array:
    """Unembed the normalised residual [B, T, D] to float32 logits [B, T, V], between −cap and cap where there is one.

    The table is an unembedding [D, V], which may be quantised, or a tied embedding [V, D].
    """
    if isinstance(table, QuantizedMatrix):
        return _quantized_logits(gather(hidden_BTD), table, soft_cap)
    return _logits(gather(hidden_BTD), table, soft_cap)


def _signature(hidden_BTD: jax.Array, table: nnx.Param, soft_cap: float | None) -> Signature:
    size = table.shape[table.axes.index("vocab")]
    logits_BTV = jax.ShapeDtypeStruct((*hidden_BTD.shape[:2], size), jnp.float32)
    operands = [(hidden_BTD, GATHERED), (table[...], table.axes)]
    return Signature(
        operands, [(logits_BTV, LOGITS)], {"soft_cap": soft_cap, "labels": table.axes.index("vocab")}, of=table
    )


def unembedding(local: Local) -> Product:
    """Return the product of hidden numbers and a table."""
    hidden, table = local.operands[:2]
    return Product(1, math.prod(hidden.shape[:-1]), hidden.shape[-1], table.shape[local.options["labels"]])


def with_traffic(product: Product, local: Local) -> DoorProduct:
    """Return a product of hidden numbers and a table with the bytes that it moves: logits are float32."""
    (hidden, table), (_, tokens, width, labels) = local.operands[:2], product
    moved = hidden.itemsize * tokens * width + table.itemsize * width * labels + 4 * tokens * labels
    return DoorProduct(product, moved, weight=1)


def _declare(local: Local) -> DoorCost:
    product = unembedding(local)
    return DoorCost((with_traffic(product, local),), workspace=Workspace(forward=4 * product.m * product.n))


@door(_signature, _declare, name="logits", pinned=True)
def _logits(hidden_BTD: jax.Array, table: nnx.Param, soft_cap: float | None) -> jax.Array:
    flat = not is_sharded("residual")
    return xla.logits(hidden_BTD, table[...], is_tied(table), soft_cap=soft_cap, flat=flat)


def _signature_of_quantized(hidden_BTD: jax.Array, table: QuantizedMatrix, soft_cap: float | None) -> Signature:
    parts = [(each[...], axes_of(each)) for each in (table.values, table.scales)]
    logits_BTV = jax.ShapeDtypeStruct((*hidden_BTD.shape[:2], parts[0][0].shape[1]), jnp.float32)
    options = {"soft_cap": soft_cap, "inputs": 1, "kind": table.kind}
    return Signature([(hidden_BTD, GATHERED), *parts], [(logits_BTV, LOGITS)], options, of=table)


def _declare_of_quantized(local: Local) -> DoorCost:
    (logits,) = local.results
    return quantized_linear.declare(local)._replace(workspace=Workspace(forward=logits.bytes))


@door(_signature_of_quantized, _declare_of_quantized, name="quantized_logits", pinned=True)
def _quantized_logits(hidden_BTD: jax.Array, table: QuantizedMatrix, soft_cap: float | None) -> jax.Array:
    logits_BTV = quantized_linear.multiplied(hidden_BTD.astype(jnp.float32), table, GATHERED[:2])
    return logits_BTV if soft_cap is None else soft_capped(logits_BTV, soft_cap)


def is_tied(table: nnx.Param) -> bool:
    """Return whether a table of the unembedding is an embedding [V, D]."""
    return table.axes[0] == "vocab"
