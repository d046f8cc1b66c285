"""Attention over the keys and values of a cache's view."""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlm.models import kernels
from jaxlm.models.doors.context_parallel import SharedSequence, shared_attention
from jaxlm.models.doors.cost import (
    DoorCost,
    DoorProduct,
    Local,
    Loop,
    Product,
    ProductKernel,
    Saved,
    VisibleFraction,
    Workspace,
    loop,
)
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.paged_attention import paged_attention, visible_fraction
from jaxlm.models.logical_axes import HEADS, KEYS, KV_HEADS
from jaxlm.models.masks import OneDocumentMask
from jaxlm.models.views import CacheView, PagedView
from jaxlm.parallel.partition import constrain, is_sharded
from kernels_pallas import flash_attention
from kernels_pallas.core import target
from kernels_pallas.core.launch import KernelCosts
from kernels_pallas.flash_attention import (
    EVERY_GRADIENT,
    Gradients,
    causal_chunks,
    costs,
    has_one_backward_kernel,
    kernel_of,
)


def named_heads(query_BTNH: jax.Array, key_BTKH: jax.Array, value_BTKH: jax.Array) -> tuple[jax.Array, ...]:
    """Return the operands of attention, sharded by heads and named "query", "key" and "value"."""
    arrays = (query_BTNH, HEADS, "query"), (key_BTKH, KV_HEADS, "key"), (value_BTKH, KV_HEADS, "value")
    return tuple(checkpoint_name(constrain(x, *axes), name) for x, axes, name in arrays)


def _operands(query_BTNH: jax.Array, view: CacheView, sinks: nnx.Param | None) -> list[tuple[jax.Array | None, Any]]:
    assert view.key_range is not None, "the cache is updated before attention reads it"
    arrays = (query_BTNH, HEADS), (view.arrays["key"], KEYS), (view.arrays["value"], KEYS)
    arrays = *arrays, (None if sinks is None else sinks[...], HEADS[2:3])
    if isinstance(view.key_range, OneDocumentMask):
        return list(arrays)
    start_BT, end_BT = jnp.asarray(view.key_range.start), jnp.asarray(view.key_range.end)
    return [*arrays, (start_BT, HEADS[:2]), (end_BT, HEADS[:2])]


def _signature(
    query_BTNH: jax.Array,
    view: CacheView,
    sinks: nnx.Param | None,
    *,
    scale: float | None,
    soft_cap: float | None,
    window: int | None,
    reach: int | None,
) -> Signature:
    options = {
        "soft_cap": soft_cap,
        "window": window,
        "reach": reach,
        "is_causal": view.is_causal,
        "sinks": sinks is not None,
    }
    attended = jax.ShapeDtypeStruct((*query_BTNH.shape[:3], view.arrays["value"].shape[-1]), query_BTNH.dtype)
    # Where it is computed the kernel names it, with its log-sum-exp.
    return Signature(_operands(query_BTNH, view, sinks), [(attended, HEADS)], options, name="attention")


_SOFTMAX = Loop(5.5, 3, 1), Loop(4, 4, 2)
_SOFT_CAP = Loop(3, 1, 0), Loop(5, 1, 0)  # within the loop of what it caps, which keeps the slope
_MOVED = Loop(0, 0, 2), Loop(0, 0, 2)


class _Sizes(NamedTuple):
    """The sizes of an attention on one device: sequences, query and key tokens, key/value heads, the query heads that
    share each, the channels of queries and keys, and those of values."""

    B: int
    T: int
    S: int
    K: int
    G: int
    H: int
    V: int


