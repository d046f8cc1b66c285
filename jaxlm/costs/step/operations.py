"""Operations of a step, in closed form over the abstract tree: each matrix product with its sizes on one device, and
the memory traffic around the products.

Products are those of `jaxlm.costs.jaxpr.count` to the last FLOP; memory traffic is a bracket. Its lower end is what no
schedule avoids: each product reads its operands and writes its result once, attention keeps its scores on the chip
(arXiv:2205.14135), and everything element by element is fused into a neighbour. At its upper end each chain of such
operations (a norm, an activation, a softmax) is a loop of its own, and scores go through memory. Kernels
(`training.kernels = "auto"`) compute and move what they declare, at both ends, but that attention at the lower one
computes no more scores than are seen.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from jaxlm.costs.step import elementwise, kernel_costs
from jaxlm.costs.step.elementwise import LAST_NORM, Elementwise
from jaxlm.costs.step.parameters import ModelPart, goes_back_to, multiplies, parameters
from jaxlm.costs.workload import Workload
from jaxlm.models import tree
from kernels_pallas.core.launch import KernelCost

SCORES, MIXTURE = "layers/attention/scores", "layers/attention/mixture"

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


class Operation(NamedTuple):
    """One operation on one device, which a step runs `times` times. FLOPs are those of its product, beside
    `elementwise` ones; `least_bytes` and `most_bytes` are the bracket of what it moves to and from memory each time. A
    `kernel` is one of kernels_pallas or a product in one: all of one scope together are what it declares. Of its FLOPs
    at least the share `least` runs: a kernel for attention declares all scores, and skips what nobody sees."""

    scope: str
    phase: Phase
    times: int
    product: Product | None
    least_bytes: int
    most_bytes: int
    elementwise: int = 0
    kernel: bool = False
    least: float = 1.0

    @property
    def flops(self) -> int:
        return self.product.flops if self.product else 0

    @property
    def least_flops(self) -> float:
        return self.least * self.flops


def step(work: Workload) -> list[Operation]:
    """Return all operations of a step on one device."""
    instead = kernel_costs.instead_of(work)
    beside = [*(part for part in elementwise.loops(work) if part.scope not in instead), *kernel_costs.elementwise(work)]
    products = list(_products(work))
    forward = products + [_beside(part, "forward") for part in beside]
    if work.kind != "train":
        return forward
    again = [op for op in products if _runs_again(work, op.scope)]
    again += [_beside(part, "forward") for part in beside if _runs_again(work, part.scope, part.makes)]
    again = [op._replace(phase="rematerialised") for op in again]
    backward = [gradient for op in products for gradient in _gradients(work, op)]
    backward += [_beside(part, "backward") for part in beside if _goes_back(work, part.scope)]
    each = [op._replace(times=op.times * work.microbatches) for op in (*forward, *again, *backward)]
    return [*each, *_optimizer(work)]


def _products(work: Workload) -> Iterator[Operation]:
    model, itemsize = work.model, work.itemsize
    rows, queries = work.rows(), work.queries
    for path, d in parameters(model).items():
        if not multiplies(model, path, d):
            continue
        k, n = (math.prod(work.local(d.axes[i], d.shape[i]) for i in side) for side in (d.inputs, d.outputs))
        if path == "embedding":  # tied: it unembeds
            k, n = n, k
        tokens = rows * queries
        if d.table and work.kind == "prefill":
            tokens = rows  # only the last token of each prompt is unembedded
        if d.table and (loss := kernel_costs.loss(work)):
            tokens, n = loss.chunks * loss.tokens, loss.labels  # the last chunk is filled up, and so are the labels
        times = math.prod(d.shape[i] for i in d.stack)
        out = 4 if d.table else itemsize  # logits are float32
        moved = itemsize * (tokens * k + k * n) + out * tokens * n
        yield Operation(path, "forward", times, Product(1, tokens, k, n), moved, moved)

    (K, G), L, H = work.head_groups(), model.num_layers, model.attention.head_dim
    kernel = kernel_costs.attention(work)
    for queries, keys in work.attended():
        first = Product(rows * K, G * queries, H, keys)
        second = Product(rows * K, G * queries, keys, H)
        if kernel:
            made = (SCORES, "forward", first), (MIXTURE, "forward", second)
            yield from _kernel(L, kernel.forward, float(work.seen(causally=True)), *made)
            continue
        once, scores = itemsize * rows * (queries * G + keys) * K * H, rows * K * G * queries * keys
        yield Operation(SCORES, "forward", L, first, once, once + 4 * scores)
        yield Operation(MIXTURE, "forward", L, second, once, once + itemsize * scores)


def _kernel(
    times: int, declared: KernelCost, least: float, *products: tuple[str, Phase, Product]
) -> Iterator[Operation]:
    """The products of a kernel, of which it runs at least this share; what it declares besides them stands with the
    first."""
    rest, moved = declared.flops - sum(product.flops for _, _, product in products), declared.bytes
    for scope, phase, product in products:
        yield Operation(scope, phase, times, product, moved, moved, rest, kernel=True, least=least)
        rest = moved = 0


def _beside(part: Elementwise, phase: Phase) -> Operation:
    """Return the forward or backward operation. XLA's loops may be fused into a neighbour, a kernel is not."""
    each = part.backward if phase == "backward" else part.forward
    least = each.bytes if part.kernel else 0
    return Operation(part.scope, phase, part.times, None, least, each.bytes, each.flops, part.kernel)


