"""Memory of one device at the peak of a step, in closed form over the abstract tree.

A step goes through phases. What it holds at its peak is the largest of them, not the sum of all that it ever holds.
Which arrays XLA keeps in each was read from its programs (`jaxlm.lowering.buffers`); docs/memory.md holds the two
against each other.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.costs.step import kernel_costs, operations
from jaxlm.costs.step.layer_memory import backward, forward, kept, parts
from jaxlm.costs.step.parameters import ModelPart, goes_back_to, parameters
from jaxlm.costs.workload import Workload


class Memory(NamedTuple):
    """Bytes on one device at the peak of a step: of each kind, what is there at that moment.

    `parameters`: the float32 masters, the copy in the dtype that computes, and matrices gathered over `fsdp`; in
    inference that copy with its gathered matrices alone. `gradients`: those of the layers in that dtype and whole ones
    that wait to be added over `fsdp`, and the float32 sums of microbatches. `optimizer`: its state, and the average of
    the parameters where there is one. `activations`: what layers keep for the backward pass, and the work of one layer.
    `logits`: float32 with their gradient, or the gradient alone. `kv_cache`: keys and values.
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
    fused = work.platform == "tpu"
    phases = _training(work, fused) if work.kind == "train" else _inference(work, fused)
    return max(phases, key=lambda phase: phase.total)


def kv_cache(work: Workload) -> int:
    """Bytes of keys and values that one device holds for its sequences."""
    return 2 * work.itemsize * sum(_keys(work, tokens) for tokens in work.cached)


def kv_bytes_per_token(work: Workload) -> int:
    """Bytes of keys and values that a token adds to the cache, over the whole mesh without replicas."""
    each = [block.attention.num_kv_heads * block.attention.head_dim for block in work.model.layers]
    return 2 * sum(each) * work.itemsize


def trained(work: Workload) -> Memory:
    """Return the memory of all parameters in training: master and working copies, optimizer state, and gradients of
    parameters that are not frozen. Gradients of the tables and the working copy of the layers never coexist."""
    leaves, moved = parameters(work.model).values(), sum(_gradients(work).values())
    total = sum(work.stored(d.axes, d.shape) for d in leaves)
    working = total * work.itemsize if work.dtype != "float32" else 0
    state = 4 * sum(operations.state_numbers(work, d) for d in leaves) + (4 * total if work.average else 0)
    return Memory(4 * total + working, moved * work.itemsize + _sums(work, moved), state, 0, 0, 0)


def _gradients(work: Workload) -> dict[str, int]:
    """Numbers of each parameter's gradient, of what is not frozen."""
    leaves = parameters(work.model).items()
    return {path: work.stored(d.axes, d.shape) for path, d in leaves if path not in work.frozen}


def _sums(work: Workload, numbers: int) -> int:
    """Bytes of gradients added over microbatches."""
    return 4 * numbers if work.microbatches > 1 else 0


def _training(work: Workload, fused: bool) -> Iterator[Memory]:
    """The end of the forward pass, the loss, the first backward pass of a layer, and the update."""
    gradients, through = _gradients(work), goes_back_to(work.model, work.frozen) <= ModelPart.LAYERS
    of_layers = sum(numbers for path, numbers in gradients.items() if path.startswith("layers/"))
    total, itemsize, part, whole = sum(gradients.values()), work.itemsize, parts(work), _gathered(work)
    held, sums, saved = trained(work), _sums(work, total), kept(work) if through else 0
    state = held.optimizer

    keeps = work if through else work.with_training(remat="full")
    yield Memory(held.parameters + whole.layer, sums, state, saved + forward(keeps, fused), 0, 0)
    if chunked := kernel_costs.loss(work):
        # A chunk's logits and their gradient, that of the stream, and that of the unembedding, whole along `fsdp`.
        around = saved + itemsize * (part.stream + 2 * part.whole)
        logits = chunked.tokens * chunked.labels * (4 + itemsize)
        whole_table = 4 * chunked.labels * work.model.d_model
        yield Memory(held.parameters + whole.table, sums + whole_table, state, around, logits, 0)
        waits, tables = 0, (4 if work.batch_shards == 1 else itemsize) * (total - of_layers)
    else:
        logits = part.tokens * work.local("act_vocab", work.model.vocab_size)
        yield Memory(held.parameters + whole.table, sums, state, saved, logits * (4 + itemsize), 0)
        # That of the unembedding is made from the gradient of the logits, which waits until the layers are done if it
        # is a narrow copy.
        waits, tables = logits * itemsize if work.dtype != "float32" else 0, 0
    if through:
        made = sums + tables + itemsize * of_layers + (whole.hidden if _HIDDEN & gradients.keys() else 0)
        gathered = whole.hidden if kernel_costs.attention(work) else whole.attention
        yield Memory(held.parameters + gathered, made, state, saved + backward(work, fused), waits, 0)
    masters = 4 * sum(work.stored(d.axes, d.shape) for d in parameters(work.model).values())
    yield Memory(masters, sums or itemsize * total, state, 0, 0, 0)


_HIDDEN = {"layers/feed_forward/up", "layers/feed_forward/gate"}


def _inference(work: Workload, fused: bool) -> Iterator[Memory]:
    """A layer, and the unembedding of the last tokens."""
    leaves, whole = parameters(work.model).values(), _gathered(work)
    held, cache = work.itemsize * sum(work.stored(d.axes, d.shape) for d in leaves), kv_cache(work)
    logits = 4 * work.rows() * work.local("act_vocab", work.model.vocab_size)
    if kernel_costs.attention(work):
        gathered, read = whole.layer - whole.attention - whole.hidden, 0
    else:
        gathered, read = (
            whole.layer,
            work.itemsize * _keys(work, max(work.cached)),
        )  # the keys, then the values, of the layer
    yield Memory(held + gathered, 0, 0, forward(work, fused) + read, 0, cache)
    yield Memory(held + whole.table, 0, 0, 0, logits, cache)


def _keys(work: Workload, tokens: int) -> int:
    """Numbers of a layer's keys in a cache of so many tokens, and as many of its values."""
    attention = work.model.attention
    heads = work.local("act_kv_heads", attention.num_kv_heads)
    return work.rows() * tokens * heads * attention.head_dim


class _Gathered(NamedTuple):
    """Bytes of matrices that are whole along `fsdp` while they are used: those of a layer, of its attention and of its
    hidden layer's inputs alone, and the larger table."""

    layer: int
    attention: int
    hidden: int
    table: int


def _gathered(work: Workload) -> _Gathered:
    if work.layout["fsdp"] == 1:
        return _Gathered(0, 0, 0, 0)
    sizes = {}
    for path, d in parameters(work.model).items():
        if d.inputs:
            numbers = math.prod(work.local(axis, size) for axis, size in zip(d.axes, d.shape, strict=True))
            sizes[path] = work.itemsize * (numbers if d.table else numbers // work.model.num_layers)
    layer = {path: size for path, size in sizes.items() if path.startswith("layers/")}
    return _Gathered(
        layer=sum(layer.values()),
        attention=sum(size for path, size in layer.items() if path.startswith("layers/attention/")),
        hidden=sum(size for path, size in layer.items() if path in _HIDDEN),
        table=max(size for path, size in sizes.items() if path not in layer),
    )
