"""The four FLOP figures of a step over the whole job: napkin, model, model_causal, executed."""

import functools
import math
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from jaxlm.costs.counted import operations
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.draft_steps import draft_drawing, draft_reading
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


class RowsInTiles(NamedTuple):
    """The rows of a product with experts' matrices, on one device and for one pass.

    `rows`: each token once for each expert that it chooses. A tile of `tile` rows that is not full is computed whole:
    `expected` rows run where each token chooses its experts with equal probability, and at `most` rows whatever it
    chooses. FLOPs and times are of `rows`.
    """

    rows: int
    tile: int
    expected: float
    most: int


def expert_rows(work: Workload) -> RowsInTiles | None:
    """Return the rows of the products with experts' matrices, in inference in the engine's step with the most; None of
    a model without experts. XLA computes the gradients of the matrices in other tiles."""
    groups = [op.groups for op in operations.without_copies(work) if op.groups and op.groups.tiles]
    most = max(groups, key=lambda each: each.rows, default=None)
    return None if most is None else RowsInTiles(most.rows, *most.tiles)


def matmul_tokens(work: Workload) -> dict[str, Fraction]:
    """Return the number of tokens that each matrix parameter multiplies in a step, by path: of the experts of a mixture
    the mean, since each multiplies the tokens that choose it."""
    whole = replace(work, layout=Layout()).representative()
    if work.kind != "train":
        (whole,) = whole.without_kernels_or_padding().by_step_shape()
    device, tokens = device_step(whole), {}
    for use in device.recording.uses:
        if (weighted := device.cost(use).weight_product) is None:
            continue
        product, numbers = weighted.product, math.prod(use.shapes[weighted.weight])
        if work.kind != "train":
            rows = product.m
        elif device.cost(use).loss is not None:  # whose product pads its rows
            rows = work.batch * (math.prod(use.shapes[0]) // product.k)
        else:
            rows = work.batch * (product.m // whole.rows())
        tokens[device.recording.parameter(use)] = Fraction(rows * product.k * product.n, numbers)
    return tokens


def active_share(work: Workload, path: str) -> Fraction:
    """Return the share of a parameter that computes with a token: of the experts of a mixture those that it chooses."""
    if not work.parameters[path].of_experts:
        return Fraction(1)
    return _shares_of_experts(work.representative()).get(path.rpartition("/")[0], Fraction(1))


@functools.lru_cache(maxsize=256)
def _shares_of_experts(work: Workload) -> dict[str, Fraction]:
    """Return the share of experts that a token chooses, by the path of their layer."""
    of_experts = {path for path, d in work.parameters.items() if d.of_experts}
    tokens = {path: n for path, n in matmul_tokens(work).items() if path in of_experts}
    return {path.rpartition("/")[0]: n / work.tokens for path, n in tokens.items()}


def napkin_flops(work: Workload) -> int:
    """Return the FLOPs of a step by the textbook formula, from parameters and tokens alone."""

    def each(path: str) -> int:
        return 2 if work.kind != "train" else 4 if path in work.base else 6

    declared = work.parameters
    return round(sum(each(path) * math.prod(declared[path].shape) * n for path, n in matmul_tokens(work).items()))


def flops(work: Workload) -> Flops:
    """Return the exact FLOPs of a step over the whole job."""
    if work.draft_model is not None:
        return _with_draft_model(work)
    if work.kind != "train":  # each shard of an engine pads its own rows
        work = work.without_drafts()
        sharing = Layout({axis: work.layout[axis] for axis in work.rules.over("tiles")})
        shard = replace(work, batch=work.slots, layout=sharing)
        executed = sharing.size * sum(op.times * op.flops for op in operations.without_copies(shard))
        model = replace(work, layout=Layout(), engine_steps=None).without_kernels_or_padding()
        return _flops(model)._replace(executed=work.batch_shards * executed)
    whole = _flops(replace(work, layout=Layout()))
    if work.stages == 1:
        return whole
    # On stages also passes without a microbatch, and the forward pass before each backward pass.
    return whole._replace(
        executed=work.layout.size * sum(op.times * op.flops for op in operations.without_copies(work))
    )


def _with_draft_model(work: Workload) -> Flops:
    """Return the FLOPs of a step of the engine, and of the steps of the model that draws its drafts."""
    drawn = Flops(*(work.drafts * each for each in flops(draft_drawing(work))))
    parts = flops(work.without_drafts()), flops(draft_reading(work)), drawn
    return Flops(*map(sum, zip(*parts, strict=True)))


@functools.lru_cache(maxsize=1024)
def _flops(whole_step: Workload) -> Flops:
    """Return the FLOPs of a step on one device; all layouts of a search share the result."""
    # The model's products are those of plain JAX: kernels compute some products again and pad the last chunk of the
    # loss, and a CPU leaves out scores.
    plain = whole_step.without_kernels_or_padding()
    if whole_step == plain and plain.kind == "train" and plain.batch > plain.microbatches:
        # Every row of plain JAX computes as much as another, so that all batches share the count of one.
        return _of_rows(replace(plain, batch=plain.microbatches), plain.batch // plain.microbatches)
    executed_ops = operations.without_copies(whole_step)
    executed = sum(op.times * op.flops for op in executed_ops)
    if plain.kind == "train" and whole_step != plain:
        return _flops(plain)._replace(executed=executed)
    model_ops = executed_ops if whole_step == plain else operations.without_copies(plain)
    once = [op for op in model_ops if op.phase in ("forward", "backward")]
    model = causal = sum(op.times * op.flops for op in once if op.visible is None)
    for op in once:
        if op.visible is not None:
            model += op.times * op.flops * op.visible.whole
            causal += op.times * op.flops * op.visible.causal
    return Flops(napkin_flops(whole_step), int(model), int(causal), executed)


def _of_rows(one: Workload, rows: int) -> Flops:
    """Return the FLOPs of a training step in plain JAX with this many times the rows of `one`. What the optimizer
    computes does not grow with them."""
    count = _flops(one)
    optimizer = sum(op.times * op.flops for op in operations.without_copies(one) if op.phase == "optimizer")
    executed = rows * (count.executed - optimizer) + optimizer
    return Flops(rows * count.napkin, rows * count.model, rows * count.model_causal, executed)
