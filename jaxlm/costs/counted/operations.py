"""Operations of a step: each matrix product with its sizes on one device, and the memory traffic around the products.

Products are those of `jaxlm.costs.jaxpr.count` to the last FLOP; memory traffic is a bracket. Its lower end is what no
schedule avoids: each product reads its operands and writes its result once, attention keeps its scores on the chip
(arXiv:2205.14135), and everything element by element is fused into a neighbour. At its upper end each chain of such
operations (a norm, an activation, a softmax) is a loop of its own, and scores go through memory. Kernels
(`execution.kernels = "auto"`) compute and move what they declare, at both ends, but that attention at the lower one
computes no more scores than are seen.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from jaxlm.costs.counted import attention, elementwise, kernel_costs
from jaxlm.costs.counted.attention import Seen
from jaxlm.costs.counted.device import DeviceStep
from jaxlm.costs.counted.kernel_costs import Elementwise
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.workload import Workload
from jaxlm.training.optimizer import cost
from jaxlm.training.optimizer_cost import OptimizerCost
from kernels_pallas.core.launch import KernelCost

# Operations that multiply by a parameter.
PRODUCTS = ("linear", "logits", "cross_entropy")

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
    `kernel` is one of kernels_pallas or a product in one: all of one scope together are what it declares. Of a product
    of attention's scores only those that are `seen` are asked for: a kernel skips the others."""

    scope: str
    phase: Phase
    times: int
    product: Product | None
    least_bytes: int
    most_bytes: int
    elementwise: int = 0
    kernel: bool = False
    seen: Seen | None = None

    @property
    def flops(self) -> int:
        return self.product.flops if self.product else 0

    @property
    def least_flops(self) -> float:
        """FLOPs that run at least."""
        return float(self.seen.causal) * self.flops if self.kernel and self.seen else self.flops


def step(work: Workload) -> list[Operation]:
    """Return all operations of a step on one device."""
    computed = _computed(work.representative())
    return [*computed, *_optimizer(work)] if work.kind == "train" else list(computed)


@functools.lru_cache(maxsize=1024)
def _computed(work: Workload) -> tuple[Operation, ...]:
    """Return the operations of forward and backward pass on one device."""
    device, each = DeviceStep(work), []
    again = run_again(device)
    for use in device.found.uses:
        products, parts = list(_products(device, use)), list(elementwise.parts(device, use))
        forward = [*products, *(_beside(part, "forward") for part in parts)]
        each += forward
        trains = device.trains(use)
        if work.remat != "none" and use.layer is not None:
            made = not again.isdisjoint(use.results)
            each += [op._replace(phase="rematerialised") for op in forward if _reruns(op, made) and (made or trains)]
        if not trains:
            continue
        each += _gradients(device, use, products)
        each += [_beside(part, "backward") for part in parts]
    return tuple(op._replace(times=op.times * work.microbatches) for op in each)


def _gradients(device: DeviceStep, use: RecordedOp, products: Sequence[Operation]) -> Iterator[Operation]:
    """Yield the products that give the gradients of the operands which depend on something that trains."""
    if products and products[0].kernel:
        # One kernel for the queries' gradient, one for the keys' and the values'. Both compute scores again, and the
        # gradient of the weights, which is the first of the mixture's.
        first, second = products
        made = [op._replace(phase="backward", product=product) for op in products for product in _transposed(op)]
        made += [op._replace(phase="rematerialised") for op in (first, first)]
        made.append(second._replace(phase="rematerialised", product=_transposed(second)[0]))
        yield from _kernel(attention.kernel(device, use).backward, *made)
        return
    # Attention always has all its gradients; a loss in chunks adds up both of its own.
    together = use.name == "attention" or (use.name == "cross_entropy" and kernel_costs.loss(device, use) is not None)
    asked = [together or operand in device.trained for operand in use.operands[:2]]
    for op in products:
        gradients = itertools.compress(_transposed(op), asked)
        yield from (op._replace(phase="backward", product=product) for product in gradients)


def _transposed(op: Operation) -> tuple[Product, Product]:
    """Return the gradients of both operands of a product."""
    batch, m, k, n = op.product
    return Product(batch, m, n, k), Product(batch, k, m, n)


def run_again(device: DeviceStep) -> set[int]:
    """Return the values that the backward pass makes again, from those that it reads."""
    work, found, again = device.work, device.found, set()
    if work.remat == "none" or not device.trained:
        return again
    kept = frozenset() if work.remat == "full" else frozenset(work.remat)
    for layer in range(len(found.layers)):
        uses = [use for use in found.by_layer[layer] if device.trains(use)]
        again |= found.run_again(layer, [value for use in uses for value in saved(device, use)], kept)
    return again


def saved(device: DeviceStep, use: RecordedOp) -> tuple[int, ...]:
    """Return the values that the backward pass of an operation reads."""
    match use.name:
        case "linear":
            return use.operands[:1] if use.operands[1] in device.trained else ()
        case "attention":
            return use.operands[:3] + (use.results if attention.kernel(device, use) else ())
        case "norm":
            return use.results[:1] if len(use.results) == 2 else use.operands[:1]
        case "activation" | "gated":
            return use.operands
        case "elementwise":
            return use.options["reads"]
        case _:
            return ()