def _goes_back(work: Workload, scope: str) -> bool:
    """Return whether gradients pass through a scope, to something that trains in it or before it."""
    first = goes_back_to(work.model, work.frozen)
    if scope.startswith("layers/"):
        return first <= ModelPart.LAYERS
    if scope.startswith("embedding/"):
        return first <= ModelPart.LOOK_UP
    return first <= (ModelPart.FINAL_NORM if scope == "final_norm" else ModelPart.UNEMBEDDING)


def _gradients(work: Workload, op: Operation) -> Iterator[Operation]:
    """The gradients of both operands of a product, but for those that nothing which trains asks for. A loss in chunks
    adds up both."""
    if not _goes_back(work, op.scope):
        return
    batch, m, k, n = op.product
    first, second = Product(batch, m, n, k), Product(batch, k, m, n)
    if not op.kernel:
        inside = op.scope.startswith("layers/")
        together = not inside and kernel_costs.loss(work) is not None
        if together or inside or _goes_back(work, "final_norm"):
            yield op._replace(phase="backward", product=first)
        if together or op.scope not in work.frozen:
            yield op._replace(phase="backward", product=second)
    elif op.scope == SCORES:
        # One kernel for the queries' gradient, one for the keys' and the values'. Both compute scores again, and the
        # gradient of the weights, which is the first of the mixture's.
        made = ((scope, "backward", product) for scope in (SCORES, MIXTURE) for product in (first, second))
        again = (SCORES, op.product), (SCORES, op.product), (MIXTURE, first)
        again = ((scope, "rematerialised", product) for scope, product in again)
        yield from _kernel(op.times, kernel_costs.attention(work).backward, op.least, *made, *again)


def _runs_again(work: Workload, scope: str, makes: str = "") -> bool:
    """Return whether the backward pass recomputes an operation of the forward pass, which may make a saved result.

    With rematerialisation a layer runs again, but for what its backward pass does not read: the last product, whose
    result is only added to the stream where no norm is behind it, and products whose result is kept. A query or key
    that is normalised is kept behind its norm, whose backward pass wants what was before. Softmax's backward pass wants
    scores and mixture, whatever is kept; a kernel's wants the result, which is kept with its log-sum-exp. A kernel for
    the layer's last norm runs no more: nothing reads its result again.
    """
    kept = work.remat
    if kept == "none" or not scope.startswith("layers/") or not _goes_back(work, scope):
        return False
    kept = () if kept == "full" else kept
    if scope == LAST_NORM:
        return False
    if scope in (SCORES, MIXTURE) and kernel_costs.attention(work):
        makes = "attention"
    if makes:
        return makes not in kept
    part, _, name = scope.removeprefix("layers/").rpartition("/")
    if part == "feed_forward" and name == "down":
        return work.model.post_norms
    normalised = part == "attention" and name in ("query", "key") and work.model.attention.qk_norm
    return name not in kept or normalised


# For each number that trains, of AdamW. Other kinds, whose updates take 0.4 (SGD) to 1.6 times as many (Muon, besides
# its products), are counted so too.
_OPTIMIZER_FLOPS = 28
# Numbers of optimizer state per number of a parameter; Adafactor's of a vector.
_MOMENTS = {"adamw": 2, "adafactor": 1, "lion": 1, "sgd": 1}


def _optimizer(work: Workload) -> Iterator[Operation]:
    """Reads of gradient, parameter and state, writes of the last two; with Muon the products of its iterations. What is
    frozen has a state all the same."""
    stored = {path: work.stored(d.axes, d.shape) for path, d in parameters(work.model).items()}
    state = sum(state_numbers(work, d) for d in parameters(work.model).values())
    trained = sum(numbers for path, numbers in stored.items() if path not in work.frozen)
    moved = 4 * (3 * trained + 2 * state + (2 * sum(stored.values()) if work.average else 0))
    yield Operation("optimizer", "optimizer", 1, None, moved, 2 * moved, trained * _OPTIMIZER_FLOPS)
    if work.optimizer.kind != "muon":
        return
    for path, d in parameters(work.model).items():
        if not d.projection or path in work.frozen:
            continue
        sides = sorted(math.prod(d.shape[i] for i in side) for side in (d.inputs, d.outputs))
        short, long = sides
        matrices = math.ceil(math.prod(d.shape[i] for i in d.stack) / work.layout.size)
        for product in (
            Product(matrices, short, long, short),
            Product(matrices, short, short, short),
            Product(matrices, short, short, long),
        ):
            moved = 4 * matrices * (product.m * product.k + product.k * product.n + product.m * product.n)
            yield Operation(f"optimizer/{path}", "optimizer", work.optimizer.iterations, product, moved, moved)


def state_numbers(work: Workload, d: tree.Dimensions) -> int:
    """Float32 numbers of optimizer state that one device holds for a parameter."""
    whole = work.stored(d.axes, d.shape)
    if work.optimizer.kind == "muon":
        return whole if d.projection else 2 * whole
    if work.optimizer.kind == "adafactor" and d.inputs:  # one number per row and one per column of each layer's matrix
        sides = (d.stack + d.inputs, d.stack + d.outputs)
        return sum(work.stored([d.axes[i] for i in side], [d.shape[i] for i in side]) for side in sides)
    return _MOMENTS[work.optimizer.kind] * whole
