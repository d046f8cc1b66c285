"""Memory of one layer on one device: the activations kept for its backward pass, and its working memory.

Both follow from the recording: a value is live from the door that makes the value to the last door that reads it. A
door declares what XLA keeps for that door besides operands and results.
"""

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from jaxlm.costs.counted.device import DeviceStep
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.memoized import memoized_in
from jaxlm.models.execution_config import Remat


class LayerPeak(NamedTuple):
    """Bytes of a layer at its peak, and the index of the door at the peak."""

    bytes: int
    at: int


class Kept(NamedTuple):
    """The values that a layer keeps for its backward pass, and the bytes that doors keep besides them or instead."""

    values: frozenset[int]
    more: int
    total: int


def kept(device: DeviceStep) -> int:
    """Return the bytes that all layers keep for their backward pass, and random masks outside of layers."""
    recording, layers = device.recording, enumerate(kept_by_layer(device))
    return masks(device) + sum(recording.by_layer[layer][0].times * each.total for layer, each in layers)


def masks(device: DeviceStep) -> int:
    """Return the bytes of random masks outside of layers."""
    return sum(device.cost(use).saved.masks for use in device.recording.by_layer[None])


def kept_by_layer(device: DeviceStep) -> tuple[Kept, ...]:
    """Return what each layer keeps for its backward pass.

    With rematerialisation these are its inputs, the values with the names that the policy keeps, and what doors keep
    beside a value with such a name; without rematerialisation, all that the backward pass reads.
    """
    return _kept_by_layer(device, device.work.remat, device.in_loops)


@memoized_in("answers_of_rows")
def _kept_by_layer(device: DeviceStep, remat: Remat, in_loops: tuple[bool, ...]) -> tuple[Kept, ...]:
    recording, layers = device.recording, []
    for layer, begin in enumerate(recording.layers):
        uses = recording.by_layer[layer]
        if remat == "none":
            layers.append(_read(device, uses, in_loops[layer]))
        else:
            names = () if remat == "full" else remat
            named = {value: use for use in uses for value in use.results if recording.names.get(value) in names}
            more = sum(device.cost(use).saved.with_result for use in named.values())
            layers.append(_kept(device, {*_begin(device, begin), *named}, more))
    return tuple(layers)


def _kept(device: DeviceStep, values: Iterable[int], more: int) -> Kept:
    return Kept(frozenset(map(device.same, values)), more, _bytes(device, values) + more)


def _begin(device: DeviceStep, begin: Iterable[int]) -> set[int]:
    """Return the activations that a layer takes as input."""
    return device.recording.activations & set(begin) & device.bytes.keys()


def _bytes(device: DeviceStep, values: Iterable[int]) -> int:
    """Return the bytes of these values, each buffer once."""
    return sum(device.bytes[value] for value in {device.same(value) for value in values})


def _read(device: DeviceStep, uses: Sequence[RecordedOp], is_stacked: bool) -> Kept:
    """Return what the backward pass of doors reads; without recomputation, all of it is kept."""
    reads = [_read_by(device, use, is_stacked) for use in uses]
    return _kept(device, {value for values, _ in reads for value in values}, sum(more for _, more in reads))


def _read_by(device: DeviceStep, use: RecordedOp, is_stacked: bool) -> tuple[Iterable[int], int]:
    """Return the values that the backward pass of a door reads, and the bytes of what it reads besides. `is_stacked`: a
    loop keeps all of it in stacks."""
    declared = device.cost(use).saved
    instead = declared.instead if is_stacked else 0
    more = instead + declared.bytes + declared.with_result + declared.masks
    if declared.shared is not None and not _is_shared(device):
        more += declared.shared[1]
    return () if instead else device.saved(use), more


@memoized_in("answers_of_rows")
def _is_shared(device: DeviceStep) -> bool:
    """Return whether all layers share one of the arrays that a door says layers of one key have in common."""
    shared = (device.cost(use).saved.shared for use in device.recording.uses)
    return len({each[0] for each in shared if each is not None}) <= 1


@memoized_in("answers_of_rows")
def forward(device: DeviceStep, layer: int, keeps: bool) -> LayerPeak:
    """Return the peak of a layer's forward pass: at a door with a workspace, or else where most values are live.
    `keeps`: whether all values that the backward pass reads are kept."""
    uses = device.recording.by_layer[layer]
    begin, last = _begin(device, device.recording.layers[layer]), _last_reads(device, uses)
    working, is_tpu = _with_workspace(device, uses), device.work.platform == "tpu"
    peaks = []
    for i in working or range(len(uses)):
        use, cost = uses[i], device.cost(uses[i])
        there = {device.same(value) for value in begin.union(*(each.results for each in uses[: i + 1]))}
        if working:
            through = {value for value in there if last.get(value, -1) > i} - set(use.results)
            workspace = cost.workspace.keeping[0] if keeps else cost.workspace.forward
            bytes_ = _bytes(device, through) + workspace
        else:
            # A GPU's program frees a buffer one operation after the buffer's last reader. A TPU's program frees the
            # buffer at once, and works in place where possible.
            kept_from = i if is_tpu else i - 1
            live = {value for value in there if last.get(value, -1) >= kept_from or value in use.results}
            bytes_ = _bytes(device, live - set(use.results) if cost.in_place.forward else live)
            bytes_ += cost.workspace.beside + cost.workspace.between_kernels[0]
        peaks.append(LayerPeak(bytes_, i))
    return max(peaks)


