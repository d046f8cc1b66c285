"""Collectives of a step: those that XLA's partitioner places for the sharding rules (`jaxlm.parallel.rules`)."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.costs.counted.device import DeviceStep, device_step
from jaxlm.costs.counted.kernel_costs import logits, loss
from jaxlm.costs.counted.operations import PRODUCTS, run_again, updates
from jaxlm.costs.counted.paper import Use
from jaxlm.costs.workload import Workload
from jaxlm.models.logical_axes import GATHERED, RESIDUAL
from jaxlm.models.parameters import RANK


class Collective(NamedTuple):
    """A collective that a step runs `times` times over mesh axes. `bytes` is the whole of it on one device: what an
    all-gather gives, what a reduce-scatter or an all-reduce takes."""

    kind: str
    axes: tuple[str, ...]
    times: int
    bytes: int
    of: str


def collectives(work: Workload) -> list[Collective]:
    """Return all collectives of a step, except over axes of size 1."""
    step = device_step(work)
    found = [*_parameters(step), *_stream(step), *_norms(step)]
    if work.kind == "train":
        found += [*_copies(step), *_adapters(step), *_sums(work), *_optimizer(work)]
    return [c for c in found if work.layout.over(c.axes) > 1 and c.times * c.bytes]


def _parameters(device: DeviceStep) -> Iterator[Collective]:
    """Over `fsdp`, a layer's matrices are gathered together for its forward and again for its backward pass of each
    microbatch, and their gradients are summed, each device keeping its part; those of vectors, and of matrices that
    `fsdp` does not shard, are summed whole.

    A table is gathered once, since forward and backward pass of the unembedding follow each other, and summed for each
    of its uses. What is looked up is the same for all microbatches: XLA gathers it before their loop. Not so where each
    part of `data` has a loop of its own: there JAX 0.10's gathers it in each microbatch, a tied one for each of its
    three uses, and matrices that the backward pass computes with again in post-norm layers once more.
    """
    work, found, fsdp, train = device.work, device.found, ("fsdp",), device.work.kind == "train"
    each = work.microbatches

    tables: dict[str, list[Use]] = defaultdict(list)
    for use in found.by_layer[None]:
        if use.name in ("look_up", *PRODUCTS) and device.is_gathered(use):
            tables[found.parameter(use)].append(use)
    for path, uses in tables.items():
        once, whole = any(use.name == "look_up" for use in uses), work.itemsize * device.matrix(uses[0])
        trains = train and path not in work.frozen
        yield Collective("all-gather", fsdp, 1 if once else each, whole, path)
        yield Collective("reduce-scatter", fsdp, each * trains * len(uses), whole, path)
    for layer in range(len(found.layers)):
        products = [use for use in found.by_layer[layer] if use.name == "linear" and device.is_gathered(use)]
        passes = 2 if any(map(device.trains, products)) else 1
        trained = [use for use in products if train and found.parameter(use) not in work.frozen]
        times = each * products[0].times if products else 0
        yield Collective(
            "all-gather", fsdp, times * passes, work.itemsize * sum(map(device.matrix, products)), "layers"
        )
        yield Collective("reduce-scatter", fsdp, times, work.itemsize * sum(map(device.matrix, trained)), "layers")
    # Gradients of vectors are added up in float32.
    whole = {
        path: use.times * math.prod(device.operand(use, i)) * (work.itemsize if (use.name, i) == ("linear", 1) else 4)
        for use in found.uses
        for i, value in enumerate(use.operands)
        if (path := found.parameters.get(value)) and fsdp not in map(work.rules.over, use.marker.operands[i])
        if train and path not in work.frozen
    }
    yield Collective("all-reduce", fsdp, each, sum(whole.values()), "vectors")


def _adapters(device: DeviceStep) -> Iterator[Collective]:
    """Over `tensor`, sums for adapters: the gradient of x·A where devices have parts of what B makes of it, and that of
    B where each makes its part of a stream."""
    work, tensor = device.work, ("tensor",)
    for use in device.found.uses:
        if use.name != "linear" or use.marker.operands[1][0] != RANK or not device.trains(use):
            continue
        times = work.microbatches * use.times
        if device.shards(use.marker.operands[1], use.shapes[1], "tensor") > 1:
            yield Collective("all-reduce", tensor, times, work.itemsize * math.prod(device.operand(use, 0)), "adapters")
        elif device.shards(use.marker.operands[0][1:2], use.shapes[0][1:2], "tensor") > 1:
            yield Collective("all-reduce", tensor, times, work.itemsize * device.matrix(use), "adapters")


def _copies(device: DeviceStep) -> Iterator[Collective]:
    """Over `tensor`, gradients of key/value heads of which several devices have copies: each device holds the matrices
    of all heads. Where one has one head, it adds its gradient to those of the same, and gathers the others; else the
    gradients of all copies are gathered. The sum is counted as if the devices with the same were all of the axis."""
    work, found = device.work, device.found
    for uses in found.by_layer.values():
        shared = [use for use in uses if device.copied_heads(use)]
        groups: Counter[tuple[int, int]] = Counter()
        for use in shared:
            key = device.copied_heads(use), work.parts("tensor", "act_heads", use.readers)
            for i, value in enumerate(use.operands[1:], 1):
                if found.parameters[value] not in work.frozen:
                    groups[key] += work.itemsize * work.stored(use.marker.operands[i], use.shapes[i])
        for (kv_heads, tensor), held in groups.items():
            one, times = held // kv_heads, work.microbatches * shared[0].times
            if tensor % kv_heads:
                copies = math.lcm(kv_heads, tensor)
                yield Collective("all-gather", ("tensor",), times, one * copies, "copies")
            else:
                yield Collective("all-reduce", ("tensor",), times, one, "copies")
                yield Collective("all-gather", ("tensor",), times, one * kv_heads * (kv_heads > 1), "copies")


def _sums(work: Workload) -> Iterator[Collective]:
    """Over `data`, gradients are summed once per step."""
    leaves = work.parameters.items()
    stored = sum(work.stored(d.axes, d.shape) for path, d in leaves if path not in work.frozen)
    wide = 4 if work.microbatches > 1 else work.itemsize
    yield Collective("all-reduce", ("data",), 1, wide * stored, "gradients")


def _optimizer(work: Workload) -> Iterator[Collective]:
    """Yield what the optimizer declares, of all parameters together."""
    moved: Counter[tuple[str, str, int]] = Counter()
    for _, _, moves in updates(work).values():
        for kind, axis, times, numbers in moves:
            moved[kind, axis, times] += 4 * numbers
    for (kind, axis, times), held in moved.items():
        yield Collective(kind, (axis,), times, held, "optimizer")


def _stream(device: DeviceStep) -> Iterator[Collective]:
    """Over `tensor`, the stream is gathered before attention and feed-forward and summed after them, each device
    keeping its part of the sequence (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2), or all of it where the
    sequence does not divide; the backward pass transposes one into the other, as far as it goes. A loss in kernels sums
    its gradient whole. Of few logits, which kernels leave to XLA, it is counted like the others, as TPUs do it; GPUs
    sum it whole, in float32."""
    work, tensor, again = device.work, ("tensor",), run_again(device)
    counts: Counter[tuple[str, int, str]] = Counter()
    whole_sums = {use.operands[0] for use in device.found.uses if use.name == "cross_entropy" and loss(device, use)}
    for use in device.found.uses:
        times = work.microbatches * use.times
        if use.name == "cross_entropy":
            # The maximum of each token's logits; then, sent together, their sum and the one at its target.
            tokens, _ = logits(device, use)
            counts["all-reduce", 4 * tokens, "loss"] += times
            counts["all-reduce", 2 * 4 * tokens, "loss"] += times
        gathers, sums = use.name == "gather", _is_summed(device, use)
        if not gathers and not sums:
            continue
        whole = work.itemsize * math.prod(work.shape(GATHERED, use.made[0]))
        parted = whole > work.itemsize * math.prod(work.shape(RESIDUAL, use.made[0]))
        gather, total = "all-gather" if parted else "", "reduce-scatter" if parted else "all-reduce"
        reruns = use.layer is not None and not again.isdisjoint(use.results)
        counts[gather if gathers else total, whole, "stream"] += times * (1 + reruns)
        if device.trains(use):
            back = "all-reduce" if use.results[0] in whole_sums else total
            counts[back if gathers else gather, whole, "stream"] += times
    for (kind, size, of), times in counts.items():
        if kind:
            yield Collective(kind, tensor, times, size, of)


# Sums over the channels of each token that a norm asks for, in either direction.
_STATISTICS = {"rms_norm": 1, "layer_norm": 2}


def _norms(device: DeviceStep) -> Iterator[Collective]:
    """Over `tensor`, norms of all heads together sum the statistics of each token, in float32. Those of the queries and
    keys of a layer are sent together."""
    again = run_again(device)
    for uses in device.found.by_layer.values():
        shared = [use for use in uses if use.name == "norm" and device.shares_norm(use)]
        for use in shared[:1]:
            passes = 1 + (not again.isdisjoint(use.results)) + device.trains(use)
            times = device.work.microbatches * use.times * passes * _STATISTICS[use.options["operation"]]
            bytes_ = sum(4 * math.prod(device.operand(each, 0)[:2]) for each in shared)
            yield Collective("all-reduce", ("tensor",), times, bytes_, "norms")


def _is_summed(device: DeviceStep, use: Use) -> bool:
    """Return whether an operation contracts a dimension that `tensor` shards."""
    if use.name == "look_up":
        return device.work.parts("tensor", use.marker.operands[0][0], use.shapes[0][0]) > 1
    if use.name != "linear":
        return False
    inputs = len(use.shapes[0]) - 2
    return device.shards(use.marker.operands[1][:inputs], use.shapes[1][:inputs], "tensor") > 1
