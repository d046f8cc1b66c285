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
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.costs import local_shapes
from jaxlm.costs.counted import drawing, parameters
from jaxlm.costs.counted.device import DeviceStep, device_step
from jaxlm.costs.counted.layer_stacks import stack_copies
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.counted.traced import traced_work
from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.memoized import memoized, memoized_in
from jaxlm.costs.workload import Workload
from jaxlm.models.config import ModelConfig
from jaxlm.models.doors.cost import DoorCost, DoorProduct, Pass, PassKind, Product, Traced, VisibleFraction
from jaxlm.models.execution_config import Remat
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Rules
from jaxlm.training.config import OptimizerConfig
from jaxlm.training.optimizer import costs
from jaxlm.training.optimizer_cost import OptimizerCost
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.grouped_matmul.visits import TileRows

Phase = Literal["forward", "backward", "rematerialised", "optimizer"]
OperationKind = PassKind | Literal["copy", "draw", "weights"]


class KernelPass(NamedTuple):
    """The forward or backward pass of a kernel. `name`: of its implementation; empty if it computes no product."""

    name: str
    direction: Literal["forward", "backward"]


class RowGroups(NamedTuple):
    """The groups of rows of a product and of its gradients, the rows of all groups together, and those that its tiles
    compute."""

    count: int
    rows: int
    tiles: TileRows | None

    def each(self, product: Product) -> Product:
        """Return the products of the groups, `batch` of them, of as many rows each; where rows are few, of those that
        have any."""
        count = min(self.count, self.rows)
        batch, *sizes = product
        at = sizes.index(self.rows)
        sizes[at] = -(-self.rows // count)
        return Product(batch * count, *sizes)


class Operation(NamedTuple):
    """One operation on one device, which a step runs `times` times.

    `flops` are those of its product; `elementwise` are its other FLOPs. `least_bytes` and `most_bytes` bracket what one
    run moves to and from memory. `kernel`: a kernel of kernels_pallas, or a product in one; all operations of a scope
    together are what the kernel declares. `visible`: the fraction of attention's scores that masks leave; a kernel
    skips the others. `kind`: of a pass; `copy` into or out of the stacks of a loop, `draw` of a token,
    `weights`: a kernel's product with a matrix of parameters. `groups`: of rows with a matrix each, if it is such a
    product. `dtype`: in which a product multiplies; None: that of the step.
    """

    scope: str
    phase: Phase
    times: int
    product: Product | None
    least_bytes: int
    most_bytes: int
    elementwise: int = 0
    kernel: KernelPass | None = None
    visible: VisibleFraction | None = None
    kind: OperationKind = "pass"
    groups: "RowGroups | None" = None
    dtype: str | None = None

    @property
    def flops(self) -> int:
        return self.product.flops if self.product else 0

    @property
    def least_flops(self) -> float:
        """The lower bound of the FLOPs: a kernel skips scores that are not visible."""
        return float(self.visible.causal) * self.flops if self.kernel and self.visible else self.flops

    def in_phase(self, phase: Phase, product: Product | None = None) -> "Operation":
        """Return the operation in another phase, with this product if one is given; `_replace` takes longer."""
        _, _, times, own, *rest = self
        return Operation(self.scope, phase, times, product or own, *rest)


def step(work: Workload) -> list[Operation]:
    """Return all operations of a step on one device; in inference those of all steps of the engine."""
    if work.kind == "train":
        return [*without_copies(work), *_stacks(device_step(work.representative()))]
    return without_copies(work)


def without_copies(work: Workload) -> list[Operation]:
    """Return the operations of a `step` except the copies of loops over layers, which have no FLOPs."""
    if work.local_sgd is not None:
        return without_copies(work.of_one_replica())
    if work.kind == "train":
        return [*_computed(work.representative()), *_optimizer(work.without_sizes())]
    return [op for each in work.by_step_shape() for op in (*_computed(each.representative()), *_draws(each))]


def _draws(work: Workload) -> Iterator[Operation]:
    """Yield the draws after the engine's steps."""
    here, whole = drawing.logits_bytes(work)
    least = here if here == whole else here + 2 * whole  # gathered logits are written and read
    for times, each in drawing.draws(work):
        yield Operation("draw", "forward", times, None, least, max(least, each.bytes), each.flops, kind="draw")


@functools.lru_cache(maxsize=2048)
def _computed(work: Workload) -> tuple[Operation, ...]:
    """Return the operations of forward and backward pass on one device."""
    device, operations = device_step(work), []
    again = run_again(device)
    for use in device.recording.uses:
        times = 1 if device.cost(use).counts_all_steps else device.runs(use)
        of_use = _of_use(device, use, again)
        operations += of_use if times == 1 else [op._replace(times=op.times * times) for op in of_use]
    return tuple(operations)


def _stacks(device: DeviceStep) -> Iterator[Operation]:
    """Yield the copies of loops over layers into and out of their stacks."""
    filled, into, out_of = stack_copies(device)
    for scope, phase, moved in (
        ("stacks/fill", "forward", filled),
        ("stacks/in", "forward", into),
        ("stacks/out", "backward", out_of),
    ):
        if moved:
            yield Operation(scope, phase, device.work.stage_passes, None, moved, moved, kind="copy")


def _of_use(device: DeviceStep, use: RecordedOp, again: Set[int]) -> Iterator[Operation]:
    """Yield the operations of one use of a door in the forward and backward pass. `again`: the values that the backward
    pass recomputes."""
    cost, trains = device.cost(use), device.trains(use)
    products, parts = _products(device, use, cost), list(passes(device, use))
    traced = [op for each in cost.traced for op in _traced(use, each)]
    products_forward = [*products, *(op for op in traced if op.phase == "forward")]
    forward = [*products_forward, *(_beside(use, part, "forward") for part in parts)]
    yield from forward
    if runs := runs_again_on_stage(device, use):
        again_on_stage = (op._replace(times=op.times * runs // use.times) for op in forward)
        yield from (op.in_phase("rematerialised") for op in again_on_stage)
    if device.work.remat != "none" and use.layer is not None:
        reruns = not again.isdisjoint(use.results)
        yield from (op.in_phase("rematerialised") for op in forward if _reruns(op, reruns) and (reruns or trains))
    if trains:
        yield from (*_gradients(device, use, cost, products), *(op for op in traced if op.phase != "forward"))
        yield from (_beside(use, part, "backward") for part in parts)


def _gradients(
    device: DeviceStep, use: RecordedOp, cost: DoorCost, products: Sequence[Operation]
) -> Iterator[Operation]:
    """Yield the products that give the gradients of the operands which depend on something that trains."""
    if cost.kernel is not None:
        backward = [
            op.in_phase("backward", product)
            for op, computed in zip(products, cost.kernel.gradients, strict=True)
            for product in itertools.compress(op.product.gradients(), computed)
        ]
        backward += [_operation(device, use, each).in_phase("rematerialised") for each in cost.kernel.again]
        yield from _in_kernel(cost.kernel.costs.backward, backward, KernelPass(cost.kernel.name, "backward"))
        return
    for op, declared in zip(products, cost.products, strict=True):
        operands = use.operands[0], use.operands[1 if declared.weight is None else declared.weight]
        computed = declared.gradients or [operand in device.trained for operand in operands]
        gradients = itertools.compress(op.product.gradients(), computed)
        yield from (op.in_phase("backward", product) for product in gradients)
        if declared.again:
            yield op.in_phase("rematerialised")


def _traced(use: RecordedOp, traced: Traced) -> Iterator[Operation]:
    """Yield the operations of a traced function in each phase: its products, then its other traffic and FLOPs."""
    work = traced_work(traced.function, traced.operands, traced.trained, traced.checkpointed)
    for phase, each in work.items():
        for product, times in each.products:
            yield Operation(use.scope, phase, use.times * traced.times * times, product, 0, 0)
        rest, most = traced.times * each.flops, max(traced.bytes, traced.times * each.bytes)
        most += traced.copied if phase == "forward" else 0
        if each.products or rest:
            yield Operation(use.scope, phase, use.times, None, traced.bytes, most, rest)


def run_again(device: DeviceStep) -> frozenset[int]:
    """Return the values that the backward pass recomputes."""
    return _run_again(device, device.work.remat)


@memoized_in("answers_of_rows")
def _run_again(device: DeviceStep, remat: Remat) -> frozenset[int]:
    recording, again = device.recording, frozenset()
    if remat == "none" or not device.trained:
        return again
    kept = _kept(remat)
    for layer in range(len(recording.layers)):
        uses = [use for use in recording.by_layer[layer] if device.trains(use)]
        again |= recording.run_again(layer, [value for use in uses for value in device.saved(use)], kept)
    return again


def _kept(remat: Remat) -> frozenset[str]:
    """Return the names of the activations that rematerialisation keeps; not for "none", which keeps all."""
    return frozenset() if remat == "full" else frozenset(remat)


def runs_again_on_stage(device: DeviceStep, use: RecordedOp) -> int:
    """Return how many of its `times` runs the forward pass of a door has once more before its backward pass, because a
    stage keeps its input alone until then; none without a pipeline."""
    if device.work.stages == 1 or use.layer is None:
        return 0
    return use.times - (use.results[0] in _unread_again(device))


@memoized
def _unread_again(device: DeviceStep) -> frozenset[int]:
    """Return the first results, in the last layer of a chunk, that its second forward pass does not compute: nothing
    reads them. It makes what the backward pass keeps, and what the layer gives besides the residual. In a loop over
    layers each computes what the next one reads; a chunk of one layer is no loop."""
    work, recording, last = device.work, device.recording, max(device.of_stages)
    if work.execution.in_loop and work.stage_layers.slots > 1:
        return frozenset()
    uses = recording.by_layer[last]
    if work.remat == "none":
        wanted = [value for use in uses if device.trains(use) for value in device.saved(use)]
    else:
        kept = _kept(work.remat)
        wanted = [value for use in uses for value in use.results if recording.names.get(value) in kept]
    read = recording.run_again(last, [*wanted, *recording.beside[last]], frozenset())
    return frozenset(use.results[0] for use in uses if read.isdisjoint(use.results))


def _reruns(op: Operation, reruns: bool) -> bool:
    """Return whether an operation of a layer runs again. `reruns`: whether its result is recomputed.

    Values inside of a door, such as scores, are recomputed for the backward pass under every policy. XLA fuses its
    loops into the operations that read their results.
    """
    return reruns or (not op.kernel and (op.product is None or op.visible is not None))


def _products(device: DeviceStep, use: RecordedOp, cost: DoorCost) -> list[Operation]:
    """Return the products of a door in the forward pass."""
    products = [_operation(device, use, each) for each in cost.products]
    if cost.kernel is None:
        return products
    return list(_in_kernel(cost.kernel.costs.forward, products, KernelPass(cost.kernel.name, "forward")))


def _operation(device: DeviceStep, use: RecordedOp, declared: DoorProduct) -> Operation:
    scope = _scope(use, declared.scope) if declared.weight is None else device.recording.parameter(use)
    least, most = declared.bytes, declared.bytes + declared.unfused
    times = use.times * declared.times
    groups = None if declared.groups is None else RowGroups(declared.groups, declared.product.m, declared.tiles)
    kind: OperationKind = "pass" if declared.weight is None or device.cost(use).kernel is None else "weights"
    of = declared.product, least, most, 0, None, declared.visible, kind, groups, declared.dtype
    return Operation(scope, "forward", times, *of)


def _in_kernel(declared: KernelCost, products: Sequence[Operation], kernel: KernelPass) -> Iterator[Operation]:
    """Yield the products of a kernel. The first has the kernel's bytes and its FLOPs outside of products."""
    rest, moved = declared.flops - sum(op.flops for op in products), declared.bytes
    for op in products:
        yield op._replace(least_bytes=moved, most_bytes=moved, elementwise=rest, kernel=kernel)
        rest = moved = 0


def passes(device: DeviceStep, use: RecordedOp) -> Iterator[Pass]:
    """Yield the element-wise passes of a door, except those outside of layers that XLA fuses into a neighbour."""
    for each in device.cost(use).passes:
        if each.fused_once and use.layer is None:
            continue
        if each.counted is None:
            yield each
        else:
            function, shapes, times = each.counted
            once, gradient = _flops_of_call(function, shapes)
            forward = each.forward._replace(flops=each.forward.flops + once * times)
            backward = each.backward._replace(flops=each.backward.flops + gradient * times)
            yield each._replace(forward=forward, backward=backward)


@functools.lru_cache(maxsize=256)
def _flops_of_call(function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
    """Return the FLOPs of a function of float32 arrays, and those of its derivative."""

    def both(*x: jax.Array) -> tuple:
        y, pull_back = jax.vjp(function, *x)
        return y, pull_back(y)

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    once = count(function, *arrays).flops
    return once, count(both, *arrays).flops - once


def _beside(use: RecordedOp, part: Pass, phase: Literal["forward", "backward"]) -> Operation:
    """Return the forward or backward operation of a pass. XLA may fuse its own loops, but no kernel."""
    each = part.backward if phase == "backward" else part.forward
    least, times = each.bytes if part.kernel else 0, use.times * part.times
    kernel = KernelPass("", phase) if part.kernel else None
    return Operation(
        _scope(use, part.scope), phase, times, None, least, each.bytes, each.flops, kernel, None, part.kind
    )


def _scope(use: RecordedOp, name: str) -> str:
    return f"{use.scope}/{name}".strip("/")


# AdamW's FLOPs for each element that trains. Other optimizers, whose updates take 0.4 times (SGD) to 1.6 times (Muon,
# without its products) this number, are counted the same.
_OPTIMIZER_FLOPS = 28


@functools.lru_cache(maxsize=256)
def _optimizer(work: Workload) -> tuple[Operation, ...]:
    """Return the optimizer's operations: reads of gradients by their norm and by the update, reads of parameters and
    state, writes of both and of the parameters' working copy, and products. Frozen parameters of a group have optimizer
    state too."""
    return tuple(_optimizer_operations(work))


def _optimizer_operations(work: Workload) -> Iterator[Operation]:
    stored = {path: local_shapes.stored(work, d.axes, d.shape) for path, d in work.trainable.items()}
    trained = sum(numbers for path, numbers in stored.items() if path not in work.frozen)
    gradient = 4 if work.accumulates else work.itemsize
    working = work.itemsize if work.dtype != "float32" else 0
    moved = trained * (2 * gradient + 2 * 4 + working) + 2 * optimizer_bytes(work)
    if work.average:
        moved += 2 * 4 * sum(stored.values())
    yield Operation("optimizer", "optimizer", 1, None, moved, 2 * moved, trained * _OPTIMIZER_FLOPS)
    for path, declared in updates(work).items():
        for times, *sizes in declared.products:
            product = Product(*sizes)
            moved = 4 * product.batch * (product.m * product.k + product.k * product.n + product.m * product.n)
            yield Operation(f"optimizer/{path}", "optimizer", times, product, moved, moved)


def updates(work: Workload) -> dict[str, OptimizerCost]:
    """Return what the optimizer declares for each parameter that trains."""
    return {path: each for path, each in _declared(work).items() if path not in work.frozen}


def optimizer_bytes(work: Workload) -> int:
    """Return the bytes of the optimizer's state on one device; the batch does not matter."""
    return _state_bytes(work.model, work.lora, work.quantized, work.optimizer, work.layout, work.rules)


def _declared(work: Workload) -> dict[str, OptimizerCost]:
    """Return what the optimizer declares for each parameter; the batch does not matter."""
    return _of_optimizer(work.model, work.lora, work.quantized, work.optimizer, work.layout, work.rules)


@functools.lru_cache(maxsize=256)
def _state_bytes(
    model: ModelConfig,
    lora: LoraConfig | None,
    quantized: Quantization | None,
    optimizer: OptimizerConfig,
    layout: Layout,
    rules: Rules,
) -> int:
    dimensions, total = parameters.parameters(model, lora, quantized), 0
    for path, each in _of_optimizer(model, lora, quantized, optimizer, layout, rules).items():
        axes, shape = dimensions[path].axes, dimensions[path].shape
        total += each.whole_bytes
        for kept, size in each.state:
            total += size * rules.stored([axes[i] for i in kept], [shape[i] for i in kept], layout)
    return total


@functools.lru_cache(maxsize=256)
def _of_optimizer(
    model: ModelConfig,
    lora: LoraConfig | None,
    quantized: Quantization | None,
    optimizer: OptimizerConfig,
    layout: Layout,
    rules: Rules,
) -> dict[str, OptimizerCost]:
    base = frozenset() if lora is None else parameters.base(model, lora, quantized)
    trained = {path: d for path, d in parameters.parameters(model, lora, quantized).items() if path not in base}
    return costs(optimizer, trained, layout, rules)
