"""Collectives of a step: those that XLA's partitioner places for the sharding rules (`jaxlm.parallel.rules`)."""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from jaxlm.costs import local_shapes
from jaxlm.costs.counted import cache, drawing
from jaxlm.costs.counted.between_stages import between_stages
from jaxlm.costs.counted.collective import Collective
from jaxlm.costs.counted.device import DeviceStep, device_step
from jaxlm.costs.counted.operations import run_again, runs_again_on_stage, updates
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.workload import Workload
from jaxlm.models.doors.cost import Statistics
from jaxlm.parallel.rules import together

OUTER = "outer step"  # that of the sum of parameters over replicas of local SGD
PAGES = "pages"  # what layers keep of the rows of prompts
DRAWS = "draws"  # the kind of array of collectives before and after a draw


def collectives(work: Workload) -> list[Collective]:
    """Return all collectives of a step, except over axes of size 1; in inference those of all steps of the engine."""
    if work.layout.size == 1:
        return []
    if work.local_sgd is not None:
        return [*collectives(work.of_one_replica()), *_outer_step(work)]
    if work.kind != "train" and work.engine_steps is None:
        return [each for restricted in work.by_step_shape() for each in collectives(restricted)]
    return [*_collectives(work)]


@functools.lru_cache(maxsize=2048)
def _collectives(work: Workload) -> tuple[Collective, ...]:
    device = device_step(work)
    placed = [*_parameters(device), *_residual(device), *_operands(device), *_statistics(device)]
    if work.kind != "train":
        placed += [*_rows_of_prompts(work), *_draws(work)]
    else:
        placed += [*_copies(device), *_adapters(device), *_sums(work), *_optimizer(work)]
        placed += between_stages(work) if work.stages > 1 else ()
    return tuple(c for c in placed if work.layout.over(c.axes) > 1 and c.times * c.bytes)


def _draws(work: Workload) -> Iterator[Collective]:
    """Yield the gathering of the logits before each draw, and of what is drawn on all shards after it."""
    over = together(local_shapes.placed(work, ("act_vocab",), (work.model.vocab_size,)))
    yield Collective("all-gather", over, work.passes, drawing.logits_bytes(work)[1], DRAWS)
    shards = work.several(work.rules.over("batch"))
    yield Collective("all-gather", shards, work.passes, drawing.drawn_bytes(work), DRAWS)


def _rows_of_prompts(work: Workload) -> Iterator[Collective]:
    """Yield what devices that share out the rows of prompts send one another: what each layer keeps of the rows, for
    the pages that all have, and the rows after which tokens are drawn."""
    over, shape = work.several(work.rules.over("tiles")), work.engine_steps.shape
    if over:
        cache.page_layout(work).check_shared(work.layout, work.rules)
    if not over or not shape.tiles:
        return
    for layers, kept in cache.entry_bytes(work):
        yield Collective("all-gather", over, work.passes * layers, shape.tiles * shape.tile * kept, PAGES)
    yield Collective("all-reduce", over, work.passes, 4 * work.draws() * work.model.d_model, DRAWS)


