"""Collectives of a step: those that XLA's partitioner places for the sharding rules (`jaxlm.parallel.rules`)."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.costs.counted.device import DeviceStep, device_step
from jaxlm.costs.counted.operations import run_again, updates
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.workload import Workload
from jaxlm.models.doors.cost import Statistics
from jaxlm.models.logical_axes import GATHERED, RESIDUAL
from jaxlm.parallel.rules import together


class Collective(NamedTuple):
    """A collective that a step runs `times` times over mesh axes. `bytes` is the whole of it on one device: what an
    all-gather gives, what a reduce-scatter or an all-reduce takes."""

    kind: str
    axes: tuple[str, ...]
    times: int
    bytes: int
    of: str


def collectives(work: Workload) -> list[Collective]:
    """Return all collectives of a step, except over axes of size 1; in inference those of all steps of the engine."""
    if work.kind != "train" and work.step is None:
        return [each for step in work.steps_of_engine() for each in collectives(step)]
    step = device_step(work)
    found = [*_parameters(step), *_stream(step), *_statistics(step)]
    if work.kind == "train":
        found += [*_copies(step), *_adapters(step), *_sums(work), *_optimizer(work)]
    return [c for c in found if work.layout.over(c.axes) > 1 and c.times * c.bytes]


def _parameters(device: DeviceStep) -> Iterator[Collective]:
    """Over the axes that shard parameters where they are stored alone (`fsdp`), a layer's matrices are gathered
    together for its forward and again for its backward pass of each microbatch. Their gradients are summed over those
    that shard the batch, each device keeping its part; over axes of the batch that shard other parameters, and not
    this one, they are summed whole, as those of vectors are.

    A table is gathered once, since forward and backward pass of the unembedding follow each other, and summed for each
    of its uses. What is looked up is the same for all microbatches: XLA gathers it before their loop. Not so where each
    replica has a loop of its own: there JAX 0.10's gathers it in each microbatch, a tied one for each of its
    three uses, and matrices that the backward pass computes with again in post-norm layers once more.
    """
    work, found, train = device.work, device.recording, device.work.kind == "train"
    each, summed = work.passes, work.several(work.rules.summed_each_microbatch)

    def scattered(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in summed)

    tables: dict[str, list[RecordedOp]] = defaultdict(list)
    for use in found.by_layer[None]:
        if device.gathered_over(use):
            tables[found.parameter(use)].append(use)
    for path, uses in tables.items():
        once, whole = any(not device.cost(use).products for use in uses), device.weight_bytes(uses[0])
        axes, trains = device.gathered_over(uses[0]), train and path not in work.frozen
        yield Collective("all-gather", axes, 1 if once else each, whole, path)
        yield Collective("reduce-scatter", scattered(axes), each * trains * len(uses), whole, path)
    for layer in range(len(found.layers)):
        groups: dict[tuple[str, ...], list[RecordedOp]] = defaultdict(list)
        for use in found.by_layer[layer]:
            if device.gathered_over(use):
                groups[device.gathered_over(use)].append(use)
        for axes, products in groups.items():
            passes = 2 if any(map(device.trains, products)) else 1
            trained = [use for use in products if train and found.parameter(use) not in work.frozen]
            times = each * products[0].times
            gathered, gradients = (sum(map(device.weight_bytes, uses)) for uses in (products, trained))
            yield Collective("all-gather", axes, times * passes, gathered, "layers")
            yield Collective("reduce-scatter", scattered(axes), times, gradients, "layers")
    # Gradients of vectors are added up in float32.
    whole: dict[tuple[str, tuple[str, ...]], int] = {}
    for use in found.uses if train else ():
        for i, value in enumerate(use.operands):
            path = found.parameters.get(value)
            if path is None or path in work.frozen:
                continue
            stored_over = {name for axis in use.marker.operands[i] for name in work.rules.over(axis)}
            left = tuple(name for name in summed if name not in stored_over)
            product = device.cost(use).weight_product
            is_matrix = product is not None and product.weight == i
            array = device.local(use).operands[i].bytes * (1 if is_matrix else 4 // work.itemsize)
            parts = work.layout.over(name for name in summed if name in stored_over)
            whole[path, left] = use.times * array // parts
    vectors: Counter[tuple[str, ...]] = Counter()
    for (_, left), size in whole.items():
        vectors[left] += size
    for left, size in vectors.items():
        yield Collective("all-reduce", left, each, size, "vectors")


def _adapters(device: DeviceStep) -> Iterator[Collective]:
    """Over the axes that shard a layer, sums of gradients that no gathered residual sums, as those of adapters: that of
    what a product reads, where devices have parts of the result, and that of its matrix, where each has rows of its
    own."""
    work, uses = device.work, device.recording.uses
    relayed = {use.results[0] for use in uses if device.cost(use).relays}
    for use in uses:
        product = device.cost(use).weight_product
        if product is None or use.operands[0] in relayed or not device.trains(use):
            continue
        times, rows = work.microbatches * use.times, together(device.placed(use, 0))
        stored = work.placed(use.marker.operands[product.weight], use.shapes[product.weight])
        outputs = tuple(axis for axis in together(stored) if axis not in rows)  # each device has parts of others
        if outputs:
            yield Collective("all-reduce", outputs, times, device.local(use).operands[0].bytes, "adapters")
        elif rows := together(device.placed(use, 0)[1:2]):
            yield Collective("all-reduce", rows, times, device.weight_bytes(use), "adapters")


def _copies(device: DeviceStep) -> Iterator[Collective]:
    """Over the axes of the query heads, gradients of key/value heads of which several devices have copies: each device
    holds the matrices of all heads. Where one has one head, it adds its gradient to those of the same, and gathers the
    others; else the gradients of all copies are gathered. The sum is counted as if the devices with the same were all
    of the axis."""
    work, found = device.work, device.recording
    for uses in found.by_layer.values():
        shared = [use for use in uses if device.copied_heads(use)]
        groups: Counter[tuple[int, tuple[str, ...]]] = Counter()
        for use in shared:
            key = device.copied_heads(use), together(work.placed(("act_heads",), (use.num_query_heads,)))
            for i, value in enumerate(use.operands[1:], 1):
                if found.parameters[value] not in work.frozen:
                    groups[key] += work.itemsize * work.stored(use.marker.operands[i], use.shapes[i])
        for (kv_heads, axes), held in groups.items():
            shards = work.layout.over(axes)
            one, times = held // kv_heads, work.microbatches * shared[0].times
            if shards % kv_heads:
                copies = math.lcm(kv_heads, shards)
                yield Collective("all-gather", axes, times, one * copies, "copies")
            else:
                yield Collective("all-reduce", axes, times, one, "copies")
                yield Collective("all-gather", axes, times, one * kv_heads * (kv_heads > 1), "copies")


def _sums(work: Workload) -> Iterator[Collective]:
    """Over the axes whose devices have copies of the model, gradients are summed once per step."""
    leaves = work.parameters.items()
    stored = sum(work.stored(d.axes, d.shape) for path, d in leaves if path not in work.frozen)
    wide = 4 if work.microbatches > 1 else work.itemsize
    yield Collective("all-reduce", work.several(work.rules.replicas), 1, wide * stored, "gradients")


def _optimizer(work: Workload) -> Iterator[Collective]:
    """Yield what the optimizer declares, of all parameters together."""
    moved: Counter[tuple[str, str, int]] = Counter()
    for _, _, moves in updates(work).values():
        for kind, axis, times, numbers in moves:
            moved[kind, axis, times] += 4 * numbers
    for (kind, axis, times), held in moved.items():
        yield Collective(kind, (axis,), times, held, "optimizer")


def _stream(device: DeviceStep) -> Iterator[Collective]:
    """Over the axes that shard a layer (`tensor`), the stream is gathered before attention and feed-forward and summed
    after them, each device keeping its part of the sequence (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2),
    or all of it where the sequence does not divide; the backward pass transposes one into the other, as far as it goes.
    A loss in kernels sums its gradient whole. Of few logits, which kernels leave to XLA, it is counted like the others,
    as TPUs do it; GPUs sum it whole, in float32."""
    work, again = device.work, run_again(device)
    counts: Counter[tuple[str, tuple[str, ...], int, str]] = Counter()
    uses = device.recording.uses
    whole_sums = {use.operands[0] for use in uses if device.cost(use).sums_gradients}
    for use in uses:
        times, cost = work.passes * use.times, device.cost(use)
        for each in cost.statistics:
            if not each.every_pass:
                counts["all-reduce", _shared_over(device, use, each), each.bytes, each.of] += times * each.times
        summed = device.contracted_over(use)
        if not cost.relays and not summed:
            continue
        whole = work.itemsize * math.prod(work.shape(GATHERED, use.result_shapes[0]))
        # The axes over which devices have parts of the stream that are gathered.
        parts, all_of_it = (together(work.placed(axes, use.result_shapes[0])) for axes in (RESIDUAL, GATHERED))
        parted = tuple(axis for axis in parts if axis not in all_of_it)

        def sums(axes: tuple[str, ...], scatters: bool, n: int, whole: int = whole, parted: tuple = parted) -> None:
            """Count a sum over these axes, of which each device keeps its part."""
            kept = tuple(axis for axis in axes if scatters and axis in parted)
            left = tuple(axis for axis in axes if axis not in kept)
            counts["reduce-scatter", kept, whole, "stream"] += n
            counts["all-reduce", left, whole // work.layout.over(kept), "stream"] += n

        reruns = use.layer is not None and not again.isdisjoint(use.results)
        forward, trains = times * (1 + reruns), device.trains(use)
        if cost.relays:
            counts["all-gather", parted, whole, "stream"] += forward
            if trains:
                sums(_read_over(device, use.results[0]), use.results[0] not in whole_sums, times)
        else:
            sums(summed, True, forward)
            counts["all-gather", parted, whole, "stream"] += times * trains
    for (kind, axes, size, of), times in counts.items():
        yield Collective(kind, axes, times, size, of)


def _statistics(device: DeviceStep) -> Iterator[Collective]:
    """Statistics that a door sums over the devices which share its operand, in every pass. Those of a layer are sent
    together, as of its queries and keys."""
    again = run_again(device)
    for uses in device.recording.by_layer.values():
        declared = [(use, each) for use in uses for each in device.cost(use).statistics if each.every_pass]
        shared = [(use, each, axes) for use, each in declared if (axes := _shared_over(device, use, each))]
        for use, first, axes in shared[:1]:
            passes = 1 + (not again.isdisjoint(use.results)) + device.trains(use)
            times = device.work.passes * use.times * passes * first.times
            yield Collective("all-reduce", axes, times, sum(each.bytes for _, each, _ in shared), first.of)


def _shared_over(device: DeviceStep, use: RecordedOp, statistics: Statistics) -> tuple[str, ...]:
    """Return the mesh axes over which statistics are summed."""
    placement = device.placed(use, statistics.operand)
    return together(tuple(placement[i] for i in statistics.dimensions))


def _read_over(device: DeviceStep, value: int) -> tuple[str, ...]:
    """Return the mesh axes that shard the outputs of the products which read a residual: its gradient is summed over
    them."""
    axes: list[str] = []
    for use in device.recording.uses:
        product = device.cost(use).weight_product
        if product is not None and use.operands[0] == value:
            contracted = device.contracted_over(use)
            axes += [axis for axis in together(device.placed(use, product.weight)) if axis not in contracted]
    return device.work.several(axes)
