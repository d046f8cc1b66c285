"""Operations of a step, in closed form over the abstract tree: each matrix product with its sizes on one device, and
the memory traffic around the products.

Products are those of `jaxlm.costs.jaxpr.count` to the last FLOP; memory traffic is a bracket. Its lower end is what no
schedule avoids: each product reads its operands and writes its result once, attention keeps its scores on the chip
(arXiv:2205.14135), and everything element by element is fused into a neighbour. At its upper end each chain of such
operations (a norm, an activation, a softmax) is a loop of its own, and scores go through memory. Kernels
(`training.kernels = "auto"`) compute and move what they declare, at both ends, but that attention at the lower one
computes no more scores than are seen.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Literal, NamedTuple

from jaxlm.costs import paper
from jaxlm.costs.paper import Recording, Use
from jaxlm.costs.step import elementwise, kernel_costs
from jaxlm.costs.step.elementwise import Elementwise
from jaxlm.costs.step.parameters import parameters
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
    batch = work.rules.over("batch")
    # What is computed depends on the shards of a batch, and not on which axes make them: a search asks this often.
    alike = work.layout.replace(**dict.fromkeys(batch[1:], 1), **{batch[0]: work.batch_shards})
    computed = _computed(replace(work, layout=alike))
    return [*computed, *_optimizer(work)] if work.kind == "train" else list(computed)


@functools.lru_cache(maxsize=1024)
def _computed(work: Workload) -> tuple[Operation, ...]:
    """Return the operations of forward and backward pass on one device."""
    found, each = paper.record(work.model, work.kind, work.sequence, work.dropout), []
    trained = found.trained(work.frozen) if work.kind == "train" else frozenset()
    again = _run_again(work, found, trained)
    for use in found.uses:
        products, parts = list(_products(work, found, use)), list(elementwise.parts(work, use))
        forward = [*products, *(_beside(part, "forward") for part in parts)]
        each += forward
        if trained.isdisjoint(use.results):
            continue
        if work.remat != "none" and use.loop is not None:
            made = not again.isdisjoint(use.results)
            each += [op._replace(phase="rematerialised") for op in forward if _reruns(op, made)]
        each += _gradients(work, use, products, trained)
        each += [_beside(part, "backward") for part in parts]
    return tuple(op._replace(times=op.times * work.microbatches) for op in each)


def _gradients(work: Workload, use: Use, products: Sequence[Operation], trained: Set[int]) -> Iterator[Operation]:
    """Yield the products that give the gradients of the operands which depend on something that trains."""
    if products and products[0].kernel:
        # One kernel for the queries' gradient, one for the keys' and the values'. Both compute scores again, and the
        # gradient of the weights, which is the first of the mixture's.
        first, second = products
        made = [(op.scope, "backward", product) for op in products for product in _transposed(op.product)]
        again = (SCORES, first.product), (SCORES, first.product), (MIXTURE, _transposed(second.product)[0])
        made += [(scope, "rematerialised", product) for scope, product in again]
        yield from _kernel(first.times, kernel_costs.attention(work).backward, first.least, *made)
        return
    # Attention always has all its gradients; a loss in chunks adds up both of its own.
    together = use.name == "attention" or (use.name == "cross_entropy" and kernel_costs.loss(work) is not None)
    asked = [together or operand in trained for operand in use.operands[:2]]
    for op in products:
        gradients = itertools.compress(_transposed(op.product), asked)
        yield from (op._replace(phase="backward", product=product) for product in gradients)


def _transposed(product: Product) -> tuple[Product, Product]:
    """Return the gradients of both operands of a product."""
    batch, m, k, n = product
    return Product(batch, m, n, k), Product(batch, k, m, n)


def _run_again(work: Workload, found: Recording, trained: Set[int]) -> set[int]:
    """Return the values that the backward pass of a layer makes again, from those that it reads."""
    if work.remat == "none" or not trained:
        return set()
    kept = frozenset() if work.remat == "full" else frozenset(work.remat)
    again: set[int] = set()
    for loop in range(len(found.loops)):
        wanted = [
            value
            for use in found.uses
            if use.loop == loop and not trained.isdisjoint(use.results)
            for value in _saved(work, use, trained)
        ]
        again |= found.run_again(loop, wanted, kept)
    return again


def _saved(work: Workload, use: Use, trained: Set[int]) -> tuple[int, ...]:
    """Return the values that the backward pass of an operation reads."""
    match use.name:
        case "linear":
            return use.operands[:1] if use.operands[1] in trained else ()
        case "attention":
            return use.operands[:3] + (use.results if kernel_costs.attention(work) else ())
        case "rms_norm" | "layer_norm":
            return use.results[:1] if len(use.results) == 2 else use.operands[:1]
        case "activation" | "gated_activation":
            return use.operands
        case _:
            return ()


def _reruns(op: Operation, made: bool) -> bool:
    """Return whether an operation of a layer runs again, whose result is `made` again or not.

    Of attention without a kernel the softmax's backward pass wants scores and mixture, whatever is kept. Loops of XLA
    are fused into what reads them.
    """
    return made or (not op.kernel and (op.product is None or op.scope in (SCORES, MIXTURE)))


def _products(work: Workload, found: Recording, use: Use) -> Iterator[Operation]:
    itemsize = work.itemsize
    if use.name in ("linear", "logits", "cross_entropy"):
        path, d = found.parameters[use.operands[1]], parameters(work.model)[found.parameters[use.operands[1]]]
        k, n = (math.prod(work.local(d.axes[i], d.shape[i]) for i in side) for side in (d.inputs, d.outputs))
        if d.axes[0] == "vocab":  # tied: it unembeds
            k, n = n, k
        tokens = work.rows() * use.shapes[0][1]
        if use.name == "cross_entropy" and (loss := kernel_costs.loss(work)):
            tokens, n = loss.chunks * loss.tokens, loss.labels  # the last chunk is filled up, and so are the labels
        out = itemsize if use.name == "linear" else 4  # logits are float32
        moved = itemsize * (tokens * k + k * n) + out * tokens * n
        yield Operation(path, "forward", use.times, Product(1, tokens, k, n), moved, moved)
    if use.name != "attention":
        return
    rows, (K, G), H = work.rows(), work.head_groups(), use.shapes[0][-1]
    kernel = kernel_costs.attention(work, use.shapes[1][1])
    for queries, keys in work.attended(use.shapes[1][1]):
        first = Product(rows * K, G * queries, H, keys)
        second = Product(rows * K, G * queries, keys, H)
        if kernel:
            made = (SCORES, "forward", first), (MIXTURE, "forward", second)
            yield from _kernel(use.times, kernel.forward, float(work.seen(causally=True)), *made)
            continue
        once, scores = itemsize * rows * (queries * G + keys) * K * H, rows * K * G * queries * keys
        yield Operation(SCORES, "forward", use.times, first, once, once + 4 * scores)
        yield Operation(MIXTURE, "forward", use.times, second, once, once + itemsize * scores)


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
        return sum(work.stored(tuple(d.axes[i] for i in side), tuple(d.shape[i] for i in side)) for side in sides)
    return _MOMENTS[work.optimizer.kind] * whole
