"""What a step computes, in closed form over the abstract tree: each matrix product with its sizes on one device, and
what is read and written around them.

Products are those of `jaxlm.costs.count` to the last FLOP; memory traffic is a bracket. Its lower end is what no
schedule avoids: each product reads its operands and writes its result once, attention keeps its scores on the chip
(arXiv:2205.14135), and everything element by element is fused into a neighbour. At its upper end each chain of such
operations (a norm, an activation, a softmax) is a loop of its own, and scores go through memory.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
    """One operation on one device, which a step runs `times` times. FLOPs are those of its product, or else
    `elementwise` ones; `least_bytes` and `most_bytes` are the bracket of what it moves to and from memory each time."""

    scope: str
    phase: Phase
    times: int
    product: Product | None
    least_bytes: int
    most_bytes: int
    elementwise: int = 0

    @property
    def flops(self) -> int:
        return self.product.flops if self.product else 0


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
    products, around = list(_products(work)), list(_around(work))
    forward = products + [part.operation("forward", work.width_bytes) for part in around]
    if work.kind != "train":
        return forward
    again = [replace(op, phase="rematerialised") for op in forward if _runs_again(work, op.scope)]
    backward = [transposed for op in products for transposed in _transposed(op)]
    backward += [part.operation("backward", work.width_bytes) for part in around]
    each = [replace(op, times=op.times * work.microbatches) for op in (*forward, *again, *backward)]
    return [*each, *_optimizer(work)]


def _products(work: Workload) -> Iterator[Operation]:
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
    once = width * (query + cached)
    first = Product(rows * K, group * queries, H, keys)
    second = Product(rows * K, group * queries, keys, H)
    yield Operation(SCORES, "forward", L, first, once, once + 4 * scores)
    yield Operation(MIXTURE, "forward", L, second, once, once + width * scores)


class Pass(NamedTuple):
    """What one loop does with each number of an array: FLOPs, and how often it reads or writes one, in `float32` and in
    the dtype that the step computes in (`narrow`)."""

    flops: float
    float32: float
    narrow: float


# Forward and backward. FLOPs are what jaxlm.costs.count finds in this project's configurations, to a fifth.
_SOFTMAX = Pass(5.5, 3, 1), Pass(4, 4, 2)
_NORMS = {"rms": (Pass(5.3, 0, 3), Pass(9.5, 0, 6)), "layer": (Pass(8.1, 0, 3), Pass(13.4, 0, 6))}
_RESIDUAL = Pass(1, 0, 3), Pass(1, 0, 3)
_LOSS = Pass(5, 2, 0), Pass(2, 2, 0)
_GATED = Pass(5, 0, 3), Pass(6.3, 0, 5)
_TANH = Pass(12.2, 0, 2), Pass(12.2, 0, 3)
_PLAIN = Pass(8, 0, 2), Pass(7, 0, 3)
_MOVED = Pass(0, 0, 2), Pass(0, 0, 2)
_BESIDE = Pass(0, 0, 2), Pass(0, 0, 2)  # their FLOPs are in those of the softmax and the activation
_LOOKUP = Pass(0, 0, 2), Pass(1, 0, 3)
_OPTIMIZER_FLOPS = 28
# Numbers of optimizer state per number of a parameter.
_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}


def _activation(model: ModelConfig) -> tuple[Pass, Pass]:
    if model.feed_forward.gated:
        return _GATED
    return _TANH if model.feed_forward.activation == "gelu_tanh" else _PLAIN


class Around(NamedTuple):
    """What happens to `numbers` numbers around the products, `times` times a step."""

    scope: str
    times: int
    numbers: int
    forward: Pass
    backward: Pass

    def operation(self, phase: Phase, width: int) -> Operation:
        """Its forward or backward pass, in a dtype of so many bytes."""
        each = self.backward if phase == "backward" else self.forward
        moved = round(self.numbers * (4 * each.float32 + width * each.narrow))
        return Operation(self.scope, phase, self.times, None, 0, moved, round(self.numbers * each.flops))


def _around(work: Workload) -> Iterator[Around]:
    model, rows, queries = work.model, work.rows(), work.queries
    tokens, L = rows * queries, model.layers
    stream = rows * work.local("stream", queries) * model.width
    scores = tokens * work.sequence * work.local("act_heads", model.attention.heads)
    hidden = tokens * work.local("act_ff", model.feed_forward.hidden)
    yield Around("layers/attention/softmax", L, scores, *_SOFTMAX)
    yield Around("layers/norms", 2 * L, stream, *_NORMS[model.norm.kind])
    for path, d in parameters(model).items():
        if not d.inputs and path.endswith("_bias"):
            added = math.prod(work.local(d.axes[i], d.shape[i]) for i in d.outputs)
            yield Around(path, L, tokens * added, *_BESIDE)
    attention, H = model.attention, model.attention.head_width
    N, K = work.local("act_heads", attention.heads), work.local("act_kv_heads", attention.kv_heads)
    turned = (N + K) * H * ((model.position.kind == "rotary") + attention.qk_norm)
    yield Around("layers/attention/positions", L, tokens * turned, *_BESIDE)
    # Heads move in front of the sequence and back.
    yield Around("layers/attention/heads", L, 2 * rows * (queries * N + work.sequence * K) * H, *_MOVED)
    yield Around("layers/residual", 2 * L, stream, *_RESIDUAL)
    yield Around("layers/feed_forward/activation", L, hidden, *_activation(model))
    yield Around("embedding/lookup", 1, tokens * model.width, *_LOOKUP)
    if work.kind == "train":
        yield Around("loss", 1, tokens * work.local("act_vocab", model.vocabulary), *_LOSS)


SCORES, MIXTURE = "layers/attention/scores", "layers/attention/mixture"


def _transposed(op: Operation) -> Iterator[Operation]:
    """The gradients of both operands of a product."""
    batch, m, k, n = op.product
    for product in (Product(batch, m, n, k), Product(batch, k, m, n)):
        yield replace(op, phase="backward", product=product)


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
    part, _, name = scope.removeprefix("layers/").rpartition("/")
    if part == "feed_forward" and name == "down":
        return False
    normalised = part == "attention" and name in ("query", "key") and work.model.attention.qk_norm
    return name not in kept or normalised


def _optimizer(work: Workload) -> Iterator[Operation]:
    """Reads of gradient, parameter and state, writes of the last two; with Muon the products of its iterations."""
    stored = {path: work.stored(d.axes, d.shape) for path, d in parameters(work.model).items()}
    state = sum(state_numbers(work, d) for d in parameters(work.model).values())
    total = sum(stored.values())
    moved = 4 * (3 * total + 2 * state + (2 * total if work.average else 0))
    yield Operation("optimizer", "optimizer", 1, None, moved, 2 * moved, total * _OPTIMIZER_FLOPS)
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


def state_numbers(work: Workload, d: tree.Dimensions) -> int:
    """Float32 numbers of optimizer state that one device holds for a parameter."""
    whole = work.stored(d.axes, d.shape)
    if work.optimizer == "muon":
        return whole if d.projection else 2 * whole
    if work.optimizer == "adafactor":
        if not d.inputs:
            return whole
        # One number per row and one per column, replicated: its state has another shape than the parameter.
        stack = math.prod(d.shape[i] for i in d.stack)
        return stack * sum(math.prod(d.shape[i] for i in side) for side in (d.inputs, d.outputs))
    return _MOMENTS[work.optimizer] * whole
