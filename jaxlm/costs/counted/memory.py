"""Memory of one device at the peak of a step, from the recording of the model.

A step goes through phases. Its peak is the memory of the largest phase, not the sum over phases. Which arrays XLA keeps
in each phase was read from XLA's programs (`jaxlm.lowering.buffers`); docs/memory.md compares the counts with them.
"""

import functools
from collections.abc import Iterator, Set
from typing import NamedTuple

import jax.numpy as jnp

from jaxlm.costs import local_shapes
from jaxlm.costs.counted import drawing, gathered_memory, layer_memory, operations, parameters, written_out
from jaxlm.costs.counted.between_stages import kept_bytes, slot_numbers
from jaxlm.costs.counted.cache import kv_cache
from jaxlm.costs.counted.device import DeviceStep, device_step
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.memoized import memoized_in
from jaxlm.costs.workload import Workload
from jaxlm.models.config import ModelConfig
from jaxlm.models.doors.cost import LossWorkspace
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Rules


class Memory(NamedTuple):
    """Bytes on one device at the peak of a step, by kind of array.

    `parameters`: the float32 masters, the copies in the dtype of the computation, and matrices gathered over `fsdp`;
    parameters that adapters leave untrained, and all parameters in inference, have that copy alone, or are quantised.
    `gradients`: the layers' gradients in the dtype of the computation, whole gradients that wait to be reduced over
    `fsdp`, and the float32 sums of microbatches. `optimizer`: the optimizer's state, the average of the parameters if
    one is kept, and the outer parameters and momentum of local SGD. `activations`: what layers keep for the backward
    pass, and the working memory of one layer. `logits`: float32 logits with their gradient, or the gradient alone; in
    inference the logits and the normalised residual before the unembedding, and the copies of logits that a draw works
    on. `kv_cache`: the pages of the engine. `slots`: the state of the engine's slots, most of it counts of each
    sequence's tokens.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    kv_cache: int
    slots: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


@functools.lru_cache(maxsize=4096)
def memory(work: Workload) -> Memory:
    """Return the peak memory of a step on one device of the mesh. Except on a TPU, XLA is assumed to compile as for a
    GPU."""
    if work.kind == "train":
        phases = list(_training(device_step(work)))
    else:
        phases = [phase for step in work.by_step_shape() for phase in _inference(device_step(step))]
    return max(phases, key=lambda phase: phase.total)


class _Numbers(NamedTuple):
    """Numbers of elements on one device: of the parameters that have a float32 copy (`trainable`), of those that
    adapters leave untrained (`base`) and that are not quantised, of what training copies before the loops over layers
    (`sliced`), of the stacks of layers (`stacked`), and of each gradient, by path, with their sum; and the bytes of
    quantised parameters."""

    trainable: int
    base: int
    quantized_bytes: int
    sliced: int
    stacked: int
    gradients: dict[str, int]
    of_gradients: int


def trained(work: Workload) -> Memory:
    """Return the memory of all parameters in training: master and working copies, optimizer state, and gradients of
    parameters that are not frozen."""
    numbers, itemsize = _numbers(work), work.itemsize
    beside = 4 * work.average + 8 * (work.local_sgd is not None)  # outer parameters, and their momentum
    state = operations.optimizer_bytes(work) + beside * numbers.trainable
    weights = 4 * numbers.trainable + itemsize * numbers.base + numbers.quantized_bytes + _working(work)
    gradients = numbers.of_gradients * itemsize + _sums(work, numbers.of_gradients)
    return Memory(weights, gradients, state, 0, 0, 0)


def updated(work: Workload) -> Memory:
    """Return the memory at the update of a training step: that of all parameters, whatever the layers keep."""
    numbers = _numbers(work).of_gradients
    return trained(work)._replace(gradients=_sums(work, numbers) or work.itemsize * numbers)


def _numbers(work: Workload) -> _Numbers:
    return _numbers_on(work.model, work.lora, work.quantized, work.frozen, work.rules, work.layout)


@functools.lru_cache(maxsize=1024)
def _numbers_on(
    model: ModelConfig,
    lora: LoraConfig | None,
    quantized: Quantization | None,
    frozen: Set[str],
    rules: Rules,
    layout: Layout,
) -> _Numbers:
    declared = parameters.parameters(model, lora, quantized)
    base = frozenset() if lora is None else parameters.base(model, lora, quantized)
    stored = {path: rules.stored(d.axes, d.shape, layout) for path, d in declared.items()}
    gradients = {path: numbers for path, numbers in stored.items() if path not in base and path not in frozen}
    sliced = int(sum(stored[path] * share for path, share in parameters.copied(model, lora, quantized).items()))
    narrow = {path: jnp.dtype(d.dtype).itemsize for path, d in declared.items() if d.dtype is not None}
    of_base = sum(stored[path] for path in base if path not in narrow)
    trainable = sum(stored[path] for path in declared if path not in base)
    quantized_bytes = sum(stored[path] * itemsize for path, itemsize in narrow.items())
    sizes = {path: dict(zip(d.axes, d.shape, strict=True)).get("layers", 1) for path, d in declared.items()}
    stacked = sum(stored[path] for path, layers in sizes.items() if layers > 1)
    of_gradients = sum(gradients.values())
    return _Numbers(trainable, of_base, quantized_bytes, sliced, stacked, gradients, of_gradients)


def _working(work: Workload) -> int:
    """Return the bytes of the copy of the parameters in the dtype of the computation."""
    return _numbers(work).trainable * work.itemsize * (work.dtype != "float32")


def _sums(work: Workload, numbers: int) -> int:
    """Return the bytes of gradients accumulated over microbatches."""
    return 4 * numbers if work.accumulates else 0


def _training(device: DeviceStep) -> Iterator[Memory]:
    """Yield the memory at the end of the forward pass, at the loss, at each layer's first and, where layers are written
    out, last backward pass, and at the update."""
    work, recording, representative = device.work, device.recording, device_step(device.work.representative())
    numbers, layers = _numbers(work), range(len(recording.layers))
    gradients, total, itemsize = numbers.gradients, numbers.of_gradients, work.itemsize
    through = _pass_layers(device)
    layered = device.layered()
    of_layers = sum(numbers for path, numbers in gradients.items() if path in layered) // work.rounds
    resident, sums, slices = trained(work), _sums(work, total), _slices(device)
    moved = slot_numbers(work)
    sums += 4 * (moved.in_slots - moved.stored)
    copies = gathered_memory.laid_out_again(device)
    copied = sum(copies.values()) + itemsize * moved.in_slots + gathered_memory.before(device)
    resident = resident._replace(parameters=resident.parameters + copied)
    reused = gathered_memory.reused(device, copies, gradients)
    saved = layer_memory.kept(representative) if through else 0
    saved += kept_bytes(work)
    state, parameters = resident.optimizer, resident.parameters + slices - reused.until_loss

    for layer in layers:
        forward = layer_memory.forward(representative, layer, through and work.remat == "none")
        gathered = gathered_memory.in_layer(device, layer)
        yield Memory(parameters + gathered, sums, state, saved + forward.bytes, 0, 0)
    use, loss = _loss(device)
    around, tables = saved, 0
    if loss.gradients:  # and the gradient of the residual
        around += _ungathered(device, use) + loss.gradients
        around += loss.padded_table if recording.parameter(use) in work.base else 0
        tables = (4 if work.batch_shards == 1 else itemsize) * (total - of_layers)
    is_array = loss.is_array or (recording.parameter(use) in gradients and device.gathered_over(use))
    gradient = loss.gradient if is_array else 0
    waiting = (gradient or loss.logits) if loss.waits else 0
    gathered = gathered_memory.at_loss(device)
    yield Memory(parameters + gathered, sums + loss.table_sum, state, around, loss.logits + gradient, 0)
    for layer in layers if through else ():
        backward = layer_memory.backward(representative, layer)
        if device.in_loops[layer]:  # the stacks of all layers are there from its first trip to its last
            ends = [(saved, itemsize * of_layers, slices)]
        else:  # what a layer keeps goes, and its gradients come
            outside = layer_memory.masks(representative) + kept_bytes(work)
            places = list(written_out.places(representative, layer, gradients))
            lefts = [1.0 if work.execution.in_loop else place.left for place in places]
            ends = [
                (outside + place.kept, round(itemsize * of_layers * place.made), round(slices * left))
                for place, left in zip(places, lefts, strict=True)
            ]
        for kept, made, cut in ends:
            weights = resident.parameters + cut - reused.backward
            for gathered, waits, bytes_ in gathered_memory.in_backward(device, layer, backward, gradients):
                held = sums + tables + made + waits
                yield Memory(weights + gathered, held, state, kept + bytes_, waiting, 0)
    yield updated(work)


@memoized_in("answers_on_mesh")
def _pass_layers(device: DeviceStep) -> bool:
    """Return whether gradients pass a layer."""
    return any(use.layer is not None and device.trains(use) for use in device.recording.uses)


def _slices(device: DeviceStep) -> int:
    """Return the bytes of what layers cut out of the stacks of their parameters, while all layers keep something.

    A loop takes slices of a stack of which it runs a part, such as one of several chunks of a stage. Layers that are
    written out each have their own matrices and vectors, from the forward pass to their backward pass. On a GPU a
    product reads them in the stack, if that is an argument of the program: not in a loop over microbatches, before a
    gathering, or behind the barrier of what runs again.
    """
    work, numbers = device.work, _numbers(device.work)
    as_stored = numbers.stacked - gathered_memory.stored_before(device)
    chunk = (gathered_memory.before(device) + as_stored * work.itemsize) // work.rounds
    if work.execution.in_loop:
        return numbers.sliced * work.itemsize + (chunk if work.rounds > 1 else 0)
    gathers = any(device.gathered_over(use) for use in device.recording.uses if use.layer is not None)
    if work.platform != "tpu" and not work.accumulates and work.remat == "none" and not gathers:
        return 0
    return chunk


@memoized_in("answers_of_rows")
def _loss(device: DeviceStep) -> tuple[RecordedOp, LossWorkspace]:
    """Return the door of the loss that needs most memory; where the objective has none, that of its logits."""
    losses = [(use, loss) for use in device.recording.uses if (loss := device.cost(use).loss)]
    if losses:
        return max(losses, key=lambda each: each[1].logits)
    use = next(use for use in reversed(device.recording.uses) if device.cost(use).workspace.forward)
    logits = device.cost(use).workspace.forward
    return use, LossWorkspace(logits, logits)


def _ungathered(device: DeviceStep, use: RecordedOp) -> int:
    """Return the bytes of a residual before the gathering that precedes a door."""
    uses = device.recording.uses
    relay = next(each for each in uses if device.cost(each).relays and each.results[0] in use.operands)
    return device.local(relay).operands[0].bytes


def _inference(device: DeviceStep) -> Iterator[Memory]:
    """Yield the memory of an engine step at its largest layer and of the draw after it, beside all weights, pages and
    slots, and with the step's results: logits, and the float32 normalised residual before the unembedding."""
    work, recording = device.work, device.recording
    weights = sum(work.itemsize_of(d) * local_shapes.stored(work, d.axes, d.shape) for d in work.parameters.values())
    layers = (layer_memory.forward(device, layer, False).bytes for layer in range(len(recording.layers)))
    unembedding = next(use for use in reversed(recording.uses) if device.cost(use).workspace.forward)
    results = device.cost(unembedding).workspace.forward + 4 * device.local(unembedding).operands[0].numbers
    slots = drawing.slots_bytes(work)
    yield Memory(weights, 0, 0, max(layers), results, kv_cache(work), slots)
    yield Memory(weights, 0, 0, 0, results + drawing.workspace(work), kv_cache(work), slots)
