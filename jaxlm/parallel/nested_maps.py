"""Maps over devices (`jax.shard_map`) within maps, of which XLA may lose the axes around.

XLA keeps a table of the axes around each map that lies within another (`shard_map_export.cc`, as of jaxlib 0.10). At
the first map within another one it enters the inner one, looks up the outer one, and writes what it found into the
entry. If the table grows for the outer one, at 48, 96, 192, … entries, that place is no longer in the table. The
compiler then aborts the process: "target.IsManualSubgroup() == sharding().IsManualSubgroup()".
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxpr_as_fun, jaxprs_in_params

_FIRST_GROWTH = 48


def without_loss(function: Callable[..., Any], *operands: Any) -> Any:
    """Return function(more, *operands) with the smallest `more` for which XLA loses no axes.

    `function`: has, for each unit of `more`, one more map within each of its maps.
    """
    for more in itertools.count():
        traced, shapes = jax.make_jaxpr(function, static_argnums=0, return_shape=True)(more, *operands)
        if not is_lost(maps_within(traced.jaxpr)):
            results = jaxpr_as_fun(traced)(*jax.tree.leaves(operands))
            return jax.tree.unflatten(jax.tree.structure(shapes), results)


def maps_within(jaxpr: Jaxpr) -> list[int]:
    """Return the number of maps within each outermost map of a program that has any, in order."""

    def inside(jaxpr: Jaxpr) -> int:
        return sum(
            (eqn.primitive.name == "shard_map") + sum(map(inside, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns
        )

    counts: list[int] = []
    for eqn in jaxpr.eqns:
        for below in jaxprs_in_params(eqn.params):
            counts += [inside(below)] if eqn.primitive.name == "shard_map" else maps_within(below)
    return [count for count in counts if count]


def is_lost(counts: list[int]) -> bool:
    """Return whether the table grows as it enters one of these outer maps, by the number of maps within each."""
    before = itertools.accumulate((count + 1 for count in counts), initial=0)
    return any(_grows(entries + 2) for entries, _ in zip(before, counts, strict=False))


def _grows(entries: int) -> bool:
    size, rest = divmod(entries, _FIRST_GROWTH)
    return rest == 0 and size.bit_count() == 1
