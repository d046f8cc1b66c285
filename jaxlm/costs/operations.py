"""What a step computes, in closed form over the abstract tree: each matrix product with its sizes on one device, and
what is read and written around them.

Products are those of `jaxlm.costs.count` to the last FLOP; memory traffic is a bracket. Its lower end is what no
schedule avoids: each product reads its operands and writes its result once, attention keeps its scores on the chip
(arXiv:2205.14135), and everything element by element is fused into a neighbour. Its upper end fuses nothing.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxlm.costs.workload import Workload
from jaxlm.models import tree
from jaxlm.models.config import ModelConfig

Phase = Literal["forward", "backward", "rematerialised", "optimizer"]


class Product(NamedTuple):
    """`batch` products [m, k] × [k, n] at once."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n


@dataclass(frozen=True)
class Operation:
    """One operation on one device, which a step runs `times` times. FLOPs are those of its product; `least_bytes` and
    `most_bytes` are the bracket of what it moves to and from memory each time."""

    scope: str
    phase: Phase
    times: int
    product: Product | None
    least_bytes: int
    most_bytes: int

    @property
    def flops(self) -> int:
        return self.product.flops if self.product else 0

    def again(self, phase: Phase) -> "Operation":
        """The same in another phase."""
        return Operation(self.scope, phase, self.times, self.product, self.least_bytes, self.most_bytes)