def backward(device: DeviceStep, layer: int) -> LayerPeak:
    """Return the peak of a layer's backward pass: at a door with a workspace, or else where most values and gradients
    are live. In a loop it is beside what all layers keep; of a layer that is written out, beside what others keep."""
    return _backward(device, layer, device.work.remat, device.in_loops)


@memoized_in("answers_of_rows")
def _backward(device: DeviceStep, layer: int, remat: Remat, in_loops: tuple[bool, ...]) -> LayerPeak:
    """Return the peak of a layer's backward pass under this rematerialisation. In a loop it reads copies, out of the
    stacks of all layers, and otherwise what the layer keeps."""
    uses = device.recording.by_layer[layer]
    if working := _with_workspace(device, uses):
        kept = _kept(device, (), 0) if in_loops[layer] else _kept_by_layer(device, remat, in_loops)[layer]
        around = (_around_workspace(device, layer, i, kept, remat == "none") for i in working)
        return max(LayerPeak(kept.total + bytes_, i) for bytes_, i in zip(around, working, strict=True))
    beside, lives = [device.cost(use).workspace.beside for use in uses], _lives(device, layer)
    of_passes = sum(device.cost(use).workspace.of_passes for use in uses)
    # What only the backward pass of later doors reads is gone.
    read, bytes_, peaks = set(), of_passes, []
    for i, use in enumerate(uses):
        values, more = _read_by(device, use, in_loops[layer] and remat == "none")
        new = {device.same(value) for value in values} - read
        read |= new
        bytes_ += sum(device.bytes[value] for value in new) + more
        # A GPU's program computes the gradients of matrices last: what these products read of later doors waits.
        working = beside[i] if device.work.platform == "tpu" else sum(beside[i:])
        working += device.cost(use).workspace.between_kernels[1]
        gradients = _bytes_of_gradients(device, use, i, lives)
        peaks.append(LayerPeak(bytes_ + working + gradients, i))
    return max(peaks)


def _others(device: DeviceStep, values: Iterable[int], kept: Set[int]) -> set[int]:
    """Return the values whose buffer is none of those that are kept."""
    return set(map(device.same, values)) - kept


def _with_workspace(device: DeviceStep, uses: Sequence[RecordedOp]) -> list[int]:
    """Return the indices of doors with a workspace, which is larger than all else."""
    return [i for i, use in enumerate(uses) if device.cost(use).workspace.forward]


def _last_reads(device: DeviceStep, uses: Sequence[RecordedOp]) -> dict[int, int]:
    """Return the index of each value's last reader in a layer; for the layer's result, the number of doors."""
    last = {device.same(value): i for i, use in enumerate(uses) for value in use.operands}
    return last | {device.same(value): len(uses) for value in uses[-1].results}


def _lives(device: DeviceStep, layer: int) -> list[tuple[int, int, int]]:
    """Return each value of a layer with the index of the door that makes it, -1 for an input, and that of the last door
    that reads it, the number of doors for the layer's result."""
    uses = device.recording.by_layer[layer]
    begin = _begin(device, device.recording.layers[layer])
    maker = {value: i for i, use in enumerate(uses) for value in use.results} | dict.fromkeys(begin, -1)
    last = {value: i for i, use in enumerate(uses) for value in use.operands}
    return [(value, made_at, last.get(value, len(uses))) for value, made_at in maker.items()]


def _bytes_of_gradients(device: DeviceStep, use: RecordedOp, at: int, lives: Sequence[tuple[int, int, int]]) -> int:
    """Return the bytes of the gradients that are live in the backward pass of a door: those of the values that the door
    reads or makes, and of the values that later doors read and earlier doors make."""
    # A buffer is freed one operation after its last reader: where a door is several, before the largest of these.
    later = 0 if device.cost(use).workspace.between_kernels[1] else 1
    there = {value for value, made_at, read_at in lives if made_at <= at + later and read_at >= at}
    return _bytes(device, there - set(use.results) if device.cost(use).in_place.backward else there)


def _around_workspace(device: DeviceStep, layer: int, at: int, there: Kept, keeps: bool) -> int:
    """Return the bytes of the layer in the backward pass of a door with a workspace, beside what is `there` anyway.

    A GPU's program computes the gradients of matrices last, and keeps until then what these products read: the inputs
    of the layer's products, and the gradients of the results of later products. Of the residual, its gradient and the
    door's result there are float32 copies. A TPU's program keeps less.
    """
    uses, work = device.recording.by_layer[layer], device.work
    use, cost = uses[at], device.cost(uses[at])
    residual = _bytes(device, _begin(device, device.recording.layers[layer]))
    kept = there.values
    result, operands = device.bytes[use.results[0]], _bytes(device, _others(device, device.saved(use), kept))
    products = [i for i, each in enumerate(uses) if device.cost(each).weight_product]
    later = [uses[i] for i in products if i > at and "residual" not in uses[i].marker.results[0]]
    hidden = [device.bytes[each.results[0]] for each in later]
    workspace = cost.workspace.keeping[1] if keeps else cost.workspace.backward
    if work.platform == "tpu":
        return 2 * residual + operands + 2 * result + sum(hidden[-2:]) + workspace
    inputs = _bytes(device, _others(device, (uses[i].operands[0] for i in products), kept))
    copies = 4 * (2 * residual + result) // work.itemsize
    return 4 * residual + inputs + operands + 2 * result + sum(hidden) + copies + workspace
