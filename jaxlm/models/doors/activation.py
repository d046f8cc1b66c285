"""Activations of a feed-forward layer, alone and as a gate."""

import jax

from jaxlm.models import kernels
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import HIDDEN
from kernels_pallas import gated_activation
from kernels_pallas.core import slopes


@door(lambda name, x: Signature([(x, HIDDEN)], [(x, HIDDEN)], {"name": name}))
def activation(name: str, x: jax.Array) -> jax.Array:
    """Return an activation of each number of x (`kernels_pallas.core.activations`), in its dtype."""
    return slopes.activation(name, x)


def _gated(name: str, gate_BTF: jax.Array, up_BTF: jax.Array) -> Signature:
    return Signature([(gate_BTF, HIDDEN), (up_BTF, HIDDEN)], [(up_BTF, HIDDEN)], {"name": name})


@door(_gated)
def gated(name: str, gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    """Return activation(gate) ⊙ up (arXiv:2002.05202, equation 5)."""
    return kernels.run(gated_activation, (gate_BTF, HIDDEN), (up_BTF, HIDDEN), activation=name)
