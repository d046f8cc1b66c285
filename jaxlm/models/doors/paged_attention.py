"""Attention over keys and values in the pages of an engine."""

import functools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models import kernels
from jaxlm.models.doors.cost import (
    DoorCost,
    DoorProduct,
    Local,
    Pass,
    Product,
    ProductKernel,
    UnpaddedReads,
    VisibleFraction,
    Workspace,
)
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import HEADS, Axes
from jaxlm.models.views import PagedView, scales_of
from jaxlm.parallel.collectives import on_each_device
from kernels_pallas.core import interpretation, target
from kernels_pallas.core.launch import KernelCost, KernelCosts
from kernels_pallas.flash_attention import KeyRange
from kernels_pallas.paged_attention import costs, kernel_on
from kernels_pallas.paged_attention import paged_attention as attend

TABLE: Axes = (None, None)
KEY_PAGES: Axes = (None, "act_kv_heads", "act_head_dim", None)
VALUE_PAGES: Axes = (None, "act_kv_heads", None, "act_head_dim")
SCALE_PAGES: Axes = (None, "act_kv_heads", None, None)


def _pages(view: PagedView, value_dim: int | None) -> tuple[jax.Array, jax.Array | None]:
    """Return the pages of keys [P, K, H, S] and of values [P, K, S, V]; None where these are a part of the keys."""
    key = view.pages_of("key", tokens_last=True)
    return key, view.pages_of("value", tokens_last=False) if value_dim is None else None


