"""The memory that gathering parameters takes in training, besides the parameters as they are stored.

Gathered parameters, copies in the layout in which they are gathered, and gradients of whole matrices that wait to be
reduced. Where XLA keeps them was read from its programs (`jaxlm.lowering.buffers`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from jaxlm.costs import local_shapes
from jaxlm.costs.counted.device import DeviceStep, device_step
from jaxlm.costs.counted.layer_memory import LayerPeak, forward
from jaxlm.costs.counted.operations import run_again
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.memoized import memoized_in


class Reused(NamedTuple):
    """Bytes of temporary arrays in the memory of parameters that were copied: up to the loss, and in the backward
    pass."""

    until_loss: int
    backward: int


class BackwardPlace(NamedTuple):
    """Bytes on one device at a place in the backward pass of a layer: gathered parameters, whole gradients that wait to
    be reduced, and activations beside all that layers keep."""

    gathered: int
    waiting: int
    activations: int


def laid_out_again(device: DeviceStep) -> dict[str, int]:
    """Return the bytes of the copies of parameters in the layout in which a GPU's program gathers them, by path.

    The dimension that is gathered comes first there. A parameter that has it elsewhere, as products that end in the
    residual and tables [V, D] do, is copied as a whole before a loop over layers or microbatches.
    Matrices that stages send one another, or gather, before are written so at once.
    """
    work = device.work
    if work.platform == "tpu":
        return {}
    written_before = frozenset[int]()
    if work.gathers_once:
        written_before = frozenset(device.recording.by_layer.keys() - {None})
    elif work.stage_layers.exchanges:
        written_before = device.of_stages
    return _laid_out_in_loops(device, work.accumulates, work.execution.in_loop, written_before)


@memoized_in("answers_on_mesh")
def _laid_out_in_loops(
    device: DeviceStep, accumulates: bool, layers_in_loop: bool, written_before: frozenset[int]
) -> dict[str, int]:
    """Return the bytes of `laid_out_again`, on a mesh, by what decides which loops there are, without those of the
    layers that are `written_before`."""
    work, recording, paths = device.work, device.recording, set()
    for use in recording.uses:
        if use.layer in written_before:
            continue
        is_in_loop = accumulates or (use.layer is not None and layers_in_loop)
        if (over := device.gathered_over(use)) and is_in_loop:
            i = recording.weights[use.results[0]]
            first, *_ = work.rules.placed(use.marker.operands[i], use.shapes[i], work.layout)
            if set(first).isdisjoint(over):
                paths.add(recording.parameter(use))
    parameters = work.parameters
    return {
        path: work.itemsize * local_shapes.stored(work, parameters[path].axes, parameters[path].shape) for path in paths
    }


def reused(device: DeviceStep, copies: Mapping[str, int], gradients: Collection[str]) -> Reused:
    """Return the bytes of temporary arrays in the memory of parameters that were copied, `copies` by path.

    A step writes new parameters there only at its end. Each copy takes the place of what was copied before it, where it
    is no larger. In the backward pass of a loop over layers their gradients, of the same sizes, lie there.
    """
    work = device.work
    if work.dtype == "float32":  # the masters, which the update reads
        return Reused(0, 0)
    sizes = {path: size for path, size in copies.items() if path in gradients}
    until_loss = sum(sizes.values()) - max(sizes.values(), default=0)
    if not work.execution.in_loop:
        return Reused(until_loss, until_loss)
    layered = device.layered()
    return Reused(until_loss, max(until_loss, sum(size for path, size in sizes.items() if path in layered)))


def in_layer(device: DeviceStep, layer: int) -> int:
    """Return the bytes of the parameters that a layer gathers where they are read; none that are gathered before."""
    return 0 if device.work.gathers_once else _of_layer(device, layer)


@memoized_in("answers_on_mesh")
def _of_layer(device: DeviceStep, layer: int) -> int:
    """Return the bytes of the gathered parameters of a layer."""
    return _gathered(device, device.recording.by_layer[layer])


def before(device: DeviceStep) -> int:
    """Return the bytes of the matrices of layers, of all chunks of a stage, that are gathered before all ticks of a
    pipeline."""
    if not device.work.gathers_once:
        return 0
    uses = list(filter(device.is_gathered_before, device.recording.uses))
    chunks = {use.layer: device.work.rounds if use.layer in device.of_stages else 1 for use in uses}
    return sum(chunks[use.layer] * use.times * device.weight_bytes(use) for use in uses)


def stored_before(device: DeviceStep) -> int:
    """Return the numbers on one device, as stored, of the stacks whose matrices are gathered before all ticks."""
    work = device.work
    paths = {device.recording.parameter(use) for use in device.recording.uses if device.is_gathered_before(use)}
    of = [work.parameters[path] for path in paths]
    stacks = [each for each in of if dict(zip(each.axes, each.shape, strict=True)).get("layers", 1) > 1]
    return sum(local_shapes.stored(work, each.axes, each.shape) for each in stacks)


def at_loss(device: DeviceStep) -> int:
    """Return the bytes of gathered parameters at the loss: the largest outside of layers, and what the last layer's
    backward pass reads first where that is outside of the loop over layers."""
    last = len(device.recording.layers) - 1
    if not _scattered_late(device, last):
        return _tables(device)
    again, uses = run_again(device), device.recording.by_layer[last]
    return _tables(device) + _here(device, [use for use in uses if not again.isdisjoint(use.results)])


@memoized_in("answers_on_mesh")
def _tables(device: DeviceStep) -> int:
    """Return the bytes of the largest gathered parameter outside of layers."""
    return max(_gathered(device, [use]) for use in device.recording.by_layer[None])


def in_backward(device: DeviceStep, layer: int, peak: LayerPeak, gradients: Collection[str]) -> Iterator[BackwardPlace]:
    """Yield what is there at the peak of a layer's backward pass, and where it runs again what the pass reads if XLA
    reduces the gradients of the layer before only in this one."""
    if late := [use for use in _scattered_late(device, layer) if device.recording.parameter(use) in gradients]:
        waiting, again = _gathered(device, late), run_again(device)
        reads = [device.weight_bytes(use) for use in late if not again.isdisjoint(use.results)]
        # XLA gathers along the first dimension in memory, and a kernel reads a copy in the array's order.
        activations = forward(device_step(device.work.representative()), layer, False).bytes
        yield BackwardPlace(sum(reads) + max(reads, default=0), waiting, activations)
        yield BackwardPlace(0, waiting, peak.bytes)
        return
    # The gradients of the last matrices wait to be summed.
    last = [use for use in _last(device, layer) if device.recording.parameter(use) in gradients]
    gathered = _here(device, _of_module(device, layer, peak.at))
    yield BackwardPlace(gathered, _gathered(device, last), peak.bytes)


def _scattered_late(device: DeviceStep, layer: int) -> list[RecordedOp]:
    """Return the doors of a layer whose gradients are reduced in the next trip of a loop over layers.

    XLA for a GPU does so with reduce-scatters that a program has itself, not with those that follow from how arrays
    lie. The first trip stands in front of the loop, and its gathers begin before the loss.
    """
    work, uses = device.work, device.recording.by_layer[layer]
    if work.platform == "tpu" or not work.execution.in_loop or uses[0].times == 1:
        return []
    return [use for use in uses if device.cost(use).gathers and device.gathered_over(use)]


def _gathered(device: DeviceStep, uses: Iterable[RecordedOp]) -> int:
    """Return the bytes of the gathered parameters of these doors."""
    return sum(device.weight_bytes(use) for use in uses if device.gathered_over(use))


def _here(device: DeviceStep, uses: Iterable[RecordedOp]) -> int:
    """Return the bytes of the gathered parameters of these doors, of those that are gathered where they are read."""
    return _gathered(device, (use for use in uses if not device.is_gathered_before(use)))


def _of_module(device: DeviceStep, layer: int, at: int) -> list[RecordedOp]:
    """Return the doors of the module that has the door at `at` if that door has a workspace, else the layer's last
    products."""
    uses = device.recording.by_layer[layer]
    if device.cost(uses[at]).workspace.forward:
        return [use for use in uses if use.scope.startswith(uses[at].scope)]
    return _last(device, layer)


@memoized_in("answers_of_rows")
def _last(device: DeviceStep, layer: int) -> list[RecordedOp]:
    """Return the products that read the last gathered residual of a layer."""
    uses = device.recording.by_layer[layer]
    gathered = [use.results[0] for use in uses if device.cost(use).relays]
    return [use for use in uses if device.cost(use).weight_product and use.operands[0] == gathered[-1]]
