"""The rows of a mixture of experts: each token once for each expert that it chose, sorted by expert on each device."""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.models.doors.cost import DoorCost, Exchange, Local, Loop, Saved, loop
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import EXPERT_HIDDEN, GATHERED, SENT_HIDDEN, Axes
from jaxlm.parallel.collectives import on_each_device

# The logical axes of which devices have a part each: of the experts, and of an expert's hidden channels.
PARTS = ("act_experts", "act_feed_forward")
OWN_CHOICES: Axes = (*GATHERED[:2], None)  # of a device's own tokens
_SIZES: Axes = (None, None, "act_experts")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertRows:
    """The rows of a mixture, sorted by expert on each device.

    P: the groups of devices that have tokens of their own. X: the devices of a group, which share out the experts of
    tokens that they have all gathered; 1 where rows were sent to the devices of their experts. R: the rows that there
    is room for on one of them.

    Attributes:
      order_PXR: int32, of each row the choice that it is, an index into the group's [tokens · choices].
      place_PXR: int32, of each choice its row.
      sizes_PXE: int32, the rows of each of the device's experts. Those of others, and of padding, follow after them.
      hidden: the logical axes of the rows' hidden numbers, [P, X, R, F]: EXPERT_HIDDEN or SENT_HIDDEN.
    """

    order_PXR: jax.Array
    place_PXR: jax.Array
    sizes_PXE: jax.Array
    hidden: Axes = field(default=EXPERT_HIDDEN, metadata={"static": True})

    @property
    def is_sent(self) -> bool:
        """True if the tokens are rows that were sent to the devices of their experts."""
        return self.hidden == SENT_HIDDEN

    @property
    def tokens(self) -> Axes:
        """The logical axes of the tokens, [B, T]."""
        return self.hidden[0], self.hidden[2]

    @property
    def operands(self) -> list[tuple[jax.Array, Axes]]:
        """The arrays with the logical axes by which their sizes are counted."""
        rows = self.hidden[:3]
        return [(self.order_PXR, rows), (self.place_PXR, rows), (self.sizes_PXE, _SIZES)]

    @property
    def on_devices(self) -> list[tuple[jax.Array, Axes]]:
        """The arrays with the logical axes by which they lie on devices."""
        return [(each, self.hidden[:3]) for each in (self.order_PXR, self.place_PXR, self.sizes_PXE)]


def sort_by_expert(
    index_BTk: jax.Array, is_token_BT: jax.Array | None, num_experts: int, hidden: Axes = EXPERT_HIDDEN
) -> ExpertRows:
    """Return the rows of tokens that chose these experts, int32 [B, T, k]. Padding (`is_token_BT` false) has none, and
    neither has an expert of index `num_experts`.

    Args:
      hidden: the logical axes of the rows' hidden numbers. With those of EXPERT_HIDDEN the tokens are of all devices
        that share out the experts; with SENT_HIDDEN each device has rows of its own experts.
    """
    order_PXR, place_PXR, sizes_PXE = _sort(index_BTk, is_token_BT, num_experts, hidden)
    return ExpertRows(order_PXR, place_PXR, sizes_PXE, hidden)


def _sort_signature(
    index_BTk: jax.Array, is_token_BT: jax.Array | None, num_experts: int, hidden: Axes = EXPERT_HIDDEN
) -> Signature:
    B, T, k = index_BTk.shape
    row: Any = jax.ShapeDtypeStruct((B, 1, T * k), jnp.int32)
    sizes: Any = jax.ShapeDtypeStruct((1, 1, num_experts), jnp.int32)
    like = ExpertRows(row, row, sizes, hidden)
    operands = [(index_BTk, (*like.tokens, None)), (is_token_BT, like.tokens)]
    return Signature(operands, like.operands, {"num_experts": num_experts, "is_sent": like.is_sent})


SPREAD = Loop(0, 0, 2), Loop(1, 0, 2)  # of `spread` and `collect`
SORT = Loop(0, 8, 0), Loop(0, 0, 0)  # a radix sort of ids with their places, in four passes