def _scales(view: PagedView, value_dim: int | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the scales of keys and of values, [P, K, 1, S] each; None of pages without, and of values that are a part
    of the keys."""
    if scales_of("key") not in view.pages:
        return None, None
    return view.pages[scales_of("key")], view.pages[scales_of("value")] if value_dim is None else None


def _signature(
    query_R1NH: jax.Array,
    view: PagedView,
    sinks: nnx.Param | None,
    *,
    scale: float | None,
    soft_cap: float | None,
    window: int | None,
    value_dim: int | None,
) -> Signature:
    key, value = _pages(view, value_dim)
    width = value_dim if value is None else value.shape[-1]
    attended_R1NV = jax.ShapeDtypeStruct((*query_R1NH.shape[:3], width), query_R1NH.dtype)
    of_sinks = None if sinks is None else sinks[...], HEADS[2:3]
    operands = [(query_R1NH, HEADS), (key, KEY_PAGES), (value, VALUE_PAGES), of_sinks]
    operands += [(each, SCALE_PAGES) for each in _scales(view, value_dim)]
    options = {"soft_cap": soft_cap, "window": window, "value_dim": value_dim}
    return Signature(operands, [(attended_R1NV, HEADS)], options)


def visible_fraction(queries: int, keys: int, window: int | None) -> VisibleFraction:
    """Return the fractions of scores that are visible. A single query sees all keys of its window; of several queries,
    taken to be the same tokens as the keys, causality leaves half of the scores where there is no window."""
    size = min(window or keys, keys)
    whole = Fraction(size, keys)
    return VisibleFraction(whole, whole if queries == 1 else Fraction(size * (2 * keys - size), 2 * keys * keys))


def _declare(local: Local) -> DoorCost:
    """Declare a kernel, XLA's gather on a GPU, or its loops over pages; for a step without padding the products with
    the model's sizes."""
    sections = [each for each in local.sections if isinstance(each, costs.SectionReads)]
    if len(sections) < len(local.sections):
        unpadded = (each for each in local.sections if isinstance(each, UnpaddedReads))
        products = [product for each in unpadded for product in _unpadded_products(local, each)]
        return DoorCost(tuple(products), counts_all_steps=True)
    query, key, value = _abstract(local)
    if local.kernels and local.platform != "cpu":
        chip = target.of_kind(local.platform, local.device_kind) if local.device_kind else target.any_of(local.platform)
        if kernel := kernel_on(chip, query, key, value):
            return _by_kernel(local, sections, kernel)
    return _by_gather(local, sections) if local.platform == "gpu" else _by_loops(local, sections)


def _by_kernel(local: Local, sections: Sequence[costs.SectionReads], kernel: str) -> DoorCost:
    """Declare the kernels of each section, of all steps as one."""
    query, key, value = _abstract(local)
    (*_, N, H), (_, K, _, S) = query.shape, key.shape
    V = value if isinstance(value, int) else value.shape[3]
    products: list[DoorProduct] = []
    parts: list[KernelCost] = []
    workspace = 0
    for section in sections:
        Q, T, trips = section.runs, section.queries * math.ceil(section.run), section.trips(local.options["window"])
        rows, tokens = jax.ShapeDtypeStruct((Q, T, N, H), query.dtype), trips * S
        parts += costs.launch_costs(kernel, rows, key, value, tokens, local.options["soft_cap"])
        scores, pv = (Q * K * trips, T * N // K, H, S), (Q * K * trips, T * N // K, S, V)
        products += [DoorProduct(Product(*scores), 0, scope="scores"), DoorProduct(Product(*pv), 0, scope="pv")]
        if kernel != "mosaic_tpu":
            workspace = max(workspace, costs.lane_bytes(Q * T * N, costs.lanes(T, tokens, value), V))
    whole = KernelCost(*map(sum, zip(*parts, strict=True)))
    return DoorCost(
        tuple(products),
        kernel=ProductKernel(kernel, KernelCosts(whole, KernelCost()), ()),
        workspace=Workspace(beside=workspace),
        counts_all_steps=True,
    )


def _by_loops(local: Local, sections: Sequence[costs.SectionReads]) -> DoorCost:
    """Declare XLA's loops over pages."""
    products: list[DoorProduct] = []
    passes: list[Pass] = []
    workspace, window, (query, *_) = 0, local.options["window"], _abstract(local)
    for section in sections:
        page, trips = _page_cost(local, section, section.together), section.loop_trips(window)
        in_order = 0  # bytes of queries and results, sorted by the pages that they see
        if section.blocks > 1:
            widths, rows = query.shape[-1] + local.results[0].shape[-1], section.sequences * section.queries
            in_order = rows * query.shape[-2] * widths * query.dtype.itemsize
        workspace = max(workspace, page.workspace + in_order)
        if not trips:  # the rows of the section are all padding
            continue
        least, more = page.least_bytes // 2, (page.most_bytes - page.least_bytes) // 2
        for product, scope in zip(page.products, ("scores", "pv"), strict=True):
            products.append(DoorProduct(Product(*product), least, more, scope=scope, times=trips))
        passes.append(Pass(KernelCost(flops=page.flops), KernelCost(), "softmax", trips, kind="scores"))
    return DoorCost(tuple(products), passes=tuple(passes), workspace=Workspace(beside=workspace), counts_all_steps=True)


def _by_gather(local: Local, sections: Sequence[costs.SectionReads]) -> DoorCost:
    """Declare XLA's gather of all pages, seen or not: at the most they are read, written and read again."""
    products: list[DoorProduct] = []
    flops = workspace = 0
    for section in sections:
        page, pages = _page_cost(local, section, section.sequences), section.table * section.steps
        workspace = max(workspace, section.table * page.workspace)
        least, most = page.least_bytes, page.most_bytes
        for (batch, *sizes), scope in zip(page.products, ("scores", "pv"), strict=True):
            product = Product(pages * batch, *sizes)
            products.append(DoorProduct(product, pages * least // 2, pages * (most - least) // 2, scope=scope))
        flops += pages * page.flops
    passes = (Pass(KernelCost(flops=flops), KernelCost(), "softmax", kind="scores"),)
    return DoorCost(tuple(products), passes=passes, workspace=Workspace(beside=workspace), counts_all_steps=True)


def _reads_in_a_kernel(query: jax.Array, key: jax.Array, value: jax.Array | None, value_dim: int | None) -> bool:
    """Return whether a kernel will read the pages, each once for all rows of a run; XLA would compute with the rows
    that runs lack too."""
    if kernels.implementation() is not None or interpretation.current() is not None:
        return False
    return kernel_on(target.current(), query, key, value_dim if value is None else value) is not None


def _page_cost(local: Local, section: costs.SectionReads, sequences: int) -> costs.PageCost:
    """Return the cost of one page of each of some sequences of a section."""
    query, key, value = _abstract(local)
    rows = jax.ShapeDtypeStruct((sequences, section.queries, *query.shape[2:]), query.dtype)
    return costs.page_cost(rows, key, value, local.options["soft_cap"], local.platform)


def _abstract(local: Local) -> tuple[Any, Any, Any]:
    """Return the shapes and dtypes of queries, keys and values; of values that are a part of the keys their number of
    channels."""
    query, key, *values = (each.abstract for each in local.operands)
    width = local.options["value_dim"]
    return query, key, values[0] if width is None else width


def _unpadded_products(local: Local, reads: UnpaddedReads) -> Iterator[DoorProduct]:
    """Yield the two products of attention without padding: queries with keys, and weights with values."""
    (_, _, N, H), (_, K, _, _), (*_, V) = (each.shape for each in (*local.operands[:2], *local.results))
    sequences, queries, keys = reads
    visible = visible_fraction(queries, keys, local.options["window"])
    scores, pv = (sequences * K, N // K * queries, H, keys), (sequences * K, N // K * queries, keys, V)
    yield DoorProduct(Product(*scores), 0, scope="scores", visible=visible)
    yield DoorProduct(Product(*pv), 0, scope="pv", visible=visible)


def _attend(
    query: Any,
    key: Any,
    value: Any,
    table: Any,
    sinks: Any,
    key_scales: Any,
    value_scales: Any,
    *key_range: Any,
    **options: Any,
) -> jax.Array:
    value_dim = options.pop("value_dim")
    value = value_dim if value is None else value
    options |= {"sinks": sinks, "key_scales": key_scales, "value_scales": value_scales}
    return attend(query, key, value, table, key_range=KeyRange(*key_range), **options)


@door(_signature, _declare, pinned=True)
def paged_attention(
    query_R1NH: jax.Array,
    view: PagedView,
    sinks: nnx.Param | None,
    *,
    scale: float | None,
    soft_cap: float | None,
    window: int | None,
    value_dim: int | None,
) -> jax.Array:
    """Return the attention of the rows of an engine's step, section after section, [R, 1, N, V]
    (`kernels_pallas.paged_attention`).

    The arguments are those of `attention`. Each device computes its own heads by itself, also by XLA: on a CPU rows are
    then computed in one way.
    """
    (key, value), attended, first = _pages(view, value_dim), [], 0
    options = {"scale": scale, "soft_cap": soft_cap, "value_dim": value_dim}
    options |= {"implementation": kernels.implementation()}
    for section in view.sections:
        table_QM, rows = section.table, section.rows
        Q = len(table_QM)
        part = slice(first, first + Q * rows)
        query_QTNH = query_R1NH[part].reshape(Q, rows, *query_R1NH.shape[2:])
        start_QT, end_QT = (x_R1[part].reshape(Q, rows) for x_R1 in view.key_range)
        runs = section.runs if section.runs and _reads_in_a_kernel(query_QTNH, key, value, value_dim) else None
        if runs:
            query_QTNH, start_QT, end_QT = (runs.gathered(x[:, 0]) for x in (query_QTNH, start_QT, end_QT))
            table_QM = table_QM.at[runs.row_GT[:, 0]].get(mode="clip")  # of a run without rows, which sees nothing, any
        operands = (query_QTNH, HEADS), (key, KEY_PAGES), (value, VALUE_PAGES), (table_QM, TABLE)
        operands = *operands, (None if sinks is None else sinks[...], HEADS[2:3])
        operands = *operands, *((each, SCALE_PAGES) for each in _scales(view, value_dim))
        ranges = (start_QT, HEADS[:2]), (end_QT, HEADS[:2])
        with jax.named_scope(costs.loop_name(rows, window)):
            attended_QTNV = on_each_device(functools.partial(_attend, **options), *operands, *ranges)
        attended_RNV = runs.scattered(attended_QTNV) if runs else attended_QTNV.reshape(-1, *attended_QTNV.shape[2:])
        attended.append(attended_RNV[:, None])
        first += Q * rows
    return jnp.concatenate(attended)
