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

    `napkin`: for each matrix parameter and token 6 in training (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), 4
    if the parameter stands beside adapters and has no gradient, and 2 in inference; attention is left out.
    `model`: the products of forward and backward pass, attention whole, each once (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B, with the exact sizes); MFU uses this figure. In a layer with a window, each query has
    the keys of its window. `model_causal`: `model` without the scores that causality hides, half of them in a layer
    without a window. `executed`: all products that run, those of rematerialisation and the optimizer included.
    """

    napkin: int
    model: int
    model_causal: int
    executed: int


def matmul_tokens(work: Workload) -> dict[str, int]:
    """Return the number of tokens that each matrix parameter multiplies in a step, by path."""
    whole = replace(work, layout=Layout()).representative()
    if work.kind != "train":
        (whole,) = whole.without_kernels_or_padding().by_step_shape()
    device = device_step(whole)
    products = ((use, device.cost(use).weight_product) for use in device.recording.uses)
    products = [(device.recording.parameter(use), use, each.product) for use, each in products if each]
    if work.kind != "train":
        return {path: product.m for path, _, product in products}
    # Elements of a row over elements of a token: the product's own rows include the padding of the loss.
    return {path: work.batch * (math.prod(use.shapes[0]) // product.k) for path, use, product in products}


def napkin_flops(work: Workload) -> int:
    """Return the FLOPs of a step by the textbook formula, from parameters and tokens alone."""

    def each(path: str) -> int:
        return 2 if work.kind != "train" else 4 if path in work.base else 6

    declared = work.parameters
    return sum(each(path) * math.prod(declared[path].shape) * n for path, n in matmul_tokens(work).items())


def flops(work: Workload) -> Flops:
    """Return the exact FLOPs of a step over the whole job."""
    if work.kind != "train":  # each shard of an engine pads its own rows
        shard = replace(work, batch=work.slots, layout=Layout(), engine_steps=None)
        executed = sum(op.times * op.flops for op in operations.without_copies(shard))
        model = replace(work, layout=Layout(), engine_steps=None).without_kernels_or_padding()
        return _flops(model)._replace(executed=work.batch_shards * executed)
    return _flops(replace(work, layout=Layout()))


@functools.lru_cache(maxsize=1024)
def _flops(whole_step: Workload) -> Flops:
    """Return the FLOPs of a step on one device; all layouts of a search share the result."""
    executed_ops = operations.without_copies(whole_step)
    executed = sum(op.times * op.flops for op in executed_ops)
    # The model's products are those of plain JAX: kernels compute some products again and pad the last chunk of the
    # loss, and a CPU leaves out scores.
    plain = whole_step.without_kernels_or_padding()
    model_ops = executed_ops if whole_step == plain else operations.without_copies(plain)
    once = [op for op in model_ops if op.phase in ("forward", "backward")]
    model = causal = sum(op.times * op.flops for op in once if op.visible is None)
    for op in once:
        if op.visible is not None:
            model += op.times * op.flops * op.visible.whole
            causal += op.times * op.flops * op.visible.causal
    return Flops(napkin_flops(whole_step), int(model), int(causal), executed)
