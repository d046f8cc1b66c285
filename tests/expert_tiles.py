"""The FLOPs of a mixture's products as XLA runs them: in whole tiles of the rows of each expert."""

from collections.abc import Iterable

from jaxlm.costs.counted.operations import Operation
from jaxlm.models.config import ModelConfig
from kernels_pallas.grouped_matmul import xla
from kernels_pallas.grouped_matmul.visits import most_tiles

_MATRICES = ("feed_forward/gate", "feed_forward/up", "feed_forward/down")


def executed(operations: Iterable[Operation], model: ModelConfig, rows: set[int], tiles: int | None = None) -> int:
    """Return the FLOPs of products, with those of experts in so many tiles, or in the most that there may be.

    Args:
      rows: the rows of experts in each step, of one mixture, which no other size is.
    """
    (experts,) = {mixture.num_experts for layer in model.layers if (mixture := layer.feed_forward).kind == "mixture"}
    flops = 0
    for op in operations:
        found = set(op.product[1:3]) & rows if op.product and op.scope.endswith(_MATRICES) else None
        if found:
            (of_experts,) = found
            tile = xla.tile_rows(of_experts, experts)
            computed = tile * (tiles or most_tiles(of_experts, experts, tile))
            flops += op.times * op.flops // of_experts * computed
        else:
            flops += op.times * op.flops
    return flops
