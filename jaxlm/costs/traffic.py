"""What a step sends between devices, in closed form: the collectives that XLA's partitioner places for the table of
logical axes in `jaxlm.sharding`."""

import math
from typing import NamedTuple

from jaxlm.costs import operations
from jaxlm.costs.workload import Workload


class Collective(NamedTuple):
    """A collective that a step runs `times` times over mesh axes. `bytes` is the whole of it on one device: what an
    all-gather gives, what a reduce-scatter or an all-reduce takes."""

    kind: str
    axes: tuple[str, ...]
    times: int
    bytes: int
    of: str


def collectives(work: Workload) -> list[Collective]:
    """All of a step; those over axes of one device are left out."""
    found = [*_parameters(work), *_stream(work)]
    sizes = work.mesh.axes()
    return [c for c in found if math.prod(sizes[axis] for axis in c.axes) > 1 and c.times * c.bytes]


def _parameters(work: Workload) -> list[Collective]:
    """Over `fsdp`, matrices are gathered for the forward and again for the backward pass of each microbatch, and their
    gradients are summed, each device keeping its part; over `data`, gradients are summed once per step."""
    leaves = operations.parameters(work.model)
    width, found = work.width_bytes, []
    train = work.kind == "train"
    each = work.microbatches if train else 1
    for path, d in leaves.items():
        parted = "embed" in d.axes
        stack = math.prod(d.shape[i] for i in d.stack)
        numbers = math.prod(work.local(axis, size) for axis, size in zip(d.axes, d.shape, strict=True)) // stack
        if parted:
            found.append(Collective("all-gather", ("fsdp",), each * stack * (2 if train else 1), width * numbers, path))
            if train:
                found.append(Collective("reduce-scatter", ("fsdp",), each * stack, width * numbers, path))
        elif train:
            found.append(Collective("all-reduce", ("fsdp",), each, width * numbers * stack, path))
    if train:
        stored = sum(work.stored(d.axes, d.shape) for d in leaves.values())
        wide = 4 if work.microbatches > 1 else width
        found.append(Collective("all-reduce", ("data",), 1, wide * stored, "gradients"))
    return found


def _stream(work: Workload) -> list[Collective]:
    """Over `tensor`, the stream is gathered before attention and feed-forward and summed behind them, each device
    keeping its part of the sequence (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2), or all of it where the
    sequence does not divide."""
    model, tensor = work.model, ("tensor",)
    whole = work.width_bytes * work.rows() * work.queries * model.width
    parted = work.local("stream", work.queries) < work.queries
    train = work.kind == "train"
    each = work.microbatches if train else 1
    blocks = 2 * model.layers
    sums = blocks + 1  # behind each block and the embedding
    gathers = blocks + (1 if train else 0)  # before each block; in inference only the last token is unembedded
    if train:  # the backward pass transposes one into the other
        sums, gathers = sums + gathers, gathers + sums
        if work.remat != "none":  # all but the sum behind the feed-forward runs again
            sums, gathers = sums + model.layers, gathers + blocks
    found = []
    if parted:
        found.append(Collective("reduce-scatter", tensor, each * sums, whole, "stream"))
        found.append(Collective("all-gather", tensor, each * gathers, whole, "stream"))
    else:
        found.append(Collective("all-reduce", tensor, each * sums, whole, "stream"))
    if train:  # the maximum and the sum of each token's logits
        found.append(Collective("all-reduce", tensor, each * 2, 4 * work.rows() * work.queries, "loss"))
    return found