def _reruns(op: Operation, made: bool) -> bool:
    """Return whether an operation of a layer runs again, whose result is `made` again or not.

    Of attention without a kernel the softmax's backward pass wants scores and mixture, whatever is kept. Loops of XLA
    are fused into what reads them.
    """
    return made or (not op.kernel and (op.product is None or op.seen is not None))


def _products(device: DeviceStep, use: RecordedOp) -> Iterator[Operation]:
    itemsize = device.work.itemsize
    if use.name in PRODUCTS:
        if use.name == "linear":
            inputs = len(device.operand(use, 0)) - 2
            matrix = device.operand(use, 1)
            tokens = math.prod(device.operand(use, 0)[:2])
            k, n, out = math.prod(matrix[:inputs]), math.prod(matrix[inputs:]), itemsize
        else:
            tokens, n = kernel_costs.logits(device, use)
            k, out = device.operand(use, 0)[-1], 4  # logits are float32
        if use.name == "cross_entropy" and (loss := kernel_costs.loss(device, use)):
            tokens, n = loss.chunks * loss.tokens, loss.labels  # the last chunk is padded, and so are the labels
        moved = itemsize * (tokens * k + k * n) + out * tokens * n
        path = device.found.parameter(use)
        yield Operation(path, "forward", use.times, Product(1, tokens, k, n), moved, moved)
    if use.name != "attention":
        return
    rows, T, S, K, G, H = attention.heads(device, use)
    scopes, seen = (f"{use.scope}/scores", f"{use.scope}/mixture"), attention.seen(use)
    kernel = attention.kernel(device, use)
    for queries, keys in attention.attended(device, use):
        products = Product(rows * K, G * queries, H, keys), Product(rows * K, G * queries, keys, H)
        made = [
            Operation(scope, "forward", use.times, product, 0, 0, seen=seen)
            for scope, product in zip(scopes, products, strict=True)
        ]
        if kernel:
            yield from _kernel(kernel.forward, *made)
            continue
        once, scores = itemsize * rows * (queries * G + keys) * K * H, rows * K * G * queries * keys
        for op, each in zip(made, (4, itemsize), strict=True):
            yield op._replace(least_bytes=once, most_bytes=once + each * scores)


def _kernel(declared: KernelCost, *products: Operation) -> Iterator[Operation]:
    """Yield the products of a kernel; what it declares besides them stands with the first."""
    rest, moved = declared.flops - sum(op.flops for op in products), declared.bytes
    for op in products:
        yield op._replace(least_bytes=moved, most_bytes=moved, elementwise=rest, kernel=True)
        rest = moved = 0


def _beside(part: Elementwise, phase: Phase) -> Operation:
    """Return the forward or backward operation. XLA's loops may be fused into a neighbour, a kernel is not."""
    each = part.backward if phase == "backward" else part.forward
    least = each.bytes if part.kernel else 0
    return Operation(part.scope, phase, part.times, None, least, each.bytes, each.flops, part.kernel)


# For each number that trains, of AdamW. Other kinds, whose updates take 0.4 (SGD) to 1.6 times as many (Muon, besides
# its products), are counted so too.
_OPTIMIZER_FLOPS = 28


def _optimizer(work: Workload) -> Iterator[Operation]:
    """Yield reads of gradient, parameter and state, writes of the last two, and products. What a group freezes has a
    state all the same."""
    stored = {path: work.stored(d.axes, d.shape) for path, d in work.trainable.items()}
    trained = sum(numbers for path, numbers in stored.items() if path not in work.frozen)
    moved = 4 * (3 * trained + (2 * sum(stored.values()) if work.average else 0)) + 2 * optimizer_bytes(work)
    yield Operation("optimizer", "optimizer", 1, None, moved, 2 * moved, trained * _OPTIMIZER_FLOPS)
    for path, (_, products, _) in updates(work).items():
        for times, *sizes in products:
            product = Product(*sizes)
            moved = 4 * product.batch * (product.m * product.k + product.k * product.n + product.m * product.n)
            yield Operation(f"optimizer/{path}", "optimizer", times, product, moved, moved)


def updates(work: Workload) -> dict[str, OptimizerCost]:
    """Return what the optimizer declares for each parameter that trains."""
    return {
        path: cost(work.optimizer, d, work.layout, work.rules)
        for path, d in work.trainable.items()
        if path not in work.frozen
    }


def optimizer_bytes(work: Workload) -> int:
    """Return the bytes of the optimizer's state on one device."""
    return 4 * sum(
        work.stored(tuple(d.axes[i] for i in kept), tuple(d.shape[i] for i in kept))
        for d in work.trainable.values()
        for kept in cost(work.optimizer, d, work.layout, work.rules).state
    )
