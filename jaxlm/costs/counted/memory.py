"""Memory of one device at the peak of a step, from the recording of the model.

A step goes through phases. What it holds at its peak is the largest of them, not the sum of all that it ever holds.
Which arrays XLA keeps in each was read from its programs (`jaxlm.lowering.buffers`); docs/memory.md holds the two
against each other.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jaxlm.costs.counted import kernel_costs, layer_memory, operations
from jaxlm.costs.counted.device import DeviceStep, device_step
from jaxlm.costs.counted.parameters import copied, slots
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.workload import Workload
from jaxlm.inference.cache import kept_tokens
from jaxlm.models.cache import Slot
from jaxlm.parallel.layout import Layout

# Of a TPU's tile of an array's last two dimensions; few rows have a smaller one.
_LANES, _SUBLANES = 128, 8


class Memory(NamedTuple):
    """Bytes on one device at the peak of a step: of each kind, what is there at that moment.

    `parameters`: the float32 masters, the copy in the dtype that computes, which is the only one of what is not trained
    beside adapters, and matrices gathered over `fsdp`; in inference that copy with its gathered matrices alone.
    `gradients`: those of the layers in that dtype and whole ones that wait to be added over `fsdp`, and the float32
    sums of microbatches. `optimizer`: its state, and the average of the parameters where there is one. `activations`:
    what layers keep for the backward pass, and the work of one layer. `logits`: float32 with their gradient, or the
    gradient alone. `kv_cache`: keys and values, and the copies of them on which a TPU works.
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
    phases = _training(device_step(work)) if work.kind == "train" else _inference(device_step(work))
    return max(phases, key=lambda phase: phase.total)


def kv_cache(work: Workload) -> int:
    """Bytes that one device holds of what layers keep of earlier tokens."""
    entries = slots(work.model, work.kind, work.layout)

    def numbers(slot: Slot) -> int:
        return math.prod(work.shape(("batch", *slot.axes), (1, *slot.shape)))

    return sum(
        layers * kept_tokens(slot, work.sequence) * numbers(slot) * _itemsize(work, slot)
        for layers, each in entries.values()
        for slot in each.values()
    )


def _tiled_copies(work: Workload) -> int:
    """Bytes of the copies of the cache that XLA for a TPU works on, since its arguments and results lie otherwise:
    those of entries that do not fill a tile's lanes, and when decoding those of several heads on a device, with the
    heads as the rows of its tiles."""
    if work.platform != "tpu":
        return 0
    total = 0
    for layers, each in slots(work.model, work.kind, work.layout).values():
        for slot in each.values():
            sequences, *heads, width = work.shape(("batch", *slot.axes), (1, *slot.shape))
            rows, lanes = math.prod(heads), _up(width, _LANES)
            if work.kind == "decode":
                rows = _up(rows, min(_SUBLANES, 1 << (rows - 1).bit_length()))
            if lanes == width and (work.kind == "prefill" or rows == 1):
                rows = 0
            total += layers * kept_tokens(slot, work.sequence) * sequences * rows * lanes * _itemsize(work, slot)
    return total


def _up(size: int, multiple: int) -> int:
    """Return a size padded to a multiple."""
    return math.ceil(size / multiple) * multiple


def kv_bytes_per_token(work: Workload) -> int:
    """Bytes that a token adds to the cache, over the whole mesh without replicas."""
    entries = slots(work.model, work.kind, Layout())
    per_token = [(layers, slot) for layers, each in entries.values() for slot in each.values() if slot.per == "token"]
    return sum(layers * math.prod(slot.shape) * _itemsize(work, slot) for layers, slot in per_token)


