"""Sums, factors and dropout: what a model computes number by number, also between doors."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.models.doors.cost import DoorCost, InPlace, Local, Loop, Saved, loop
from jaxlm.models.doors.door import DOORS, Door, Signature, door
from jaxlm.models.logical_axes import RESIDUAL, Axes

_SUM = Loop(1, 0, 3), Loop(1, 0, 3)
_FACTOR = Loop(1, 0, 2), Loop(1, 0, 2)
_DROPOUT = Loop(5, 0, 2), Loop(1, 0, 2)
_NUMBER = Loop(1, 0, 1), Loop(1, 0, 1)  # between doors; several of them are one loop


def in_place(local: Local) -> InPlace:
    """Return where XLA works in place, number by number: going forward on TPUs alone, going back without kernels."""
    return InPlace(local.platform == "tpu", not local.kernels)


# Equations of a jaxpr that compute number by number, and what their backward pass reads.
READS: dict[str, Literal["operands", "result", "nothing"]] = {
    **dict.fromkeys("mul div max min pow integer_pow log sin cos abs select_n".split(), "operands"),
    **dict.fromkeys("exp exp2 logistic tanh rsqrt sqrt erf".split(), "result"),
    **dict.fromkeys("add sub neg".split(), "nothing"),
}


def _declare_between(local: Local) -> DoorCost:
    """Return the cost of an equation between doors."""
    operands, result = Saved(tuple(range(len(local.operands)))), Saved(results=(0,))
    saved = {"operands": operands, "result": result, "nothing": Saved()}[READS[local.options["equation"]]]
    passes = (loop(_NUMBER, local.results[0], "elementwise"),)
    return DoorCost(passes=passes, saved=saved, in_place=in_place(local))


# The door of mathematics between doors, which no model calls: recordings find it.
BETWEEN_DOORS = DOORS["elementwise"] = Door("elementwise", _declare_between)


def _declare_sum(local: Local) -> DoorCost:
    passes = (loop(_SUM, local.operands[0], "residual", fused_once=True, kind="add"),)
    return DoorCost(passes=passes, in_place=in_place(local))


@door(lambda x_BTD, y_BTD: Signature([(x_BTD, RESIDUAL), (y_BTD, RESIDUAL)], [(x_BTD, RESIDUAL)]), _declare_sum)
def add(x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
    """Return the sum of the residual and what a block adds to it."""
    return x_BTD + y_BTD


def scale(x: jax.Array, factor: float, axes: Axes = RESIDUAL) -> jax.Array:
    """Return an array with these logical axes times a number, computed in float32; x itself for 1."""
    return x if factor == 1.0 else _scaled(x, factor, axes)


def _declare_factor(local: Local) -> DoorCost:
    return DoorCost(passes=(loop(_FACTOR, local.operands[0], "scale", kind="add"),), in_place=in_place(local))


@door(lambda x, factor, axes: Signature([(x, axes)], [(x, axes)]), _declare_factor, name="scale")
def _scaled(x: jax.Array, factor: float, axes: Axes) -> jax.Array:
    return (x.astype(np.promote_types(x.dtype, jnp.float32)) * factor).astype(x.dtype)


class Dropout(NamedTuple):
    """Inverted dropout (Srivastava et al. 2014); a `key` of None drops nothing, as in evaluation."""

    rate: float = 0.0
    key: jax.Array | None = None

    def __call__(self, x_BTD: jax.Array, site: int) -> jax.Array:
        """Zero each element of x with probability `rate`, another mask per site."""
        if self.key is None or self.rate == 0.0:
            return x_BTD
        return _dropped(x_BTD, self.key, site, self.rate)

    def at(self, layer: jax.Array | int) -> "Dropout":
        """Return the dropout of one layer."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, layer))


def _signature(x_BTD: jax.Array, key: jax.Array, site: int, rate: float) -> Signature:
    return Signature([(x_BTD, RESIDUAL)], [(x_BTD, RESIDUAL)], {"site": site})


def _declare_dropout(local: Local) -> DoorCost:
    (x,) = local.operands
    saved = Saved(masks=x.numbers)
    return DoorCost(passes=(loop(_DROPOUT, x, "dropout", kind="add"),), saved=saved, in_place=in_place(local))


@door(_signature, _declare_dropout, name="dropout")
def _dropped(x_BTD: jax.Array, key: jax.Array, site: int, rate: float) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x_BTD.shape)
    return jnp.where(keep, x_BTD / (1.0 - rate), jnp.zeros_like(x_BTD))