@functools.lru_cache(maxsize=256)
def parameters(model: ModelConfig) -> dict[str, tree.Dimensions]:
    """The dimensions of each parameter, by path."""
    return tree.paths(tree.dimensions(tree.abstract(model)[1]))


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that multiply each token: all matrices but those that are only looked up."""
    return sum(math.prod(d.shape) for path, d in parameters(model).items() if _multiplies(model, path, d))


def _multiplies(model: ModelConfig, path: str, d: tree.Dimensions) -> bool:
    looked_up = path == "positions" or (path == "embedding" and not model.tied_embeddings)
    return bool(d.inputs) and not looked_up


def step(work: Workload) -> list[Operation]:
    """All operations of a step on one device."""
    if work.kind != "train":
        return list(_forward(work))
    forward = [op for op in _forward(work)]
    again = [op.again("rematerialised") for op in forward if _runs_again(work, op.scope)]
    backward = [transposed for op in forward for transposed in _transposed(op)]
    each = [_times(op, work.microbatches) for op in (*forward, *again, *backward)]
    return [*each, *_optimizer(work)]


def _times(op: Operation, times: int) -> Operation:
    return Operation(op.scope, op.phase, op.times * times, op.product, op.least_bytes, op.most_bytes)


def _forward(work: Workload) -> Iterator[Operation]:
    model, width = work.model, work.width_bytes
    rows, queries, keys = work.rows(), work.queries, work.sequence
    for path, d in parameters(model).items():
        if not _multiplies(model, path, d):
            continue
        k, n = (math.prod(work.local(d.axes[i], d.shape[i]) for i in side) for side in (d.inputs, d.outputs))
        if path == "embedding":  # tied: it unembeds
            k, n = n, k
        tokens = rows * queries
        if d.table and work.kind == "prefill":
            tokens = rows  # only the last token of each prompt is unembedded
        times = math.prod(d.shape[i] for i in d.stack)
        out = 4 if d.table else width  # logits are float32
        moved = width * (tokens * k + k * n) + out * tokens * n
        yield Operation(path, "forward", times, Product(1, tokens, k, n), moved, moved)

    attention, L = model.attention, model.layers
    N, H = work.local("act_heads", attention.heads), attention.head_width
    K = min(work.local("act_kv_heads", attention.kv_heads), N)
    query, cached, scores = rows * queries * N * H, rows * keys * K * H, rows * N * queries * keys
    group = N // K
    once, unfused = width * (query + cached), width * (query + cached) + 4 * scores
    first = Product(rows * K, group * queries, H, keys)
    second = Product(rows * K, group * queries, keys, H)
    yield Operation(SCORES, "forward", L, first, once, unfused)
    yield Operation(MIXTURE, "forward", L, second, once, width * (query + cached + scores))

    # The softmax: maximum, exponential, sum; then narrowed to the dtype of the mixture.
    yield Operation("layers/attention/softmax", "forward", L, None, 0, scores * (3 * 4 + 4 + width))
    tokens, D = rows * queries, model.width
    stream = tokens * D // (work.mesh.tensor if queries % work.mesh.tensor == 0 else 1) * width
    F = work.local("act_ff", model.feed_forward.hidden)
    beside = 2 * width * rows * queries  # each number that stands beside a product is read and written
    for path, d in parameters(model).items():
        if not d.inputs and path.endswith("_bias"):
            numbers = math.prod(work.local(d.axes[i], d.shape[i]) for i in d.outputs)
            yield Operation(path, "forward", L, None, 0, beside * numbers)
    turned = (N + K) * H * ((model.position.kind == "rotary") + attention.qk_norm)
    yield Operation("layers/attention/positions", "forward", L, None, 0, beside * turned)
    yield Operation("layers/norms", "forward", L, None, 0, 2 * 2 * stream)
    yield Operation("layers/residual", "forward", L, None, 0, 2 * 3 * stream)
    yield Operation(
        "layers/feed_forward/activation", "forward", L, None, 0, width * tokens * F * (3 if _gated(model) else 2)
    )
    yield Operation("embedding/lookup", "forward", 1, None, width * tokens * D, 2 * width * tokens * D)
    if work.kind == "train":
        logits = tokens * work.local("act_vocab", model.vocabulary) * 4
        yield Operation("loss", "forward", 1, None, 0, 2 * logits)


SCORES, MIXTURE = "layers/attention/scores", "layers/attention/mixture"


def _gated(model: ModelConfig) -> bool:
    return model.feed_forward.gated


def _transposed(op: Operation) -> Iterator[Operation]:
    """The backward pass of an operation: the gradients of both operands of a product; twice the traffic of the rest."""
    if op.product is None:
        yield Operation(op.scope, "backward", op.times, None, op.least_bytes, 2 * op.most_bytes)
        return
    batch, m, k, n = op.product
    for product in (Product(batch, m, n, k), Product(batch, k, m, n)):
        yield Operation(op.scope, "backward", op.times, product, op.least_bytes, op.most_bytes)


def _runs_again(work: Workload, scope: str) -> bool:
    """Whether the backward pass computes an operation of the forward pass again.

    With rematerialisation a layer runs again, but for what its backward pass does not read: the last product, whose
    result is only added to the stream, and products whose result is kept. A query or key that is normalised is kept
    behind its norm, whose backward pass wants what was before. Softmax's backward pass wants scores and mixture,
    whatever is kept.
    """
    kept = work.remat
    if kept == "none" or not scope.startswith("layers/"):
        return False
    kept = () if kept == "full" else kept
    _, part, name = scope.split("/") if scope.count("/") == 2 else ("", "", scope)
    if part == "feed_forward" and name == "down":
        return False
    normalised = part == "attention" and name in ("query", "key") and work.model.attention.qk_norm
    return name not in kept or normalised


def _optimizer(work: Workload) -> Iterator[Operation]:
    """Reads of gradient, parameter and state, writes of the last two; with Muon the products of its iterations."""
    from jaxlm.costs.memory import state_numbers

    stored = {path: work.stored(d.axes, d.shape) for path, d in parameters(work.model).items()}
    state = sum(state_numbers(work, path, d) for path, d in parameters(work.model).items())
    moved = 4 * (3 * sum(stored.values()) + 2 * state + (2 * sum(stored.values()) if work.average else 0))
    yield Operation("optimizer", "optimizer", 1, None, moved, 2 * moved)
    if work.optimizer != "muon":
        return
    for path, d in parameters(work.model).items():
        if not d.projection:
            continue
        sides = sorted(math.prod(d.shape[i] for i in side) for side in (d.inputs, d.outputs))
        short, long = sides
        matrices = math.ceil(math.prod(d.shape[i] for i in d.stack) / work.mesh.size)
        for product in (
            Product(matrices, short, long, short),
            Product(matrices, short, short, short),
            Product(matrices, short, short, long),
        ):
            moved = 4 * matrices * (product.m * product.k + product.k * product.n + product.m * product.n)
            yield Operation(f"optimizer/{path}", "optimizer", work.muon_iterations, product, moved, moved)
