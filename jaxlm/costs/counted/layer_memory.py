"""Memory of one layer on one device: the activations kept for its backward pass, and its working memory.

Both follow from the recording: a value is there from the operation that makes it to the last that reads it. What XLA
keeps of an operation besides was read from its programs (`jaxlm.lowering.buffers`), of plain JAX and of steps with
kernels.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxlm.costs.counted import attention
from jaxlm.costs.counted.device import DeviceStep
from jaxlm.costs.counted.operations import saved
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.workload import memoized

# What XLA computes number by number, in the place of what it reads; and what it does so where no kernels run.
_ALWAYS_IN_PLACE = ("add", "scale", "dropout", "activation", "elementwise")
_IN_PLACE = (*_ALWAYS_IN_PLACE, "rope", "gated")


class LayerPeak(NamedTuple):
    """Bytes of a layer where it needs most, and the place of the operation at which it does."""

    bytes: int
    at: int


@memoized
def kept(device: DeviceStep) -> int:
    """Bytes that all layers keep for their backward pass: what each begins with and what has the names that are kept,
    with attention's output its log-sum-exp; without rematerialisation all that it reads. Masks of dropout outside of
    layers stay in any case."""
    work, found = device.work, device.found
    total = sum(math.prod(device.operand(use, 0)) for use in found.by_layer[None] if use.name == "dropout")
    for layer, begin in enumerate(found.layers):
        uses = found.by_layer[layer]
        if work.remat == "none":
            bytes_ = _read(device, uses)
        else:
            names = () if work.remat == "full" else work.remat
            named = {value: use for use in uses for value in use.results if found.names.get(value) in names}
            values = {*_begin(device, begin), *named}
            bytes_ = work.itemsize * _numbers(device, values)
            bytes_ += sum(_log_sums(device, use) for use in named.values() if use.name == "attention")
        total += uses[0].times * bytes_
    return total


def _begin(device: DeviceStep, begin: Iterable[int]) -> set[int]:
    """Return the streams with which a layer begins."""
    return device.found.activations & set(begin) & device.numbers.keys()


def _numbers(device: DeviceStep, values: Iterable[int]) -> int:
    """Numbers of these values, each buffer once."""
    return sum(device.numbers[value] for value in {device.same(value) for value in values})


def _read(device: DeviceStep, uses: Sequence[RecordedOp]) -> int:
    """Bytes that the backward pass of operations reads, which are kept where nothing is computed again.

    Without kernels XLA keeps the float32 insides of a norm instead of what it reads, and the scores of attention with
    its float32 result. The kernel for attention has its result in another order than the product that reads it.
    """
    itemsize, values, more = device.work.itemsize, set(), 0
    windows = {use.options["window"] for use in device.found.uses if use.name == "attention"}
    for use in uses:
        if use.name == "norm" and (device.shares_norm(use) or not device.work.runs_kernels):
            more += 4 * 3 * math.prod(device.operand(use, 0))
        elif use.name == "dropout":
            more += math.prod(device.operand(use, 0))  # a mask
        elif use.name == "attention" and attention.kernel(device, use):
            values.update(saved(device, use))
            more += itemsize * math.prod(device.result(use)) + _log_sums(device, use)
        elif use.name == "attention":
            values.update(use.operands[:3])
            # Slopes of a cap, and where windows are of some layers alone the mask, which is another in each.
            each = itemsize + 4 + 4 * bool(use.options["soft_cap"]) + (len(windows) > 1)
            more += 4 * math.prod(device.result(use)) + each * attention.scores(device, use)
        else:
            values.update(saved(device, use))
    return itemsize * _numbers(device, values) + more


def _log_sums(device: DeviceStep, use: RecordedOp) -> int:
    """Bytes of the log-sum-exps that a kernel for attention keeps with its result."""
    sizes = attention.heads(device, use)
    logs = 4 * sizes.rows * sizes.queries * sizes.kv_heads * sizes.groups
    return logs if attention.kernel(device, use) else 0


@memoized
def forward(device: DeviceStep, layer: int, keeps: bool) -> LayerPeak:
    """Return the forward pass of a layer where it is largest: in attention without a kernel, or else where most values
    are there. `keeps`: all that the backward pass reads is kept."""
    uses, work = device.found.by_layer[layer], device.work
    begin, last = _begin(device, device.found.layers[layer]), _last_reads(device, uses)
    plain = _without_kernel(device, uses)
    peaks = []
    for i in plain or range(len(uses)):
        use = uses[i]
        there = {device.same(value) for value in begin.union(*(each.results for each in uses[: i + 1]))}
        if plain:
            through = {value for value in there if last.get(value, -1) > i} - set(use.results)
            result = 0 if work.platform == "tpu" else 4 * math.prod(device.result(use))
            bytes_ = work.itemsize * _numbers(device, through) + result + _scores(device, use, keeps)
        else:
            # A GPU's program frees a buffer after the operation that follows the last one that reads it. A TPU's frees
            # it at once, and works in place where it can.
            is_tpu = work.platform == "tpu"
            kept_from = i if is_tpu else i - 1
            live = {value for value in there if last.get(value, -1) >= kept_from or value in use.results}
            if is_tpu and use.name in _ALWAYS_IN_PLACE:
                live -= set(use.results)
            bytes_ = work.itemsize * _numbers(device, live)
        peaks.append(LayerPeak(bytes_, i))
    return max(peaks)


@memoized
def backward(device: DeviceStep, layer: int) -> LayerPeak:
    """Return the backward pass of a layer where it is largest: in attention without a kernel, or else where most of
    what it reads and most gradients are there."""
    uses, itemsize = device.found.by_layer[layer], device.work.itemsize
    plain, peaks = _without_kernel(device, uses), []
    for i in plain or range(len(uses)):
        if plain:
            peaks.append(LayerPeak(_softmax_backward(device, layer, i), i))
        else:
            read = _read(device, uses[: i + 1])
            peaks.append(LayerPeak(read + itemsize * _numbers_of_gradients(device, layer, i), i))
    return max(peaks)


def _without_kernel(device: DeviceStep, uses: Sequence[RecordedOp]) -> list[int]:
    """Return the places of attention that XLA computes: its scores are more than all else."""
    return [i for i, use in enumerate(uses) if use.name == "attention" and attention.kernel(device, use) is None]


def _last_reads(device: DeviceStep, uses: Sequence[RecordedOp]) -> dict[int, int]:
    """Return the place of the last operation of a layer that reads each value, its end for its result."""
    found = {device.same(value): i for i, use in enumerate(uses) for value in use.operands}
    return found | {device.same(value): len(uses) for value in uses[-1].results}


def _numbers_of_gradients(device: DeviceStep, layer: int, at: int) -> int:
    """Numbers of the gradients that are there while one operation's are made: of values that it reads or makes, and of
    those that later operations read and earlier ones make."""
    uses, there = device.found.by_layer[layer], set()
    begin = _begin(device, device.found.layers[layer])
    made = {value: i for i, use in enumerate(uses) for value in use.results} | dict.fromkeys(begin, -1)
    last = {value: i for i, use in enumerate(uses) for value in use.operands}
    for value, maker in made.items():
        # A buffer is freed after the operation that follows.
        if maker <= at + 1 and last.get(value, len(uses)) >= at:
            there.add(value)
    in_place = uses[at].name in _IN_PLACE and not device.work.runs_kernels
    return _numbers(device, there - set(uses[at].results) if in_place else there)


def _softmax_backward(device: DeviceStep, layer: int, at: int) -> int:
    """Bytes in the backward pass of attention without a kernel.

    On a GPU products that give the gradients of matrices come last, and what they read is still there: the inputs of
    the layer's products, and the gradients of what later ones make; of the stream, its gradient and the result there
    are float32 copies. A TPU keeps less.
    """
    uses, work = device.found.by_layer[layer], device.work
    use, itemsize = uses[at], device.work.itemsize
    begin = _begin(device, device.found.layers[layer])
    stream, result = _numbers(device, begin), math.prod(device.result(use))
    operands = _numbers(device, use.operands[:3])
    later = [each for each in uses[at + 1 :] if each.name == "linear"]
    widths = [math.prod(device.result(each)) for each in later if "residual" not in each.marker.results[0]]
    if work.platform == "tpu":
        around = itemsize * (2 * stream + operands + 2 * result + sum(widths[-2:]))
    else:
        inputs = {value for each in uses if each.name == "linear" for value in each.operands[:1]}
        around = itemsize * (4 * stream + _numbers(device, inputs) + operands + 2 * result + sum(widths))
        around += 4 * (2 * stream + result)
    return around + _scores(device, use, backward=True)


def _scores(device: DeviceStep, use: RecordedOp, keeps: bool = False, backward: bool = False) -> int:
    """Bytes of attention's scores that a layer works with at once, besides those that are kept. XLA for a TPU makes
    weights of float32 scores within the product that reads them, and the mask an array of their size; for a GPU it
    makes weights an array in the dtype, and to keep what it makes also exponentials and the mask's values."""
    work, fused = device.work, device.work.platform == "tpu"
    numbers, itemsize = attention.scores(device, use), work.itemsize
    if backward:  # a gradient, scores, and weights besides them
        copied = not (fused or work.remat == "none" or work.dtype == "float32")
        return numbers * (itemsize + 4 + (itemsize if copied else 0))
    if fused:
        return numbers * (4 + 1)
    return numbers * (4 + 4 + 4 + 1 if keeps else 4 + itemsize)
