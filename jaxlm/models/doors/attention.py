"""Attention over the keys and values of a cache's view."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlm.models import kernels
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import HEADS, KV_HEADS
from jaxlm.models.views import CacheView, PagedView
from jaxlm.parallel.partition import constrain
from kernels_pallas import flash_attention
from kernels_pallas.flash_attention import KeyRange
from kernels_pallas.paged_attention import paged_attention


def named_heads(query_BTNH: jax.Array, key_BTKH: jax.Array, value_BTKH: jax.Array) -> tuple[jax.Array, ...]:
    """Return the operands of attention, sharded by heads and named "query", "key" and "value"."""
    arrays = (query_BTNH, HEADS, "query"), (key_BTKH, KV_HEADS, "key"), (value_BTKH, KV_HEADS, "value")
    return tuple(checkpoint_name(constrain(x, *axes), name) for x, axes, name in arrays)


def _operands(query_BTNH: jax.Array, view: CacheView) -> list[tuple[jax.Array, Any]]:
    assert view.key_range is not None, "the cache is updated before attention reads it"
    arrays = (query_BTNH, HEADS), (view.arrays["key"], KV_HEADS), (view.arrays["value"], KV_HEADS)
    return [*arrays, *((x_BT, HEADS[:2]) for x_BT in view.key_range)]


def _signature(
    query_BTNH: jax.Array,
    view: CacheView | PagedView,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
) -> Signature:
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "window": window}
    if isinstance(view, PagedView):
        width = view.pages["value"].shape[-2 if "value" in view.tokens_last else -1]
        attended = jax.ShapeDtypeStruct((*query_BTNH.shape[:3], width), query_BTNH.dtype)
        return Signature([(query_BTNH, HEADS)], [(attended, HEADS)], options)
    attended = jax.ShapeDtypeStruct((*query_BTNH.shape[:3], view.arrays["value"].shape[-1]), query_BTNH.dtype)
    options["is_causal"] = view.is_causal
    # Where it is computed the kernel names it, with its log-sum-exp.
    return Signature(_operands(query_BTNH, view), [(attended, HEADS)], options, name="attention")


@door(_signature, pinned=True)
def attention(
    query_BTNH: jax.Array,
    view: CacheView | PagedView,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
) -> jax.Array:
    """Return softmax(cap(scale · q·kᵀ)) · v over the keys in range, [B, T, N, H] (`kernels_pallas.flash_attention`,
    or `paged_attention` where they lie in pages).

    Args:
      view: has a `key` and a `value`, [B, S, K, H], or pages of them.
      window: the most keys that a token sees, which the key range of the view holds already; for recordings.
    """

    def operation(query: Any, key: Any, value: Any, start: Any, end: Any, **options: Any) -> Any:
        return flash_attention(query, key, value, key_range=(start, end), **options)

    if isinstance(view, PagedView):
        return _paged_attention(query_BTNH, view, scale=scale, soft_cap=soft_cap)
    options = {"is_causal": view.is_causal, "scale": scale, "soft_cap": soft_cap}
    return kernels.run(operation, *_operands(query_BTNH, view), **options)


def _paged_attention(query_R1NH: jax.Array, view: PagedView, **options: Any) -> jax.Array:
    """Return attention by the rows of each section, [R, 1, N, H]."""
    key, value = view.pages_of("key", tokens_last=True), view.pages_of("value", tokens_last=False)
    attended, at = [], 0
    for section in view.sections:
        table_QM, rows = section.table, section.rows
        Q = len(table_QM)
        part = slice(at, at + Q * rows)
        query_QTNH = query_R1NH[part].reshape(Q, rows, *query_R1NH.shape[2:])
        key_range = KeyRange(*(x_R1[part].reshape(Q, rows) for x_R1 in view.key_range))
        attended_QTNH = paged_attention(query_QTNH, key, value, table_QM, key_range=key_range, **options)
        attended.append(attended_QTNH.reshape(Q * rows, 1, *attended_QTNH.shape[2:]))
        at += Q * rows
    return jnp.concatenate(attended)