def _declare(local: Local) -> DoorCost:
    query, key, value = local.operands[:3]
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    sizes = _Sizes(B, T, S, K, N // K, H, value.shape[-1])
    if local.options["is_causal"] and T < S:
        return _of_shared(local, sizes)
    return _cost(local, sizes)


def _of_shared(local: Local, sizes: _Sizes) -> DoorCost:
    """Return the cost of attention over a sequence that devices share, each with T of its S tokens."""
    query, *pair = local.operands[:3]
    B, T, S, K, G, *_ = sizes
    shared = SharedSequence(S // T, T, K * G, K, local.options["reach"])
    blocks = [x._replace(shape=(B, T, *x.shape[2:])) for x in pair]
    way = shared.way(local.context_parallel)
    if way == "ring":
        cost = _cost(local, sizes._replace(S=T // 2), blocks=2 * len(shared.hops))
    elif way == "heads":
        cost = _cost(local, sizes._replace(T=S, K=K // shared.shards), chunks=False)
    else:
        cost = _cost(local, sizes)
        gathered = sum(x.bytes for x in pair) - sum(x.bytes for x in blocks)
        cost = cost._replace(saved=cost.saved._replace(bytes=cost.saved.bytes + gathered))
    return cost._replace(exchanges=tuple(shared.exchanges(way, query, *blocks)))


def _cost(local: Local, sizes: _Sizes, chunks: bool = True, blocks: int | None = None) -> DoorCost:
    """Return the cost of attention of these sizes, of which `blocks` follow one another, that of a ring. `chunks`: XLA
    leaves out scores on a CPU."""
    query = local.operands[0]
    has_sinks = local.options["sinks"]
    use = _KernelUse(
        local.platform,
        local.device_kind,
        local.training,
        local.deterministic,
        query.dtype,
        has_sinks,
        blocks is not None,
    )
    trained = [operand.is_trained for operand in local.operands[:3]]
    wanted = Gradients(trained[0], trained[1] or trained[2])
    kernel = _kernel(use, sizes, wanted) if local.kernels else None
    if kernel is not None:
        return _by_kernel(local, sizes, kernel, blocks)
    return _by_xla(local, sizes, chunks) if blocks is None else _ring_by_xla(local, sizes, blocks)


def _parts(local: Local, sizes: _Sizes, chunks: bool) -> list[tuple[int, int]]:
    """Return queries and keys of each sequence between which XLA computes scores, part by part: on a CPU causal
    attention is computed in chunks (`kernels_pallas.flash_attention.causal_chunks`)."""
    if chunks and local.platform == "cpu" and local.options["is_causal"] and sizes.T == sizes.S:
        return [(end - first, end) for first, end in causal_chunks.bounds(sizes.T)]
    return [(sizes.T, sizes.S)]


def _products(sizes: _Sizes, queries: int, keys: int, visible: VisibleFraction) -> tuple[DoorProduct, DoorProduct]:
    """Return the product that gives the scores of these queries and keys, and that of weights and values."""
    B, _, _, K, G, H, V = sizes
    scores, pv = Product(B * K, G * queries, H, keys), Product(B * K, G * queries, keys, V)
    return (
        DoorProduct(scores, 0, scope="scores", visible=visible),
        DoorProduct(pv, 0, scope="pv", visible=visible),
    )


def _by_kernel(local: Local, sizes: _Sizes, kernel: "_Kernel", blocks: int | None) -> DoorCost:
    """Return the cost of attention in a kernel, whose backward pass computes the scores again.

    Where one kernel gives the queries' gradient and one the keys' and the values', each computes the scores and the
    gradient of the weights, which is the first of the second product's, and runs if its gradients are asked for.
    """
    (result,) = local.results
    first, second = _products(sizes, sizes.T, sizes.S, _visible(local, sizes, blocks))
    first, second = first._replace(times=blocks or 1), second._replace(times=blocks or 1)
    weights, gradients = second._replace(product=second.product.gradients()[0]), kernel.gradients
    again = (first, first, weights) if sum(gradients) == 2 and not kernel.is_one_backward else (first,)
    log_sums = 4 * math.prod(result.shape[:-1])
    return DoorCost(
        products=(first, second),
        kernel=ProductKernel(kernel.name, kernel.costs, again, (gradients, (True, gradients.key))),
        saved=Saved((0, 1, 2), (0,), with_result=log_sums),
    )


def _visible(local: Local, sizes: _Sizes, blocks: int | None = None) -> VisibleFraction:
    """Return the fraction of scores that are visible, the same on each device that shares a sequence."""
    length = local.operands[1].shape[1]
    visible, computed = visible_fraction(length, length, local.options["window"]), (blocks or 1) * sizes.S
    return VisibleFraction(*(each * Fraction(length, computed) for each in visible))


def _ring_by_xla(local: Local, sizes: _Sizes, blocks: int) -> DoorCost:
    """Return the cost of a ring of blocks whose scores go through memory, and are computed again for gradients."""
    query, (result,) = local.operands[0], local.results
    B, T, S, K, G, H, V = sizes
    scores, rows, log_sums = B * K * G * T * S, query.itemsize * B * (T * G + S) * K, 4 * math.prod(result.shape[:-1])
    products = [
        each._replace(bytes=rows * width, unfused=4 * scores, gradients=(True, True), times=blocks, visible=None)
        for each, width in zip(_products(sizes, T, S, _visible(local, sizes, blocks)), (H, V), strict=True)
    ]
    products[0] = products[0]._replace(again=True)
    passes = [loop(_SOFTMAX, query, "softmax", scores, kind="scores", times=blocks)]
    passes += [loop(_SOFT_CAP, query, "softmax", scores, kind="scores", times=blocks)] * bool(local.options["soft_cap"])
    saved = Saved((0, 1, 2), (0,), with_result=log_sums)
    return DoorCost(tuple(products), passes=tuple(passes), saved=saved, workspace=_workspace(local, scores))


def _by_xla(local: Local, sizes: _Sizes, chunks: bool) -> DoorCost:
    """Return the cost of attention whose scores go through memory."""
    (query, key, value), (result,) = local.operands[:3], local.results
    B, T, S, K, G, H, V = sizes
    itemsize, window, cap = query.itemsize, local.options["window"], bool(local.options["soft_cap"])
    visible, products, scores = _visible(local, sizes), [], 0
    wants_scores = query.is_trained or key.is_trained
    wants_weights = wants_scores or (local.options["sinks"] and local.operands[3].is_trained)
    gradients = (query.is_trained, key.is_trained), (wants_weights, value.is_trained)
    for queries, keys in _parts(local, sizes, chunks):
        rows, numbers = itemsize * B * (queries * G + keys) * K, B * K * G * queries * keys
        widths = (H, 4), (V, itemsize)  # and the bytes of a score before the softmax, of a weight after it
        for product, (width, each), of in zip(_products(sizes, queries, keys, visible), widths, gradients, strict=True):
            products.append(product._replace(bytes=rows * width, unfused=each * numbers, gradients=of))
        scores += numbers
    passes = [loop(_SOFTMAX, query, "softmax", scores, kind="scores")]
    passes += [loop(_SOFT_CAP, query, "softmax", scores, kind="scores")] * cap
    moved = sum(each.numbers for each in (query, key, value, result))
    passes.append(loop(_MOVED, query, "heads", moved, kind="scores"))  # in front of the sequence and back
    # Slopes of a cap are kept, and a mask unless all layers have the same.
    kept = 4 * result.numbers + (itemsize + 4 + 4 * cap) * scores
    return DoorCost(
        products=tuple(products),
        passes=tuple(passes),
        saved=Saved((0, 1, 2), bytes=kept, shared=(window, scores)),
        workspace=_workspace(local, scores),
    )


def _workspace(local: Local, scores: int) -> Workspace:
    """Return the bytes of scores that XLA works with at once, and of its float32 result.

    XLA for a TPU makes weights of float32 scores within the product that reads them, and the mask an array of their
    size; for a GPU it makes weights an array in the dtype, and to keep what it makes also exponentials and the mask's
    values. The backward pass has a gradient, scores, and weights besides them where they are no copy.
    """
    (result,), itemsize = local.results, local.operands[0].itemsize
    is_tpu = local.platform == "tpu"
    weights = 0 if is_tpu or itemsize == 4 else itemsize
    attended = 0 if is_tpu else 4 * result.numbers
    forward, keeping = (5, 5) if is_tpu else (4 + itemsize, 13)
    backward = scores * (itemsize + 4)
    return Workspace(scores * forward + attended, backward + scores * weights, (scores * keeping + attended, backward))


class _Kernel(NamedTuple):
    """A kernel: its implementation, its cost with all scores visible, and the gradients that it computes, at once or in
    two kernels."""

    name: str
    costs: KernelCosts
    is_one_backward: bool
    gradients: Gradients


class _KernelUse(NamedTuple):
    """A call's chip, direction, promise, dtype, and whether it has sinks, by which its kernel is chosen. `in_blocks`:
    it returns the log-sum-exp, and its sinks come after it."""

    platform: str
    device_kind: str | None
    training: bool
    deterministic: bool
    dtype: str
    sinks: bool
    in_blocks: bool


@functools.lru_cache(maxsize=1024)
def _kernel(use: _KernelUse, sizes: _Sizes, wanted: Gradients) -> _Kernel | None:
    """Return the kernel that runs on a chip; None if XLA computes instead: with few queries, or with a head dim that no
    kernel of the chip takes."""
    platform, device_kind, training, deterministic, dtype, has_sinks, in_blocks = use
    if platform == "cpu":
        return None
    B, T, S, K, G, H, V = sizes
    shapes = (B, T, K * G, H), (B, S, K, H), (B, S, K, V)
    query, key, value = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    mask = (jax.ShapeDtypeStruct((B, T), "int32"),) * 2  # known only at run time
    chip = target.of_kind(platform, device_kind) if device_kind else target.any_of(platform)
    options = {"training": training or in_blocks, "key_range": mask, "deterministic": deterministic}
    options["return_log_sum_exp"] = in_blocks
    sinks = jax.ShapeDtypeStruct((K * G,), dtype) if has_sinks and not in_blocks else None
    name = kernel_of(chip, query, key, value, sinks=sinks, **options)
    if name is None:
        return None
    is_one = has_one_backward_kernel(name, query, key, value)
    gradients = EVERY_GRADIENT if is_one else wanted
    return _Kernel(name, costs(query, key, value, implementation=name, gradients=gradients), is_one, gradients)


def attention(
    query_BTNH: jax.Array,
    view: CacheView | PagedView,
    sinks: nnx.Param | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    value_dim: int | None = None,
    reach: int | None = None,
) -> jax.Array:
    """Return softmax(cap(scale · q·kᵀ)) · v over the keys in range, [B, T, N, H].

    Args:
      view: has a `key` and a `value`, [B, S, K, H], or pages of them.
      sinks: [N], a score of each head that has no value.
      window: the most keys that a token sees, which the key range of the view holds already; for recordings.
      value_dim: the first channels of a key that are its value, of a view without a `value`.
      reach: a promise that no token sees more keys than so many, itself the last; None is none.
    """
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "window": window}
    if isinstance(view, PagedView):
        return paged_attention(query_BTNH, view, sinks, value_dim=value_dim, **options)
    if value_dim is not None:
        view = view._replace(arrays={**view.arrays, "value": view.arrays["key"][..., :value_dim]})
    return _attention(query_BTNH, view, sinks, **options, reach=reach)


@door(_signature, _declare, name="attention", pinned=True)
def _attention(
    query_BTNH: jax.Array,
    view: CacheView,
    sinks: nnx.Param | None,
    *,
    scale: float | None,
    soft_cap: float | None,
    window: int | None,
    reach: int | None,
) -> jax.Array:
    """Return attention over whole slots (`kernels_pallas.flash_attention`)."""
    if is_sharded("sequence"):
        assert view.is_causal and view.key_range is not None
        arrays, key_range = view.arrays, (view.key_range.start, view.key_range.end)
        options = {"reach": reach, "scale": scale, "soft_cap": soft_cap}
        return shared_attention(
            query_BTNH, arrays["key"], arrays["value"], key_range, None if sinks is None else sinks[...], **options
        )
    known = view.key_range if isinstance(view.key_range, OneDocumentMask) else None

    def operation(query: Any, key: Any, value: Any, sinks: Any, *traced: Any, **options: Any) -> Any:
        key_range = traced if known is None else (known.start, known.end)
        return flash_attention(query, key, value, key_range=key_range, sinks=sinks, **options)

    options = {"is_causal": view.is_causal, "scale": scale, "soft_cap": soft_cap}
    options["deterministic"] = kernels.deterministic()
    return kernels.run(operation, *_operands(query_BTNH, view, sinks), **options)
