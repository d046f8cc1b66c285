"""Activations of a feed-forward layer, alone and as a gate."""

import functools
from collections.abc import Callable

import jax

from jaxlm.models import kernels
from jaxlm.models.doors.cost import CountedFunction, DoorCost, InPlace, Local, Loop, Saved, launched, loop
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.elementwise import in_place
from jaxlm.models.logical_axes import HIDDEN
from kernels_pallas import gated_activation
from kernels_pallas.core import slopes
from kernels_pallas.gated_activation import costs


@functools.cache
def _function(name: str, gated: bool) -> Callable[..., jax.Array]:
    """Return what XLA computes of each number."""
    if gated:
        return functools.partial(gated_activation, activation=name, implementation="xla")
    return functools.partial(slopes.activation, name)


def _declare(local: Local) -> DoorCost:
    """Return the cost of an activation, with the FLOPs of the bias in front of it."""
    (x,) = local.operands
    counted = CountedFunction(_function(local.options["name"], gated=False), ((1,),), x.numbers)
    passes = (loop((Loop(1, 0, 2), Loop(1, 0, 4)), x, "activation", counted=counted),)
    return DoorCost(passes=passes, saved=Saved((0,)), in_place=in_place(local))


@door(lambda name, x: Signature([(x, HIDDEN)], [(x, HIDDEN)], {"name": name}), _declare)
def activation(name: str, x: jax.Array) -> jax.Array:
    """Return an activation of each number of x (`kernels_pallas.core.activations`), in its dtype."""
    return slopes.activation(name, x)


def _gated(name: str, gate_BTF: jax.Array, up_BTF: jax.Array) -> Signature:
    return Signature([(gate_BTF, HIDDEN), (up_BTF, HIDDEN)], [(up_BTF, HIDDEN)], {"name": name})


def _declare_gated(local: Local) -> DoorCost:
    name, gate, saved = local.options["name"], local.operands[0], Saved((0, 1))
    if local.kernels:
        kernel = costs(*(each.abstract for each in local.operands), activation=name)
        return DoorCost(passes=(launched(kernel, "activation"),), saved=saved)
    counted = CountedFunction(_function(name, gated=True), ((1,), (1,)), gate.numbers)
    passes = (loop((Loop(0, 0, 3), Loop(0, 0, 5)), gate, "activation", counted=counted),)
    return DoorCost(passes=passes, saved=saved, in_place=InPlace(backward=True))


@door(_gated, _declare_gated)
def gated(name: str, gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    """Return activation(gate) ⊙ up (arXiv:2002.05202, equation 5)."""
    return kernels.run(gated_activation, (gate_BTF, HIDDEN), (up_BTF, HIDDEN), activation=name)