def _declare_sort(local: Local) -> DoorCost:
    exchanges = () if local.options["is_sent"] else tuple(gathered(local, i, OWN_CHOICES[: 3 - i]) for i in (0, 1))
    passes = (loop(SORT, local.operands[0], "sort"),)
    return DoorCost(passes=passes, saved=Saved(results=(0, 1, 2)), exchanges=exchanges)


def gathered(local: Local, operand: int, before: Axes) -> Exchange:
    """Return the gathering of an operand of the tokens of all devices that share out the experts."""
    return Exchange(operand, before, "all-gather", local.operands[operand].bytes, forward=1, of="routes")


@door(_sort_signature, _declare_sort, name="sort_by_expert")
def _sort(
    index_BTk: jax.Array, is_token_BT: jax.Array | None, num_experts: int, hidden: Axes = EXPERT_HIDDEN
) -> tuple[jax.Array, ...]:
    def local(index_BTk: jax.Array, is_token_BT: jax.Array | None, own_E: jax.Array) -> tuple[jax.Array, ...]:
        own_BTk = index_BTk - own_E[0]
        is_own_BTk = (own_BTk >= 0) & (own_BTk < len(own_E))
        if is_token_BT is not None:
            is_own_BTk &= is_token_BT[..., None]
        expert_R = jnp.where(is_own_BTk, own_BTk, len(own_E)).reshape(-1)
        order_R, place_R = sorted_by(expert_R)
        ends_E = jnp.sum(expert_R[None] <= jnp.arange(len(own_E))[:, None], axis=1).astype(jnp.int32)
        return order_R[None, None], place_R[None, None], jnp.diff(ends_E, prepend=0)[None, None]

    tokens = hidden[0], hidden[2]
    operands = (index_BTk, (*tokens, None)), (is_token_BT, tokens), (jnp.arange(num_experts), PARTS[:1])
    return on_each_device(local, *operands, results=[hidden[:3]] * 3)


def sorted_by(key_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the order of keys, int32 [R], equal ones as they come: of each place the key, and of each key its place.

    Both are int32 [R].
    """
    order_R = jnp.argsort(key_R, stable=True).astype(jnp.int32)
    counts = jnp.arange(len(key_R), dtype=jnp.int32)
    return order_R, jnp.zeros_like(order_R).at[order_R].set(counts, unique_indices=True)


def spread(x_ND: jax.Array, token_R: jax.Array, place_Nk: jax.Array, some: bool = False) -> jax.Array:
    """Return the row of each choice's token, [R, D]. The gradient is `collect`: in a fixed order, and no scatter.

    Args:
      token_R: of each row its token.
      place_Nk: of each choice of a token its row.
      some: some rows are of no token, N, and have zeros; some choices have no row, R, and add nothing.
    """
    return _spread(some, x_ND, token_R, place_Nk)


def collect(y_RD: jax.Array, token_R: jax.Array, place_Nk: jax.Array, some: bool = False) -> jax.Array:
    """Return the sum of each token's rows in the order of its choices, computed in float32, [N, D] in y's dtype. The
    arguments are those of `spread`."""
    return _collect(some, y_RD, token_R, place_Nk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(some: bool, x_ND: jax.Array, token_R: jax.Array, place_Nk: jax.Array) -> jax.Array:
    return _taken(x_ND, token_R, some)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _collect(some: bool, y_RD: jax.Array, token_R: jax.Array, place_Nk: jax.Array) -> jax.Array:
    return jnp.sum(_taken(y_RD, place_Nk, some).astype(jnp.float32), axis=1).astype(y_RD.dtype)


def _taken(x: jax.Array, index: jax.Array, some: bool) -> jax.Array:
    return x.at[index].get(mode="fill", fill_value=0) if some else x[index]


_spread.defvjp(
    lambda some, x, token, place: (_taken(x, token, some), (token, place)),
    lambda some, saved, d: (_collect(some, d, *saved), None, None),
)
_collect.defvjp(
    lambda some, y, token, place: (_collect(some, y, token, place), (token, place)),
    lambda some, saved, d: (_spread(some, d, *saved), None, None),
)
