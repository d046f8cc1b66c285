"""The work of functions that doors declare, read from their jaxprs: products with their sizes, and the rest."""

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.extend.core.primitives import dot_general_p, scan_p
from jax.interpreters import partial_eval

from jaxlm.costs.jaxpr.cost import Phase
from jaxlm.costs.jaxpr.count import count, phase_of
from jaxlm.costs.jaxpr.fused import fused_bytes
from jaxlm.models.doors.cost import Product


class TracedWork(NamedTuple):
    """The products of a phase with their numbers of runs, the FLOPs outside of products, and the bytes moved where what
    is computed number by number is fused, all counted from a jaxpr."""

    products: tuple[tuple[Product, int], ...]
    flops: int
    bytes: int


@functools.lru_cache(maxsize=256)
def traced_work(
    function: Callable[..., Any],
    operands: tuple[tuple[tuple[int, ...], str], ...],
    trained: tuple[int, ...],
    checkpointed: bool,
) -> dict[Phase, TracedWork]:
    """Return the work of a function in its forward pass, its backward pass and its rematerialisation.

    Raises ValueError unless every product is a `dot_general` with a known number of runs.
    """
    arrays = [jax.ShapeDtypeStruct(*each) for each in operands]
    called = jax.checkpoint(function, prevent_cse=False) if checkpointed else function

    def both(*arrays: jax.Array) -> tuple:
        def of_trained(*x: jax.Array) -> Any:
            whole = dict(enumerate(arrays)) | dict(zip(trained, x, strict=True))
            return called(*(whole[i] for i in range(len(arrays))))

        y, pull_back = jax.vjp(of_trained, *(arrays[i] for i in trained))
        return y, pull_back(y)

    work: dict[Phase, TracedWork] = {}
    for each, phases in ((function, ("forward",)), (both, ("backward", "rematerialised"))):
        cost, jaxpr = count(each, *arrays), _needed(each, arrays)
        products, moved = _products(jaxpr), fused_bytes(jaxpr)
        for phase in phases:
            part = cost.of(phase=phase)
            if part.matmul_flops != sum(product.flops * times for product, times in products[phase].items()):
                raise ValueError(f"{cost.name} multiplies otherwise than by dot_general a known number of times")
            rest = part.flops - part.matmul_flops
            work[phase] = TracedWork(tuple(products[phase].items()), rest, moved[phase])
    return work


def _needed(function: Callable[..., Any], arrays: list[jax.ShapeDtypeStruct]) -> Jaxpr:
    """Return the jaxpr of a function whose results are all used."""
    return partial_eval.dce_jaxpr(jax.make_jaxpr(function)(*arrays).jaxpr, True)[0]


def _products(jaxpr: Jaxpr) -> dict[Phase, Counter[Product]]:
    """Return the products of each phase of a jaxpr."""
    products: dict[Phase, Counter[Product]] = {"forward": Counter(), "backward": Counter(), "rematerialised": Counter()}
    _add(jaxpr, "forward", 1, products)
    return products


def _add(jaxpr: Jaxpr, phase: Phase, times: int, products: dict[Phase, Counter[Product]]) -> None:
    for eqn in jaxpr.eqns:
        here = phase_of(eqn, phase)
        if eqn.primitive is dot_general_p:
            products[here][_product(eqn)] += times
        for inner in jaxprs_in_params(eqn.params):
            _add(inner, here, times * (eqn.params["length"] if eqn.primitive is scan_p else 1), products)


def _product(eqn: Any) -> Product:
    (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
    first, second = (math.prod(atom.aval.shape) for atom in eqn.invars)
    shape = eqn.invars[0].aval.shape
    batch, k = (math.prod(shape[i] for i in which) for which in (batched, contracted))
    return Product(batch, first // (batch * k), k, second // (batch * k))