def _parameters(device: DeviceStep) -> Iterator[Collective]:
    """Yield the gathering of parameters and the sums of their gradients in each microbatch.

    Over the axes that shard parameters in storage alone (`fsdp`), a layer's matrices are gathered together for the
    layer's forward pass, and again for its backward pass; those of stages once before all ticks, if so asked. Gradients
    of matrices are reduce-scattered over those of these axes that shard the batch. Over an axis that shards the batch
    and other parameters, but not this one, a gradient is all-reduced, as the gradients of vectors are.

    An unembedding table is gathered once for both passes, since they follow each other; the gradient of a table is
    summed for each use of the table. An embedding table is the same for all microbatches: XLA gathers it
    before their loop. Where each replica has a loop of its own, this is not so: JAX 0.10's XLA then gathers the
    embedding table in each microbatch, a tied table for each of its three uses, and in post-norm layers the matrices
    of recomputed products once more.
    """
    work, recording, train = device.work, device.recording, device.work.kind == "train"
    summed = work.several(work.rules.summed_each_microbatch)

    def scattered(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in summed)

    tables: dict[str, list[RecordedOp]] = defaultdict(list)
    for use in recording.by_layer[None]:
        if device.gathered_over(use):
            tables[recording.parameter(use)].append(use)
    for path, uses in tables.items():
        once, whole = any(not device.cost(use).products for use in uses), device.weight_bytes(uses[0])
        axes, trains = device.gathered_over(uses[0]), train and path not in work.frozen
        # A table that is looked up is needed first, and its gradient comes last.
        gathers, sums = 1 if once else device.runs(uses[0]), trains * sum(map(device.runs, uses))
        yield Collective("all-gather", axes, gathers, whole, path, "forward", gathers * once)
        yield Collective("reduce-scatter", scattered(axes), sums, whole, path, "backward", sums * once, True)
    for layer in range(len(recording.layers)):
        groups: dict[tuple[str, ...], list[RecordedOp]] = defaultdict(list)
        for use in recording.by_layer[layer]:
            if device.gathered_over(use):
                groups[device.gathered_over(use)].append(use)
        for axes, products in groups.items():
            backward = any(map(device.trains, products))
            trained = [use for use in products if train and recording.parameter(use) not in work.frozen]
            each = device.runs(products[0])
            times = each * products[0].times
            gathered, gradients = (sum(map(device.weight_bytes, uses)) for uses in (products, trained))
            # The matrices of a layer are gathered while its neighbour computes; those of the first layer are waited
            # for, and so are the last gradients. In a loop an iteration begins when the one before it has ended: then
            # the matrices that each layer reads first are waited for.
            first = each * (layer == 0)
            part = _first_read(device, products) if work.execution.in_loop else 0.0
            waits = first + part * (times - first)
            if device.is_gathered_before(products[0]):
                chunks = work.rounds if layer in device.of_stages else 1
                size = chunks * products[0].times * gathered
                yield Collective("all-gather", axes, 1, size, "layers", "forward", 1)
            else:
                runs = {gathered: products[0].times}  # by bytes
                for count, size in _gathered_again(device, products).items():
                    runs[size] = runs.get(size, 0) + count
                for size, count in runs.items():
                    waited = waits * count / products[0].times
                    yield Collective("all-gather", axes, each * count, size, "layers", "forward", waited)
                yield Collective("all-gather", axes, times * backward, gathered, "layers", "backward", part * times)
            yield Collective("reduce-scatter", scattered(axes), times, gradients, "layers", "backward", waits, True)
    # Gradients of vectors are accumulated in float32.
    # Bytes, and how often; layers of several kinds may share a stack.
    whole: dict[tuple[str, tuple[str, ...], int | None], tuple[int, int]] = {}
    for use in recording.uses if train else ():
        for i, value in enumerate(use.operands):
            path = recording.parameters.get(value)
            if path is None or path in work.frozen:
                continue
            stored_over = {name for axis in use.marker.operands[i] for name in work.rules.over(axis)}
            left = tuple(name for name in summed if name not in stored_over)
            product = device.cost(use).weight_product
            is_matrix = product is not None and product.weight == i
            array = device.local(use).operands[i].bytes * (1 if is_matrix else 4 // work.itemsize)
            parts = work.layout.over(name for name in summed if name in stored_over)
            whole[path, left, use.layer] = use.times * array // parts, device.runs(use)
    vectors: Counter[tuple[tuple[str, ...], int]] = Counter()
    for (_, left, _), (size, runs) in whole.items():
        vectors[left, runs] += size
    for (left, runs), size in vectors.items():
        yield Collective("all-reduce", left, runs, size, "vectors", "backward")


def _gathered_again(device: DeviceStep, products: Sequence[RecordedOp]) -> Counter[int]:
    """Return the bytes of the matrices that a layer gathers for its second forward pass on a stage, by its runs."""
    again: Counter[int] = Counter()
    for use in products if device.work.stages > 1 else ():
        again[runs_again_on_stage(device, use)] += device.weight_bytes(use)
    return again


def _first_read(device: DeviceStep, products: Sequence[RecordedOp]) -> float:
    """Return the share of a layer's matrices, by bytes, that its first products read: those of one operand."""
    operand = products[0].operands[0]
    sizes = [(use.operands[0] == operand, device.weight_bytes(use)) for use in products]
    return sum(size for is_first, size in sizes if is_first) / sum(size for _, size in sizes)


def _adapters(device: DeviceStep) -> Iterator[Collective]:
    """Yield sums of gradients, over the axes that shard a layer, for products that read no gathered residual, such as
    those of adapters. The gradient of a product's operand is summed where devices have parts of the result; the
    gradient of its matrix is summed where each device has rows of its own.
    """
    work, uses, rules = device.work, device.recording.uses, device.work.rules
    summed = (*rules.summed_each_microbatch, *rules.replicas)
    relayed = {use.results[0] for use in uses if device.cost(use).relays or device.cost(use).hands_on}
    for use in uses:
        product = device.cost(use).weight_product
        if product is None or use.operands[0] in relayed or not device.trains(use):
            continue
        times, rows = device.runs(use) * use.times, together(device.placed(use, 0))
        stored = local_shapes.placed(work, use.marker.operands[product.weight], use.shapes[product.weight])
        outputs = tuple(axis for axis in together(stored) if axis not in rows)  # devices have parts of the result
        if outputs:
            yield Collective("all-reduce", outputs, times, device.local(use).operands[0].bytes, "adapters")
        elif left := tuple(axis for axis in together(device.placed(use, 0)[1:2]) if axis not in summed):
            yield Collective("all-reduce", left, times, device.weight_bytes(use), "adapters")


def _copies(device: DeviceStep) -> Iterator[Collective]:
    """Yield the collectives, over the axes of the query heads, of gradients of key/value heads that several devices
    compute.

    Each device has the matrices of all key/value heads. If each device computes one head, the gradients of a head's
    copies are summed, then the gradients of all heads are gathered; otherwise the gradients of all copies are gathered.
    The sum is counted as if it ran over the whole axis.
    """
    work, recording = device.work, device.recording
    for uses in recording.by_layer.values():
        shared = [use for use in uses if device.copied_heads(use)]
        groups: Counter[tuple[int, tuple[str, ...]]] = Counter()
        for use in shared:
            key = device.copied_heads(use), together(local_shapes.placed(work, ("act_heads",), (use.num_query_heads,)))
            for i, value in enumerate(use.operands[1:], 1):
                if recording.parameters[value] not in work.frozen:
                    groups[key] += work.itemsize * local_shapes.stored(work, use.marker.operands[i], use.shapes[i])
        for (kv_heads, axes), gradient_bytes in groups.items():
            shards = work.layout.over(axes)
            one, times = gradient_bytes // kv_heads, device.runs(shared[0]) * shared[0].times
            if shards % kv_heads:
                copies = math.lcm(kv_heads, shards)
                yield Collective("all-gather", axes, times, one * copies, "copies", "backward")
            else:
                yield Collective("all-reduce", axes, times, one, "copies", "backward")
                yield Collective("all-gather", axes, times, one * kv_heads * (kv_heads > 1), "copies", "backward")


def _sums(work: Workload) -> Iterator[Collective]:
    """Yield the sum of gradients, once per step, over the axes whose devices have copies of the model.

    Gradients of layers in a loop, and those that microbatches add up, are there when the loop has ended: nothing is
    left to compute behind their sum.
    """
    leaves = work.parameters.items()
    stored = sum(local_shapes.stored(work, d.axes, d.shape) for path, d in leaves if path not in work.frozen)
    wide = 4 if work.accumulates else work.itemsize
    waits = int(work.accumulates or work.execution.scan_layers is not False)
    over = work.several(work.rules.replicas)
    yield Collective("all-reduce", over, 1, wide * stored, "gradients", "backward", waits, wide < 4)


def _outer_step(work: Workload) -> Iterator[Collective]:
    """Yield the sum of the parameters of all replicas of local SGD, once in each period. All that follows waits."""
    leaves = work.parameters.items()
    stored = sum(local_shapes.stored(work, d.axes, d.shape) for path, d in leaves if path not in work.frozen)
    over = work.several(work.rules.replicas)
    yield Collective("all-reduce", over, 1 / work.local_sgd.period, 4 * stored, OUTER)


def _optimizer(work: Workload) -> Iterator[Collective]:
    """Yield the collectives that the optimizer declares, those of all parameters together."""
    sent_bytes: Counter[tuple[str, str, int]] = Counter()
    for moves in (each.moves for each in updates(work).values()):
        for kind, axis, times, numbers in moves:
            sent_bytes[kind, axis, times] += 4 * numbers
    for (kind, axis, times), total in sent_bytes.items():
        yield Collective(kind, (axis,), times, total, "optimizer")


def _residual(device: DeviceStep) -> Iterator[Collective]:
    """Yield the collectives of the residual over the axes that shard a layer (`tensor`).

    The residual is all-gathered before attention and feed-forward and reduce-scattered over the sequence after them
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2), or all-reduced where the axes do not divide the
    sequence; the backward pass transposes each collective into the other, as far as gradients go. A loss in kernels
    all-reduces the gradient of the residual. A loss of few logits, which kernels leave to XLA, is counted like the
    other doors, as TPUs run it; GPUs all-reduce that gradient in float32.
    """
    work, again = device.work, run_again(device)
    # Also by whether it runs behind the products that give the gradients of matrices; nothing waits for a sum then.
    counts: Counter[tuple[str, tuple[str, ...], int, str, bool]] = Counter()
    uses = device.recording.uses
    whole_sums = {use.operands[0] for use in uses if device.cost(use).sums_gradients}
    for use in uses:
        times, cost = device.runs(use) * use.times, device.cost(use)
        for each in cost.statistics:
            if not each.every_pass:
                over = _shared_over(device, use, each)
                counts["all-reduce", over, each.bytes, each.of, False] += times * each.times
        summed = device.contracted_over(use)
        if not cost.relays and not summed:
            continue
        # Its logical axes scattered and gathered, the mesh axes that shard it so, and those that it is gathered over.
        marker = use.marker
        ends = (marker.operands[0], marker.results[0]) if cost.relays else (marker.results[0], cost.contracted_rows)
        whole = work.itemsize * math.prod(local_shapes.local_shape(work, ends[1], use.result_shapes[0]))
        before, after = (together(local_shapes.placed(work, axes, use.result_shapes[0])) for axes in ends)
        over = tuple(axis for axis in before if axis not in after)

        def sums(axes: tuple, scatters: bool, n: int, hidden: bool, whole: int = whole, over: tuple = over) -> None:
            """Count `n` sums over these axes: a reduce-scatter over those that shard the residual, an all-reduce over
            the others."""
            kept = tuple(axis for axis in axes if scatters and axis in over)
            left = tuple(axis for axis in axes if axis not in kept)
            counts["reduce-scatter", kept, whole, "residual", hidden] += n
            counts["all-reduce", left, whole // work.layout.over(kept), "residual", hidden] += n

        reruns = use.layer is not None and not again.isdisjoint(use.results)
        forward = times * (1 + reruns) + device.runs(use) * runs_again_on_stage(device, use)
        trains = device.trains(use)
        if cost.relays:
            counts["all-gather", over, whole, "residual", False] += forward
            if trains:
                sums(_read_over(device, use.results[0]), use.results[0] not in whole_sums, times, True)
        else:
            sums(summed, True, forward, False)
            counts["all-gather", over, whole, "residual", False] += times * trains
    for (kind, axes, size, of, hidden), times in counts.items():
        yield Collective(kind, axes, times, size, of, "backward" if hidden else None)


def _operands(device: DeviceStep) -> Iterator[Collective]:
    """Yield the exchanges of operands that doors declare."""
    work, again = device.work, run_again(device)
    for use in device.recording.uses:
        for each in device.cost(use).exchanges:
            if each.among is not None:
                over = work.several(work.rules.over(each.among))
            else:
                before = together(local_shapes.placed(work, each.axes, use.shapes[each.operand], use.num_query_heads))
                over = tuple(axis for axis in before if axis not in together(device.placed(use, each.operand)))
            reruns = use.layer is not None and not again.isdisjoint(use.results)
            forward = use.times * (1 + reruns) + runs_again_on_stage(device, use)
            runs = {"forward": forward * each.forward, "backward": use.times * device.trains(use) * each.backward}
            for phase, times in runs.items():
                behind = phase if each.is_hidden else None
                yield Collective(each.kind, over, device.runs(use) * times, each.bytes, each.of, behind)


def _statistics(device: DeviceStep) -> Iterator[Collective]:
    """Yield the sums, in every pass, of statistics over the devices that share a door's operand. The statistics of a
    layer, such as those of its queries and its keys, are one collective."""
    again = run_again(device)
    for uses in device.recording.by_layer.values():
        declared = [(use, each) for use in uses for each in device.cost(use).statistics if each.every_pass]
        shared = [(use, each, axes) for use, each in declared if (axes := _shared_over(device, use, each))]
        for use, first, axes in shared[:1]:
            passes = use.times * (1 + (not again.isdisjoint(use.results)) + device.trains(use))
            times = device.runs(use) * (passes + runs_again_on_stage(device, use)) * first.times
            yield Collective("all-reduce", axes, times, sum(each.bytes for _, each, _ in shared), first.of)


def _shared_over(device: DeviceStep, use: RecordedOp, statistics: Statistics) -> tuple[str, ...]:
    """Return the mesh axes over which statistics are summed."""
    placement = device.placed(use, statistics.operand)
    return together(tuple(placement[i] for i in statistics.dimensions))


def _read_over(device: DeviceStep, value: int) -> tuple[str, ...]:
    """Return the mesh axes that shard the outputs of the products that read a residual: the gradient of the residual is
    summed over these axes."""
    axes: list[str] = []
    for use in device.recording.uses:
        if use.operands[0] != value:
            continue
        product = device.cost(use).weight_product
        if device.cost(use).hands_on:
            axes += _read_over(device, use.results[0])
        elif product is not None:
            # Over the axes that shard its rows each device has other ones.
            others = *device.contracted_over(use), *together(device.placed(use, 0))
            axes += [axis for axis in together(device.placed(use, product.weight)) if axis not in others]
    return device.work.several(axes)
