"""The choice of experts: scores of a router, the experts that each token chooses, and their weights."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models.doors.cost import DoorCost, DoorProduct, Local, Loop, Product, Saved, loop
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import GATHERED, RESIDUAL, Axes
from jaxlm.models.parameters import axes_of
from jaxlm.parallel.collectives import on_each_device
from jaxlm.parallel.partition import constrain, is_sharded
from kernels_pallas.core import target

_ROUTES: Axes = (*GATHERED[:2], "act_routes")
_CHOICES: Axes = (*GATHERED[:2], None)


class Choice(NamedTuple):
    """The rule by which tokens choose experts.

    Attributes:
      count: the experts that a token chooses.
      scores, normalise, epsilon, scale: as in `jaxlm.models.feed_forward_config.RouterConfig`.
      groups, kept, group_score: groups of experts, those that a token may choose from, and what a group's score is: of
        its best expert or of its best two.
    """

    count: int
    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    normalise: bool = True
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    kept: int = 1
    group_score: Literal["max", "top2_sum"] = "max"


class Routes(NamedTuple):
    """The experts of each token.

    Attributes:
      weights_BTk: float32, of their outputs.
      index_BTk: int32, the experts, the best first.
      probability_BTE: float32, the router's scores of all experts, of sum 1.
      log_z_BT: float32, log Σ exp of the router's numbers.
    """

    weights_BTk: jax.Array
    index_BTk: jax.Array
    probability_BTE: jax.Array
    log_z_BT: jax.Array


def route(
    x_BTD: jax.Array,
    matrix: nnx.Param,
    choice: Choice,
    bias: nnx.Param | None = None,
    selection_bias: nnx.Param | None = None,
) -> Routes:
    """Return the experts that each token of the normalised residual x [B, T, D] chooses by x · matrix [D, E] (+ bias).

    Everything is float32 whatever x and the matrix are, so that rounding decides few choices. Of equal scores the first
    expert's wins. No gradient goes through the choice, to which `selection_bias` [E] is added.
    """
    return Routes(*_route(x_BTD, matrix, choice, bias, selection_bias))


def _signature(
    x_BTD: jax.Array, matrix: nnx.Param, choice: Choice, bias: nnx.Param | None, selection_bias: nnx.Param | None
) -> Signature:
    (B, T, _), E = x_BTD.shape, matrix[...].shape[1]
    weights = [(p[...], axes_of(p)) for p in (matrix, bias, selection_bias) if p is not None]
    results = [
        (jax.ShapeDtypeStruct((B, T, choice.count), jnp.float32), _CHOICES),
        (jax.ShapeDtypeStruct((B, T, choice.count), jnp.int32), _CHOICES),
        (jax.ShapeDtypeStruct((B, T, E), jnp.float32), _ROUTES),
        (jax.ShapeDtypeStruct((B, T), jnp.float32), GATHERED[:2]),
    ]
    return Signature([(x_BTD, RESIDUAL), *weights], results, {"choice": choice}, of=matrix)


# A softmax or sigmoid, the choice and the sum over what is chosen.
_SCORES = Loop(8, 4, 0), Loop(8, 4, 0)


def _declare(local: Local) -> DoorCost:
    x, matrix, *_ = local.operands
    scores, (k, n) = local.results[2], matrix.shape
    rows = x.numbers // k
    moved = x.itemsize * rows * k + matrix.itemsize * k * n + 4 * rows * n
    saved = Saved((0,) if matrix.is_trained else (), (1, 2), bytes=scores.bytes)
    passes = (loop(_SCORES, scores, "scores"),)
    return DoorCost((DoorProduct(Product(1, rows, k, n), moved, weight=1),), passes=passes, saved=saved)


@door(_signature, _declare, name="route")
def _route(
    x_BTD: jax.Array, matrix: nnx.Param, choice: Choice, bias: nnx.Param | None, selection_bias: nnx.Param | None
) -> tuple[jax.Array, ...]:
    logits_BTE = _logits(x_BTD, matrix, bias)
    probability_BTE = jax.nn.softmax(logits_BTE)
    each_BTE = logits_BTE if choice.scores == "softmax_of_chosen" else probability_BTE
    if choice.scores == "sigmoid":
        each_BTE = jax.nn.sigmoid(logits_BTE)
        probability_BTE = jax.nn.softmax(jax.nn.log_sigmoid(logits_BTE))  # each over their sum, which may underflow

    def chosen(each_BTE: jax.Array) -> tuple[jax.Array]:
        return (jax.lax.top_k(_in_kept_groups(each_BTE, choice), choice.count)[1].astype(jnp.int32),)

    # On each device by itself: the partitioner would gather what is sorted.
    chosen_by_BTE = each_BTE if selection_bias is None else each_BTE + selection_bias[...][None, None]
    (index_BTk,) = on_each_device(chosen, (jax.lax.stop_gradient(chosen_by_BTE), _ROUTES), results=[_CHOICES])
    is_chosen_BTkE = index_BTk[..., None] == jnp.arange(logits_BTE.shape[-1])[None, None, None]
    weights_BTk = jnp.sum(jnp.where(is_chosen_BTkE, each_BTE[:, :, None], 0.0), axis=-1)
    if choice.scores == "softmax_of_chosen":
        weights_BTk = jax.nn.softmax(weights_BTk)
    elif choice.normalise:
        total_BT1 = jnp.sum(weights_BTk, axis=-1, keepdims=True) + choice.epsilon
        weights_BTk /= jnp.where(total_BT1 > 0, total_BT1, 1.0)  # of scores that underflow
    return weights_BTk * choice.scale, index_BTk, probability_BTE, jax.nn.logsumexp(logits_BTE, axis=-1)


def _logits(x_BTD: jax.Array, matrix: nnx.Param, bias: nnx.Param | None) -> jax.Array:
    """Return x · matrix + bias in float32, in the form of `linear`."""
    x, weights = x_BTD.astype(jnp.float32), matrix[...].astype(jnp.float32)
    if is_sharded("residual") or target.platform() == "gpu":
        y = jnp.tensordot(x, weights, 1, precision="highest")
    else:
        y = jnp.matmul(x.reshape(-1, x.shape[-1]), weights, precision="highest").reshape(*x.shape[:-1], -1)
    y = y if bias is None else y + bias[...].astype(jnp.float32)[None, None]
    # Each device multiplies its part of the sequence: the numbers that are gathered after it are few.
    return constrain(constrain(y, *RESIDUAL[:2], "act_routes"), *_ROUTES)


def _in_kept_groups(each_BTE: jax.Array, choice: Choice) -> jax.Array:
    """Return scores with −∞ for the experts of groups that a token may not choose from."""
    if choice.kept == choice.groups:
        return each_BTE
    of_groups_BTGE = each_BTE.reshape(*each_BTE.shape[:-1], choice.groups, -1)
    best = jax.lax.top_k(of_groups_BTGE, 2 if choice.group_score == "top2_sum" else 1)[0]
    index_BTg = jax.lax.top_k(jnp.sum(best, axis=-1), choice.kept)[1]
    is_kept_BTG = jnp.any(index_BTg[..., None] == jnp.arange(choice.groups)[None, None, None], axis=-2)
    return jnp.where(is_kept_BTG[..., None], of_groups_BTGE, -jnp.inf).reshape(each_BTE.shape)
