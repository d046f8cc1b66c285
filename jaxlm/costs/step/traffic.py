"""Collectives of a step, in closed form: those that XLA's partitioner places for the rules of logical axes in
`jaxlm.parallel.rules`."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.costs.step import kernel_costs
from jaxlm.costs.step.parameters import ModelPart, goes_back_to, multiplies, parameters
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
    """Return all collectives of a step, except over axes of size 1."""
    found = [*_parameters(work), *_stream(work)]
    if work.kind == "train":
        found += [*_copies(work), *_sums(work), *_optimizer(work)]
    return [c for c in found if work.layout.over(c.axes) > 1 and c.times * c.bytes]


def _parameters(work: Workload) -> Iterator[Collective]:
    """Over `fsdp`, a layer's matrices are gathered together for its forward and again for its backward pass of each
    microbatch, and their gradients are summed, each device keeping its part; those of vectors are summed whole.

    A table is gathered once, since forward and backward pass of the unembedding follow each other, and summed for each
    of its uses. What is looked up is the same for all microbatches: XLA gathers it before their loop. Not so where each
    part of `data` has a loop of its own: there JAX 0.10's gathers it in each microbatch, a tied one for each of its
    three uses, and matrices that the backward pass computes with again in post-norm layers once more.
    """
    fsdp, itemsize, L, train = ("fsdp",), work.itemsize, work.model.num_layers, work.kind == "train"
    each = work.microbatches if train else 1
    passes = 2 if train and goes_back_to(work.model, work.frozen) <= ModelPart.LAYERS else 1
    gathered = matrices = vectors = 0
    for path, d in parameters(work.model).items():
        numbers = math.prod(work.local(axis, size) for axis, size in zip(d.axes, d.shape, strict=True))
        trains = train and path not in work.frozen
        if d.table:
            looked_up, unembeds = path != "unembedding", multiplies(work.model, path, d)
            yield Collective("all-gather", fsdp, 1 if looked_up else each, itemsize * numbers, path)
            yield Collective("reduce-scatter", fsdp, each * trains * (looked_up + unembeds), itemsize * numbers, path)
        elif "embed" in d.axes:
            gathered += numbers // L
            matrices += trains * numbers // L
        else:
            vectors += trains * numbers
    yield Collective("all-gather", fsdp, each * L * passes, itemsize * gathered, "layers")
    yield Collective("reduce-scatter", fsdp, each * L, itemsize * matrices, "layers")
    yield Collective("all-reduce", fsdp, each, 4 * vectors, "vectors")  # added up in float32


def _copies(work: Workload) -> Iterator[Collective]:
    """Over `tensor`, gradients of key/value heads of which several devices have copies: each device holds the matrices
    of all heads. Where one has one head, it adds its gradient to those of the same, and gathers the others; else the
    gradients of all copies are gathered. The sum is counted as if the devices with the same were all of the axis."""
    if not work.replicated_kv_heads:
        return
    kv_heads, tensor = work.model.attention.num_kv_heads, work.head_shards
    shared = {path: d for path, d in parameters(work.model).items() if "kv_heads" in d.axes and path not in work.frozen}
    one = (
        work.itemsize * sum(work.stored(d.axes, d.shape) for d in shared.values()) // work.model.num_layers // kv_heads
    )
    times = work.microbatches * work.model.num_layers
    if tensor % kv_heads:
        yield Collective("all-gather", ("tensor",), times, one * work.model.attention.kv_heads_over(tensor), "copies")
        return
    yield Collective("all-reduce", ("tensor",), times, one, "copies")
    yield Collective("all-gather", ("tensor",), times, one * kv_heads * (kv_heads > 1), "copies")


def _sums(work: Workload) -> Iterator[Collective]:
    """Over `data`, gradients are summed once per step."""
    leaves = parameters(work.model).items()
    stored = sum(work.stored(d.axes, d.shape) for path, d in leaves if path not in work.frozen)
    wide = 4 if work.microbatches > 1 else work.itemsize
    yield Collective("all-reduce", ("data",), 1, wide * stored, "gradients")


def _optimizer(work: Workload) -> Iterator[Collective]:
    """Muon's updates move in float32 until each matrix is whole on one device, and back
    (`jaxlm.parallel.collectives.map_whole`): one axis after the other goes to the stack, which is padded to
    the number of devices. Along an axis that shards a matrix that is an all-to-all; along others a device keeps its
    shard, and gathers afterwards."""
    if work.optimizer.kind != "muon":
        return
    moved: Counter[tuple[str, str]] = Counter()
    for path, d in parameters(work.model).items():
        if d.projection and path not in work.frozen:
            stack, devices = math.prod(d.shape[i] for i in d.stack), work.layout.size
            held = 4 * work.stored(d.axes, d.shape) // stack * math.ceil(stack / devices) * devices
            for axis, size in reversed(list(work.layout.items())):
                parted = any(work.parts(axis, *each) > 1 for each in zip(d.axes, d.shape, strict=True))
                moved["all-to-all" if parted else "all-gather", axis] += held
                held //= 1 if parted else size
    for (kind, axis), held in moved.items():
        yield Collective(kind, (axis,), 2 if kind == "all-to-all" else 1, held, "optimizer")


def _stream(work: Workload) -> list[Collective]:
    """Over `tensor`, the stream is gathered before attention and feed-forward and summed behind them, each device
    keeping its part of the sequence (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2), or all of it where the
    sequence does not divide. A loss in kernels sums its gradient whole. Of few logits, which kernels leave to XLA,
    it is counted like the others, as TPUs do it; GPUs sum it whole, in float32."""
    model, tensor = work.model, ("tensor",)
    whole = work.itemsize * work.rows() * work.queries * model.d_model
    parted = work.local("residual", work.queries) < work.queries
    train = work.kind == "train"
    each = work.microbatches if train else 1
    blocks = 2 * model.num_layers
    sums = blocks + 1  # behind each block and the embedding
    gathers = blocks + (1 if train else 0)  # before each block; in inference only the last token is unembedded
    whole_sums = 0
    if train:  # the backward pass transposes one into the other, as far as it goes
        first = goes_back_to(model, work.frozen)
        through = blocks if first <= ModelPart.LAYERS else 0
        sums, gathers = (
            sums + through + (first <= ModelPart.FINAL_NORM),
            gathers + through + (first == ModelPart.LOOK_UP),
        )
        whole_sums = int(kernel_costs.loss(work) is not None and first <= ModelPart.FINAL_NORM)
        if through and work.remat != "none":  # the sum behind the feed-forward runs again where a norm reads it
            sums, gathers = sums + (1 if model.norm_placement == "before" else 2) * model.num_layers, gathers + blocks
    found = []
    if parted:
        found.append(Collective("reduce-scatter", tensor, each * (sums - whole_sums), whole, "stream"))
        found.append(Collective("all-gather", tensor, each * gathers, whole, "stream"))
    found.append(Collective("all-reduce", tensor, each * (whole_sums if parted else sums), whole, "stream"))
    if train:  # the maximum of each token's logits; then, sent together, their sum and the one at its target
        maxima = 4 * work.rows() * work.queries
        found.append(Collective("all-reduce", tensor, each, maxima, "loss"))
        found.append(Collective("all-reduce", tensor, each, 2 * maxima, "loss"))
    return found
