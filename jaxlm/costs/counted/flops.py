"""The four FLOP figures of a step over the whole job: napkin, model, model_causal, executed."""

import functools
import math
from dataclasses import replace
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


def matmul_tokens(work: Workload) -> dict[str, int]:
    """Return the tokens of a step that each parameter multiplies, by its path."""
    whole = replace(work, layout=Layout()).representative()
    if work.kind != "train":
        (whole,) = whole.as_asked().steps_of_engine()
    device = device_step(whole)
    products = ((use, device.cost(use).weight_product) for use in device.recording.uses)
    products = [(device.recording.parameter(use), use, each.product) for use, each in products if each]
    if work.kind != "train":
        return {path: product.m for path, _, product in products}
    # Numbers of a row over those that a token has: a loss pads its tokens.
    return {path: work.batch * (math.prod(use.shapes[0]) // product.k) for path, use, product in products}


def napkin_flops(work: Workload) -> int:
    """Return the FLOPs of a step by the textbook formula, from parameters and tokens alone."""

    def each(path: str) -> int:
        return 2 if work.kind != "train" else 4 if path in work.base else 6

    declared = work.parameters
    return sum(each(path) * math.prod(declared[path].shape) * n for path, n in matmul_tokens(work).items())


def flops(work: Workload) -> Flops:
    """Return the exact FLOPs of a step over the whole job."""
    if work.kind != "train":  # shards of an engine compute padding of their own
        shard = replace(work, batch=work.slots, layout=Layout(), step=None)
        executed = sum(op.times * op.flops for op in operations.step(shard))
        return _flops(replace(work, layout=Layout(), step=None))._replace(executed=work.batch_shards * executed)
    return _flops(replace(work, layout=Layout()))


@functools.lru_cache(maxsize=1024)
def _flops(whole_step: Workload) -> Flops:
    """Return the FLOPs of a step on one device; a search asks for the same on many layouts."""
    ran = operations.step(whole_step)
    executed = sum(op.times * op.flops for op in ran)
    # Kernels compute some products again, and fill up the last chunk of the loss: the model asks for neither. It asks
    # for scores that a CPU leaves out.
    asked = ran if whole_step == whole_step.as_asked() else operations.step(whole_step.as_asked())
    once = [op for op in asked if op.phase in ("forward", "backward")]
    model = causal = sum(op.times * op.flops for op in once if op.visible is None)
    for op in once:
        if op.visible is not None:
            model += op.times * op.flops * op.visible.whole
            causal += op.times * op.flops * op.visible.causal
    return Flops(napkin_flops(whole_step), int(model), int(causal), executed)
