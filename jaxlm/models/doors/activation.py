"""Activations of a feed-forward layer, alone and as a gate."""

import functools
from collections.abc import Callable

import jax
from flax import nnx

from jaxlm.models import kernels
from jaxlm.models.doors.bias import BIAS, broadcast_bias
from jaxlm.models.doors.cost import CountedFunction, DoorCost, InPlace, Local, Loop, Saved, launched, loop
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.elementwise import in_place
from jaxlm.models.logical_axes import HIDDEN, Axes
from kernels_pallas import bias_activation, gated_activation
from kernels_pallas.bias_activation import costs as bias_activation_costs
from kernels_pallas.core import slopes, target
from kernels_pallas.gated_activation import costs


@functools.cache
def _function(name: str, gated: bool) -> Callable[..., jax.Array]:
    """Return what XLA computes of each number."""
    if gated:
        return functools.partial(gated_activation, activation=name, implementation="xla")
    return functools.partial(slopes.activation, name)


def _signature(name: str, x: jax.Array, bias: nnx.Param | None = None, axes: Axes = HIDDEN) -> Signature:
    vectors = [] if bias is None else [(bias[...], axes[-1:])]
    return Signature([(x, axes), *vectors], [(x, axes)], {"name": name})


def _declare(local: Local) -> DoorCost:
    """Return the cost of an activation, with the FLOPs of the bias in front of it."""
    (x, *bias), name = local.operands, local.options["name"]
    if bias and local.kernels and local.platform != "tpu":
        kernel = bias_activation_costs(x.abstract, bias[0].abstract, activation=name)
        return DoorCost(passes=(launched(kernel, "activation", kind="activation"),), saved=Saved((0,)))
    counted = CountedFunction(_function(name, gated=False), ((1,),), x.numbers)
    passes = [loop(BIAS, x, "bias", kind="bias") for _ in bias]
    passes.append(loop((Loop(1, 0, 2), Loop(1, 0, 4)), x, "activation", counted=counted, kind="activation"))
    return DoorCost(passes=tuple(passes), saved=Saved((0,)), in_place=in_place(local))


@door(_signature, _declare)
def activation(name: str, x: jax.Array, bias: nnx.Param | None = None, axes: Axes = HIDDEN) -> jax.Array:
    """Return an activation of each number of x (+ bias [F]) (`kernels_pallas.core.activations`), in its dtype. `axes`:
    the logical axes of x.

    On a GPU a kernel adds the bias: the backward pass reads x, which a product has written already. Elsewhere it reads
    the slope, which XLA for TPUs writes within the product, and a CPU reads faster than it computes it again.
    """
    if bias is None:
        return slopes.activation(name, x)
    if kernels.implementation() != "xla" and target.platform() != "tpu":
        return kernels.run(bias_activation, (x, axes), (bias[...], axes[-1:]), activation=name)
    return slopes.activation(name, x + broadcast_bias(bias[...], x))


def _gated(name: str, gate_BTF: jax.Array, up_BTF: jax.Array, axes: Axes = HIDDEN) -> Signature:
    return Signature([(gate_BTF, axes), (up_BTF, axes)], [(up_BTF, axes)], {"name": name})


def _declare_gated(local: Local) -> DoorCost:
    name, gate, saved = local.options["name"], local.operands[0], Saved((0, 1))
    if local.kernels:
        kernel = costs(*(each.abstract for each in local.operands), activation=name)
        return DoorCost(passes=(launched(kernel, "activation", kind="gated"),), saved=saved)
    counted = CountedFunction(_function(name, gated=True), ((1,), (1,)), gate.numbers)
    passes = (loop((Loop(0, 0, 3), Loop(0, 0, 5)), gate, "activation", counted=counted, kind="gated"),)
    return DoorCost(passes=passes, saved=saved, in_place=InPlace(backward=True))


@door(_gated, _declare_gated)
def gated(name: str, gate_BTF: jax.Array, up_BTF: jax.Array, axes: Axes = HIDDEN) -> jax.Array:
    """Return activation(gate) ⊙ up (arXiv:2002.05202, equation 5). `axes`: the logical axes of both."""
    return kernels.run(gated_activation, (gate_BTF, axes), (up_BTF, axes), activation=name)