def _itemsize(work: Workload, slot: Slot) -> int:
    return work.itemsize if slot.dtype is None else jnp.dtype(slot.dtype).itemsize


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
    work, found, representative = device.work, device.found, device_step(device.work.representative())
    gradients, layers = _gradients(work), range(len(found.layers))
    through = any(use.layer is not None and device.trains(use) for use in found.uses)
    of_layers = sum(numbers for path, numbers in gradients.items() if path in device.layered)
    total, itemsize = sum(gradients.values()), work.itemsize
    held, sums, saved = trained(work), _sums(work, total), layer_memory.kept(representative) if through else 0
    state = held.optimizer

    for layer in layers:
        forward = layer_memory.forward(representative, layer, through and work.remat == "none")
        yield Memory(
            held.parameters + _gathered(device, found.by_layer[layer]), sums, state, saved + forward.bytes, 0, 0
        )
    (use,) = (use for use in found.uses if use.name == "cross_entropy")
    (tokens, labels), width = kernel_costs.logits(device, use), use.shapes[0][-1]
    trains = found.parameter(use) in gradients
    if chunked := kernel_costs.loss(device, use):
        # A chunk's logits and their gradient, that of the stream, and that of the unembedding, whole along `fsdp`.
        around = saved + itemsize * (_stream(device, use) + 2 * tokens * width)
        logits = chunked.tokens * chunked.labels * (4 + itemsize)
        # Of one chunk it is made when the logits are gone.
        whole_table = 4 * chunked.labels * width if chunked.chunks > 1 and trains else 0
        # A table that is no copy in this dtype is copied to be padded.
        if found.parameter(use) in work.base and chunked.labels > labels:
            around += itemsize * chunked.labels * width
        yield Memory(held.parameters + _tables(device), sums + whole_table, state, around, logits, 0)
        waits, tables = 0, (4 if work.batch_shards == 1 else itemsize) * (total - of_layers)
    else:
        logits = tokens * labels
        # A TPU makes an array of the logits' gradient for that of a table which is sharded over `fsdp`. Otherwise the
        # products that read it compute it from the logits.
        is_array = work.platform != "tpu" or (trains and device.is_gathered(use))
        narrow = itemsize if is_array else 0
        yield Memory(held.parameters + _tables(device), sums, state, saved, logits * (4 + narrow), 0)
        # That of the unembedding comes after the layers, for which the narrow copy waits, or else the logits.
        waits = logits * (narrow or 4) if trains and work.dtype != "float32" else 0
        tables = 0
    for layer in layers if through else ():
        uses, backward = found.by_layer[layer], layer_memory.backward(representative, layer)
        gathered = _gathered(device, _of_module(uses, backward.at))
        # The gradients of the last matrices wait to be added over `fsdp`.
        waiting = [use for use in _last(uses) if found.parameter(use) in gradients]
        made = sums + tables + itemsize * of_layers + _gathered(device, waiting)
        yield Memory(held.parameters + gathered, made, state, saved + backward.bytes, waits, 0)
    yield Memory(4 * _trainable(work) + _base(work), sums or itemsize * total, state, 0, 0, 0)


def _stream(device: DeviceStep, use: RecordedOp) -> int:
    """Numbers of the stream that an operation reads gathered."""
    gather = next(each for each in device.found.uses if each.name == "gather" and each.results[0] in use.operands)
    return math.prod(device.operand(gather, 0))


def _inference(device: DeviceStep) -> Iterator[Memory]:
    """A layer, and the unembedding of the last tokens."""
    work, found, representative = device.work, device.found, device_step(device.work.representative())
    held = work.itemsize * sum(work.stored(d.axes, d.shape) for d in work.parameters.values())
    cache = kv_cache(work) + _tiled_copies(work)
    tables = [use for use in found.by_layer[None] if use.name in ("look_up", "logits")]
    # A GPU gathers a tied table once for both of its uses.
    kept = work.platform != "tpu" and len({found.parameter(use) for use in tables}) < len(tables)
    held += _tables(device) if kept else 0
    for layer in range(len(found.layers)):
        uses, forward = found.by_layer[layer], layer_memory.forward(representative, layer, False)
        peak, read = uses[forward.at], 0
        if peak.name == "attention":  # the keys, then the values, of the layer
            read = work.itemsize * math.prod(device.operand(peak, 1))
        # With kernels a matrix is gathered shortly before it is used.
        gathered = _gathered(device, uses[forward.at :] if work.runs_kernels else uses)
        yield Memory(held + gathered, 0, 0, forward.bytes + read, 0, cache)
    (use,) = (use for use in found.uses if use.name == "logits")
    yield Memory(
        held + (0 if kept else _tables(device)), 0, 0, 0, 4 * math.prod(kernel_costs.logits(device, use)), cache
    )


def _gathered(device: DeviceStep, uses: Iterable[RecordedOp]) -> int:
    """Bytes of the matrices of these operations, whole along `fsdp` while they are used."""
    return sum(_whole(device, use) for use in uses if use.name == "linear")


def _whole(device: DeviceStep, use: RecordedOp) -> int:
    """Bytes of the matrix of an operation if it is gathered along `fsdp`."""
    return device.work.itemsize * device.matrix(use) if device.is_gathered(use) else 0


def _of_module(uses: Sequence[RecordedOp], at: int) -> list[RecordedOp]:
    """Return the operations of the module in which one stands, or of those before it that it reads from."""
    if uses[at].name == "attention":
        return [use for use in uses if use.scope.startswith(uses[at].scope)]
    return _last(uses)


def _last(uses: Sequence[RecordedOp]) -> list[RecordedOp]:
    """Return the products that read the last gathered stream of a layer."""
    gathered = [use.results[0] for use in uses if use.name == "gather"]
    return [use for use in uses if use.name == "linear" and use.operands[0] == gathered[-1]]


def _tables(device: DeviceStep) -> int:
    """Bytes of the larger table while it is whole along `fsdp`."""
    uses = device.found.by_layer[None]
    return max(_whole(device, use) for use in uses if use.name in ("look_up", "logits", "cross_entropy"))
