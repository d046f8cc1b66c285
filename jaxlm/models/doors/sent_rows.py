"""Rows of tokens that devices send to those of their experts, and what experts give of them, which comes home.

Each of n devices that share out the experts sends every other, and itself, room for 5 / 4 of 1 / n of the rows of its
tokens: an all-to-all of one size, whatever experts tokens choose. Rows beyond that follow in further passes
(`jaxlm.models.feed_forward.passes`), so that none is dropped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.models import kernels
from jaxlm.models.doors.cost import DoorCost, Exchange, Local, LocalArray, Saved, loop
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.expert_matrices import Experts, PlacedArray, for_parts, num_experts
from jaxlm.models.doors.expert_rows import OWN_CHOICES, PARTS, SORT, SPREAD, collect, sorted_by, spread
from jaxlm.models.expert_parallel import ROOM
from jaxlm.models.logical_axes import Axes
from jaxlm.models.recording import is_recording
from jaxlm.parallel.collectives import axes_over, largest_on_shards, on_each_device
from jaxlm.parallel.partition import shards_of

_TOKENS = ("batch", "sequence")


class SentRows(NamedTuple):
    """The rows that devices were sent in one pass, and those that they sent.

    B: the devices that have sequences of their own. R: room for rows on those that share these, most of it taken.

    Attributes:
      x_BRD: the tokens.
      of_parts: x for the devices that have parts of the experts' hidden channels (`for_parts`), or None.
      index_BR1: int32, the expert of each; where there is no row the number of experts.
      weights_BR1: float32, the weight of what the expert gives.
      choice_BR: int32, of each row that a device sent the choice that it was, an index into the device's own
        [tokens · choices]; this number where it sent none.
      slot_BTk: int32, of each choice of a device's tokens the row that it was; R where it was sent in another pass.
    """

    x_BRD: jax.Array
    of_parts: PlacedArray | None
    index_BR1: jax.Array
    weights_BR1: jax.Array
    choice_BR: jax.Array
    slot_BTk: jax.Array


def sends_rows(sequences: int, experts: int) -> bool:
    """Return whether devices send rows to those of their experts, and do not gather all tokens: as
    `execution.expert_parallel` says, where several devices share out the experts and have tokens of their own.

    Args:
      sequences: of the batch.
      experts: of the mixture.
    """
    if kernels.expert_parallel() == "gather":
        return False
    by_expert = axes_over(PARTS[0], experts)
    return is_recording() or (bool(by_expert) and {*by_expert} <= {*axes_over(_TOKENS[0], sequences)})


def sent_rows(order: LocalArray) -> int:
    """Return the rows that are sent to a device with equal shares, of those that there is room for, [b, 1, R]."""
    sequences, _, room = order.shape
    return sequences * (room // ROOM)


def exchanged(size: int, of: str, backward: int = 0) -> Exchange:
    """Return an all-to-all of so many bytes among the devices that share out the experts."""
    return Exchange(0, (), "all-to-all", size, forward=1, backward=backward, of=of, among=PARTS[0])


def passes_needed(index_BTk: jax.Array, is_token_BT: jax.Array, experts: int) -> jax.Array:
    """Return the passes that send all rows of tokens that chose these experts, int32, equal on all devices; 0 without
    rows."""

    devices = shards_of(PARTS[0], experts)
    sizes = zip(_TOKENS, is_token_BT.shape, strict=True)
    over = tuple(name for axis, size in sizes for name in axes_over(axis, size))

    def local(index_BTk: jax.Array, is_token_BT: jax.Array) -> tuple[jax.Array]:
        owner_C = _owners(index_BTk, is_token_BT, experts // devices, devices)
        most = jnp.max(_counts(owner_C, devices))
        return (jax.lax.pmax(-(-most // _room(len(owner_C), devices)), over),)

    operands = (index_BTk, OWN_CHOICES), (is_token_BT, _TOKENS)
    (passes,) = on_each_device(local, *operands, results=[()])
    return largest_on_shards(passes)


def send_to_experts(
    x_BTD: jax.Array,
    index_BTk: jax.Array,
    weights_BTk: jax.Array,
    is_token_BT: jax.Array,
    matrix: Experts,
    number: jax.Array | int,
) -> SentRows:
    """Return the rows of tokens, [B, T, D], that a pass of this number, from 0, sends to the devices of their experts.

    Args:
      index_BTk: int32, the experts that tokens choose, with weights, float32. Padding (`is_token_BT` false) has none.
      matrix: one that multiplies the tokens.
    """
    axes = (*_TOKENS, f"act_{matrix.inputs[0]}")
    of_parts = for_parts(x_BTD, axes, matrix, PARTS[1:])
    x, index, weights, choice, slot = _send(
        x_BTD, index_BTk, weights_BTk, is_token_BT, number, num_experts(matrix), axes, of_parts
    )
    if of_parts is None:
        return SentRows(x, None, index, weights, choice, slot)
    return SentRows(x[0], (x, of_parts[1]), index, weights, choice, slot)


def _signature(
    x_BTD: jax.Array,
    index_BTk: jax.Array,
    weights_BTk: jax.Array,
    is_token_BT: jax.Array,
    number: jax.Array | int,
    experts: int,
    axes: Axes,
    of_parts: PlacedArray | None,
) -> Signature:
    B, T, k = index_BTk.shape
    R = -(-T * k * ROOM.numerator // ROOM.denominator)
    results = [
        (jax.ShapeDtypeStruct((B, R, x_BTD.shape[2]), x_BTD.dtype), axes),
        (jax.ShapeDtypeStruct((B, R, 1), jnp.int32), OWN_CHOICES),
        (jax.ShapeDtypeStruct((B, R, 1), jnp.float32), OWN_CHOICES),
        (jax.ShapeDtypeStruct((B, R), jnp.int32), _TOKENS),
        (jax.ShapeDtypeStruct((B, T, k), jnp.int32), OWN_CHOICES),
    ]
    operands = [(x_BTD, axes), (index_BTk, OWN_CHOICES), (weights_BTk, OWN_CHOICES), (is_token_BT, _TOKENS)]
    return Signature(operands, results)


def _declare(local: Local) -> DoorCost:
    x, index, weights, *_ = local.results
    passes = loop(SORT, local.operands[1], "sort"), loop(SPREAD, x, "rows")
    return DoorCost(
        passes=passes,
        saved=Saved(results=(3, 4)),
        exchanges=(
            exchanged(x.bytes, "rows", backward=1),
            exchanged(index.bytes, "routes"),
            exchanged(weights.bytes, "routes", backward=1),
        ),
        hands_on=True,
    )


@door(_signature, _declare, name="send_to_experts")
def _send(
    x_BTD: jax.Array,
    index_BTk: jax.Array,
    weights_BTk: jax.Array,
    is_token_BT: jax.Array,
    number: jax.Array | int,
    experts: int,
    axes: Axes,
    of_parts: PlacedArray | None,
) -> tuple[jax.Array, ...]:
    over, devices = axes_over(PARTS[0], experts), shards_of(PARTS[0], experts)

    def local(x, index_BTk, weights_BTk, is_token_BT, number) -> tuple[jax.Array, ...]:
        D, k = x.shape[-1], index_BTk.shape[-1]
        owner_C = _owners(index_BTk, is_token_BT, experts // devices, devices)
        choice_R, slot_C = _slots(owner_C, devices, number)
        rows_RD = spread(x.reshape(-1, D), choice_R // k, slot_C.reshape(-1, k), some=True)
        weight_R1 = spread(weights_BTk.reshape(-1, 1), choice_R, slot_C[:, None], some=True)
        expert_R = index_BTk.reshape(-1).at[choice_R].get(mode="fill", fill_value=experts)
        rows_RD, expert_R, weight_R1 = (_exchange(each, over) for each in (rows_RD, expert_R, weight_R1))
        sent = rows_RD.reshape(*(1,) * (x.ndim - 2), *rows_RD.shape)
        return sent, expert_R[None, :, None], weight_R1[None], choice_R[None], slot_C.reshape(index_BTk.shape)

    x, choices = of_parts or (x_BTD, axes), OWN_CHOICES
    operands = x, (index_BTk, choices), (weights_BTk, choices), (is_token_BT, _TOKENS), (jnp.int32(number), ())
    return on_each_device(local, *operands, results=[x[1], choices, choices, _TOKENS, choices])


def home_operands(sent: SentRows | None) -> list[tuple[jax.Array, Axes]]:
    """Return what `sent_home` reads of rows that were sent, with logical axes; nothing without any."""
    return [] if sent is None else [(sent.choice_BR, _TOKENS), (sent.slot_BTk, OWN_CHOICES)]


def sent_home(y_RD: jax.Array, choice_BR: jax.Array, slot_BTk: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """Return the sums [b, t, D] of what experts give of a device's tokens: of y, of the rows that it was sent, the rows
    of those that it sent come back from the devices along the mesh axes `over`."""
    (b, t, k), D = slot_BTk.shape, y_RD.shape[-1]
    home_RD = _exchange(y_RD, over)
    return collect(home_RD, choice_BR[0] // k, slot_BTk.reshape(-1, k), some=True).reshape(b, t, D)


def _exchange(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """Return an array with the n-th part of its rows from the n-th device."""
    return jax.lax.all_to_all(x, over, 0, 0, tiled=True)


def _owners(index_BTk: jax.Array, is_token_BT: jax.Array, experts: int, devices: int) -> jax.Array:
    """Return of each of a device's choices the device of its expert, int32 [C], and of padding the number of devices,
    each of which has so many experts."""
    return jnp.where(is_token_BT[..., None], index_BTk // experts, devices).reshape(-1)


def _room(choices: int, devices: int) -> int:
    """Return the rows that a device sends at most to each device in a pass, of so many choices."""
    return -(-choices * ROOM.numerator // (ROOM.denominator * devices))


def _counts(owner_C: jax.Array, devices: int) -> jax.Array:
    """Return the number of choices of each device's experts, int32 [devices]."""
    return jnp.sum(owner_C[None] == jnp.arange(devices)[:, None], axis=1, dtype=jnp.int32)


def _slots(owner_C: jax.Array, devices: int, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return of each row that is sent in a pass of this number the choice, or C; and of each choice the row, or R."""
    C, room = len(owner_C), _room(len(owner_C), devices)
    order_C, place_C = sorted_by(owner_C)
    counts = _counts(owner_C, devices)
    begins = jnp.cumsum(counts) - counts
    of_pass = number * room + jnp.arange(room)
    place_XR = begins[:, None] + of_pass[None]
    choice_XR = jnp.where(of_pass[None] < counts[:, None], order_C[jnp.minimum(place_XR, C - 1)], C)
    owner = jnp.minimum(owner_C, devices - 1)
    within_C = place_C - begins[owner] - number * room
    is_sent_C = (owner_C < devices) & (within_C >= 0) & (within_C < room)
    return choice_XR.reshape(-1), jnp.where(is_sent_C, owner * room + within_C, devices * room)
