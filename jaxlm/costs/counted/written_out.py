"""The place of a written-out layer in the backward pass: layers after it keep nothing any more, and have gradients."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxlm.costs.counted.device import DeviceStep
from jaxlm.costs.counted.layer_memory import kept_by_layer


class LayerPlace(NamedTuple):
    """A run of a layer, as its backward pass finds the others.

    Attributes:
      kept: bytes that the layers before it keep.
      made: the share of the layers' gradients that is there, those of the layers after it.
      left: the share of the layers that have no gradients yet, itself included.
    """

    kept: int
    made: float
    left: float


def places(device: DeviceStep, layer: int, gradients: Mapping[str, int]) -> Iterator[LayerPlace]:
    """Yield the place of a layer's last run, whose backward pass comes first, and of its first run.

    `gradients`: the numbers of each parameter's gradient, by path.
    """
    recording = device.recording
    times = [recording.by_layer[each][0].times for each in range(len(recording.layers))]
    kept, sizes = [each.total for each in kept_by_layer(device)], _gradients_by_layer(device, times, gradients)
    for trip in dict.fromkeys((times[layer] - 1, 0)):
        before = _runs_before(times, layer, trip)
        until = [runs + (each == layer) for each, runs in enumerate(before)]
        made = 1 - _sum(until, sizes) / (_sum(times, sizes) or 1)
        yield LayerPlace(round(_sum(before, kept)), made, sum(until) / sum(times))


def _runs_before(times: Sequence[int], layer: int, trip: int) -> list[int]:
    """Return how often each layer has run before a run of one. Neighbours that run equally often take turns."""
    runs: list[int] = []
    for number, group in itertools.groupby(range(len(times)), key=times.__getitem__):
        members = list(group)
        if layer in members:
            runs += [trip + (each < layer) for each in members]
        else:
            runs += [number if members[0] < layer else 0] * len(members)
    return runs


def _gradients_by_layer(device: DeviceStep, times: Sequence[int], gradients: Mapping[str, int]) -> list[float]:
    """Return the numbers of the gradients of one run of each layer."""
    recording = device.recording
    read_by_layer = [
        {
            recording.parameters[value]
            for use in recording.by_layer[layer]
            for value in use.operands
            if value in recording.parameters
        }
        for layer in range(len(times))
    ]
    runs = {path: sum(n for n, paths in zip(times, read_by_layer, strict=True) if path in paths) for path in gradients}
    return [sum(gradients[path] / runs[path] for path in paths if path in gradients) for paths in read_by_layer]


def _sum(runs: Sequence[int], values: Sequence[float]) -> float:
    return sum(number * value for number, value in zip(runs, values, strict=True))
