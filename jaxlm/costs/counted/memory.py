"""Memory of one device at the peak of a step, from the recording of the model.

A step goes through phases. What it holds at its peak is the largest of them, not the sum of all that it ever holds.
Which arrays XLA keeps in each was read from its programs (`jaxlm.lowering.buffers`); docs/memory.md holds the two
against each other.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxlm.costs.counted import layer_memory, operations
from jaxlm.costs.counted.cache import kv_cache
from jaxlm.costs.counted.device import DeviceStep, device_step
from jaxlm.costs.counted.parameters import copied
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.workload import Workload


class Memory(NamedTuple):
    """Bytes on one device at the peak of a step: of each kind, what is there at that moment.

    `parameters`: the float32 masters, the copy in the dtype that computes, which is the only one of what is not trained
    beside adapters, and matrices gathered over `fsdp`; in inference that copy alone.
    `gradients`: those of the layers in that dtype and whole ones that wait to be added over `fsdp`, and the float32
    sums of microbatches. `optimizer`: its state, and the average of the parameters where there is one. `activations`:
    what layers keep for the backward pass, and the work of one layer. `logits`: float32 with their gradient, or the
    gradient alone; in inference with the normalised residual that they are of. `kv_cache`: the pages of the engine.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    kv_cache: int

    @property
    def total(self) -> int:
        return sum(self)


@functools.lru_cache(maxsize=4096)
def memory(work: Workload) -> Memory:
    """Return the peak memory of a step on one device of the mesh. But for a TPU, XLA is assumed to compile as for a
    GPU."""
    if work.kind == "train":
        phases = list(_training(device_step(work)))
    else:
        phases = [_inference(device_step(step)) for step in work.steps_of_engine()]
    return max(phases, key=lambda phase: phase.total)


def trained(work: Workload) -> Memory:
    """Return the memory of all parameters in training: master and working copies, optimizer state, and gradients of
    parameters that are not frozen. Gradients of the tables and the working copy of the layers never coexist."""
    moved, total = sum(_gradients(work).values()), _trainable(work)
    declared, shares = work.parameters, copied(work.model, work.lora)
    sliced = int(sum(work.stored(declared[path].axes, declared[path].shape) * n for path, n in shares.items()))
    working = (total * (work.dtype != "float32") + sliced) * work.itemsize
    state = operations.optimizer_bytes(work) + (4 * total if work.average else 0)
    held = 4 * total + _base(work) + working
    return Memory(held, moved * work.itemsize + _sums(work, moved), state, 0, 0, 0)


def _trainable(work: Workload) -> int:
    """Numbers of the parameters that have a float32 copy."""
    return sum(work.stored(d.axes, d.shape) for d in work.trainable.values())


def _base(work: Workload) -> int:
    """Bytes of the parameters that are not trained beside adapters."""
    declared = work.parameters
    return work.itemsize * sum(work.stored(declared[path].axes, declared[path].shape) for path in work.base)


def _gradients(work: Workload) -> dict[str, int]:
    """Numbers of each parameter's gradient, of what is not frozen."""
    leaves = work.trainable.items()
    return {path: work.stored(d.axes, d.shape) for path, d in leaves if path not in work.frozen}


def _sums(work: Workload, numbers: int) -> int:
    """Bytes of gradients added over microbatches."""
    return 4 * numbers if work.microbatches > 1 else 0


def _training(device: DeviceStep) -> Iterator[Memory]:
    """The end of the forward pass, the loss, the first backward pass of a layer, and the update."""
    work, recording, representative = device.work, device.recording, device_step(device.work.representative())
    gradients, layers = _gradients(work), range(len(recording.layers))
    through = any(use.layer is not None and device.trains(use) for use in recording.uses)
    of_layers = sum(numbers for path, numbers in gradients.items() if path in device.layered)
    total, itemsize = sum(gradients.values()), work.itemsize
    held, sums, saved = trained(work), _sums(work, total), layer_memory.kept(representative) if through else 0
    state = held.optimizer

    for layer in layers:
        forward = layer_memory.forward(representative, layer, through and work.remat == "none")
        yield Memory(
            held.parameters + _gathered(device, recording.by_layer[layer]), sums, state, saved + forward.bytes, 0, 0
        )
    ((use, loss),) = ((use, loss) for use in recording.uses if (loss := device.cost(use).loss))
    around, tables = saved, 0
    if loss.gradients:  # with that of the residual
        around += _ungathered(device, use) + loss.gradients
        around += loss.padded_table if recording.parameter(use) in work.base else 0
        tables = (4 if work.batch_shards == 1 else itemsize) * (total - of_layers)
    is_array = loss.is_array or (recording.parameter(use) in gradients and device.gathered_over(use))
    gradient = loss.gradient if is_array else 0
    waiting = (gradient or loss.logits) if loss.waits else 0
    yield Memory(held.parameters + _tables(device), sums + loss.table_sum, state, around, loss.logits + gradient, 0)
    for layer in layers if through else ():
        uses, backward = recording.by_layer[layer], layer_memory.backward(representative, layer)
        gathered = _gathered(device, _of_module(device, uses, backward.at))
        # The gradients of the last matrices wait to be summed.
        last = [use for use in _last(device, uses) if recording.parameter(use) in gradients]
        made = sums + tables + itemsize * of_layers + _gathered(device, last)
        yield Memory(held.parameters + gathered, made, state, saved + backward.bytes, waiting, 0)
    yield Memory(4 * _trainable(work) + _base(work), sums or itemsize * total, state, 0, 0, 0)


def _ungathered(device: DeviceStep, use: RecordedOp) -> int:
    """Bytes of the residual that a door reads gathered, as it lies before."""
    uses = device.recording.uses
    relay = next(each for each in uses if device.cost(each).relays and each.results[0] in use.operands)
    return device.local(relay).operands[0].bytes


def _inference(device: DeviceStep) -> Memory:
    """The largest layer of a step of the engine, beside all weights and pages, and what the step gives: logits, and the
    normalised residual that they are of in float32."""
    work, recording = device.work, device.recording
    held = work.itemsize * sum(work.stored(d.axes, d.shape) for d in work.parameters.values())
    layers = (layer_memory.forward(device, layer, False).bytes for layer in range(len(recording.layers)))
    unembedding = next(use for use in reversed(recording.uses) if device.cost(use).workspace.forward)
    results = device.cost(unembedding).workspace.forward + 4 * device.local(unembedding).operands[0].numbers
    return Memory(held, 0, 0, max(layers), results, kv_cache(work))


def _gathered(device: DeviceStep, uses: Iterable[RecordedOp]) -> int:
    """Bytes of the parameters that are gathered for these doors, whole while they are used."""
    return sum(device.weight_bytes(use) for use in uses if device.gathered_over(use))


def _of_module(device: DeviceStep, uses: Sequence[RecordedOp], at: int) -> list[RecordedOp]:
    """Return the doors of the module in which one with a workspace stands, or the products before it that it reads."""
    if device.cost(uses[at]).workspace.forward:
        return [use for use in uses if use.scope.startswith(uses[at].scope)]
    return _last(device, uses)


def _last(device: DeviceStep, uses: Sequence[RecordedOp]) -> list[RecordedOp]:
    """Return the products that read the last gathered residual of a layer."""
    gathered = [use.results[0] for use in uses if device.cost(use).relays]
    return [use for use in uses if device.cost(use).weight_product and use.operands[0] == gathered[-1]]


def _tables(device: DeviceStep) -> int:
    """Bytes of the largest parameter outside of layers that is gathered, while it is whole."""
    return max(_gathered(device, [use]) for use in device.recording.by_layer[None])
