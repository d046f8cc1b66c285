"""The four FLOP figures of a step over the whole job: napkin, model, model_causal, executed."""

import functools
import math
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from jaxlm.costs.counted import operations
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.workload import Workload
from jaxlm.parallel.layout import Layout


class Flops(NamedTuple):
    """FLOPs of the matrix products of a step.

    `napkin`: 6 for each parameter that multiplies and each token in training (Kaplan et al. 2020, arXiv:2001.08361,
    section 2.1), 4 for those beside adapters, which have no gradient, and 2 in inference; attention is left out.
    `model`: the products of forward and backward pass, attention whole, each once (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B, with the exact sizes); MFU is of these. In a layer with a window each query has as
    many keys as that. `model_causal`: with half of attention, in a layer with a window what causality leaves of it.
    `executed`: what runs, with what rematerialisation computes again, and the products of the optimizer.
    """

    napkin: int
    model: int
    model_causal: int
    executed: int


def matmul_parameters(work: Workload) -> dict[tuple[str, str], int]:
    """Return the number of parameters that multiply each token, by path and by the name of the operation."""
    found, declared = device_step(work).found, work.parameters
    products = {found.parameter(use): use.name for use in found.uses if use.name in operations.PRODUCTS}
    return {(path, operation): math.prod(declared[path].shape) for path, operation in products.items()}


def napkin_flops(work: Workload) -> int:
    """Return the FLOPs of a step by the textbook formula, from parameters and tokens alone."""
    # In a prefill only the last token of each prompt is unembedded.
    read = {"logits": work.batch}

    def each(path: str) -> int:
        return 2 if work.kind != "train" else 4 if path in work.base else 6

    return sum(
        each(path) * n * read.get(operation, work.tokens) for (path, operation), n in matmul_parameters(work).items()
    )


def flops(work: Workload) -> Flops:
    """Return the exact FLOPs of a step over the whole job."""
    return _flops(replace(work, layout=Layout()))


@functools.lru_cache(maxsize=1024)
def _flops(whole_step: Workload) -> Flops:
    """Return the FLOPs of a step on one device; a search asks for the same on many layouts."""
    ran = operations.step(whole_step)
    executed = sum(op.times * op.flops for op in ran)
    # Kernels compute some products again, and fill up the last chunk of the loss: the model asks for neither. It asks
    # for scores that a CPU leaves out.
    asked = ran if whole_step == whole_step.without_kernels() else operations.step(whole_step.without_kernels())
    model = causal = Fraction(0)
    for op in asked:
        if op.phase in ("forward", "backward"):
            whole, seen = op.seen or (1, 1)
            model, causal = model + op.times * op.flops * whole, causal + op.times * op.flops * seen
    return Flops(napkin_flops(whole_step), int(model), int(causal), executed)
