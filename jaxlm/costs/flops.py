"""The four FLOP figures of a step over the whole job: napkin, model, model_causal, executed."""

from dataclasses import replace
from typing import NamedTuple

from jaxlm.costs import operations
from jaxlm.costs.workload import MeshShape, Workload


class Flops(NamedTuple):
    """FLOPs of the matrix products of a step.

    `napkin`: 6 for each parameter that multiplies and each token in training (Kaplan et al. 2020, arXiv:2001.08361,
    section 2.1), 2 in inference; attention is left out. `model`: the products of forward and backward pass, attention
    whole, each once (Chowdhery et al. 2022, arXiv:2204.02311, appendix B, with the exact sizes); MFU is of these.
    `model_causal`: with half of attention. `executed`: what runs, with what rematerialisation computes again, and the
    products of the optimizer.
    """

    napkin: int
    model: int
    model_causal: int
    executed: int


def flops(work: Workload) -> Flops:
    """Of a step, exactly."""
    whole = replace(work, mesh=MeshShape())
    each = {"napkin": (6 if work.kind == "train" else 2) * operations.matmul_parameters(work.model) * work.tokens}
    if work.kind == "prefill":  # only the last token of each prompt is unembedded
        tables = work.model.vocabulary * work.model.width
        each["napkin"] -= 2 * tables * (work.tokens - work.batch)
    model = attention = executed = 0
    for op in operations.step(whole):
        cost = op.times * op.flops
        executed += cost
        if op.phase in ("forward", "backward"):
            model += cost
            if op.scope in (operations.SCORES, operations.MIXTURE):
                attention += cost
    causal = 0 if work.kind == "decode" else attention // 2  # a decoded token sees all that is in the cache
    return Flops(each["napkin"], model, model - causal, executed)
