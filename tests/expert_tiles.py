"""The FLOPs of a mixture's products as XLA runs them: in whole tiles of the rows of each expert."""

from collections.abc import Iterable, Mapping

from jaxlm.costs.counted.operations import Operation
from jaxlm.models.config import ModelConfig
from kernels_pallas.grouped_matmul import xla
from kernels_pallas.grouped_matmul.visits import most_tiles

_MATRICES = ("feed_forward/gate", "feed_forward/up", "feed_forward/down")


def loops(rows: int, experts: int) -> tuple[str, str]:
    """Return the names of the loops over tiles of so many rows of experts: of products with matrices, and of those for
    the gradients of matrices."""
    first, tile = xla.gradient_rows(rows, experts)
    return xla.loop_name(xla.tile_rows(rows, experts)), xla.loop_name(tile, first)


def most_trips(rows: int, experts: int) -> dict[str, int]:
    """Return the most trips of each of these loops."""
    tile, (first, of_gradient) = xla.tile_rows(rows, experts), xla.gradient_rows(rows, experts)
    most = most_tiles(rows, experts, tile), most_tiles(rows, experts, of_gradient, after=first)
    return dict(zip(loops(rows, experts), most, strict=True))


def executed(
    operations: Iterable[Operation], model: ModelConfig, rows: set[int], trips: Mapping[str, int] | None = None
) -> int:
    """Return the FLOPs of products, with those of experts in so many trips of loops, or in the most that there may be.

    Args:
      rows: the rows of experts in each step, of one mixture, which no other size is.
    """
    (experts,) = {mixture.num_experts for layer in model.layers if (mixture := layer.feed_forward).kind == "mixture"}
    flops = 0
    for op in operations:
        found = set(op.product[1:3]) & rows if op.product and op.scope.endswith(_MATRICES) else None
        if found:
            (of_experts,) = found
            taken = most_trips(of_experts, experts) if trips is None else trips
            loop, of_gradient = loops(of_experts, experts)
            if op.product[2] == of_experts:  # the rows are contracted
                first, tile = xla.gradient_rows(of_experts, experts)
                computed = experts * first + tile * taken[of_gradient]
            else:
                computed = xla.tile_rows(of_experts, experts) * taken[loop]
            flops += op.times * op.flops // of_experts * computed
        else:
            flops += op.times * op.flops
    return flops
