"""What lies in the memory of one device at the peak of a step, in closed form over the abstract tree.

A step goes through phases. What it holds at its peak is the largest of them, not the sum of all that it ever holds.
Which arrays XLA keeps in each was read from its programs (`jaxlm.lowering.buffers`); docs/memory.md holds the two
against each other.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.costs import operations
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


def memory(work: Workload) -> Memory:
    """Of a step of this workload on one device of its mesh."""
    phases = _training(work) if work.kind == "train" else _inference(work)
    return max(phases, key=lambda phase: phase.total)


def kv_cache(work: Workload) -> int:
    """Bytes of keys and values that one device holds for its sequences."""
    return work.model.layers * 2 * work.width_bytes * _keys(work)


def kv_bytes_per_token(work: Workload) -> int:
    """Bytes of keys and values that a token adds to the cache, over the whole mesh without replicas."""
    attention = work.model.attention
    return 2 * work.model.layers * attention.kv_heads * attention.head_width * work.width_bytes


def kept(work: Workload) -> int:
    """Bytes that all layers keep for their backward pass: the stream before each and what has the names that are
    kept; without rematerialisation all that it reads, with each layer's matrices in the form that its products took."""
    part, width = _parts(work), work.width_bytes
    if work.remat == "none":
        return work.model.layers * (_wide(work) + part.scores * (4 + width))
    names = () if work.remat == "full" else work.remat
    named = _named(part)
    return work.model.layers * width * (part.stream + sum(named[name] for name in names if name in named))


def _training(work: Workload) -> Iterator[Memory]:
    """The end of the forward pass, the loss, the first backward pass of a layer, and the update."""
    leaves = operations.parameters(work.model)
    stored = {path: work.stored(d.axes, d.shape) for path, d in leaves.items()}
    total, width, part, whole = sum(stored.values()), work.width_bytes, _parts(work), _gathered(work)
    of_layers = sum(numbers for path, numbers in stored.items() if path.startswith("layers/"))
    held = 4 * total + (total * width if work.dtype != "float32" else 0)
    sums = 4 * total if work.microbatches > 1 else 0
    state = 4 * sum(operations.state_numbers(work, d) for d in leaves.values()) + (4 * total if work.average else 0)
    logits, saved = part.tokens * work.local("act_vocab", work.model.vocabulary), kept(work)

    yield Memory(held + whole.layer, sums, state, saved + _forward(work), 0, 0)
    yield Memory(held + whole.table, sums, state, saved, logits * (4 + width), 0)
    made = sums + width * of_layers
    # That of the unembedding is made from the gradient of the logits, which waits until the layers are done.
    yield Memory(held + whole.attention, made + whole.hidden, state, saved + _backward(work), logits * width, 0)
    yield Memory(4 * total, sums or 4 * total, state, 0, 0, 0)


def _inference(work: Workload) -> Iterator[Memory]:
    """A layer, and the unembedding of the last tokens."""
    leaves, whole = operations.parameters(work.model).values(), _gathered(work)
    held, cache = work.width_bytes * sum(work.stored(d.axes, d.shape) for d in leaves), kv_cache(work)
    logits = 4 * work.rows() * work.local("act_vocab", work.model.vocabulary)
    read = work.width_bytes * _keys(work)  # the keys, then the values, of the layer
    yield Memory(held + whole.layer, 0, 0, _forward(work) + read, 0, cache)
    yield Memory(held + whole.table, 0, 0, 0, logits, cache)


class _Parts(NamedTuple):
    """Numbers on one device of the arrays in a layer: the stream between blocks, what is as wide as it and whole in
    the sequence, as wide as all query heads, as all key heads and as the hidden layer, and attention's scores."""

    tokens: int
    stream: int
    whole: int
    heads: int
    kv_heads: int
    hidden: int
    scores: int
    gated: bool


def _parts(work: Workload) -> _Parts:
    model, attention = work.model, work.model.attention
    tokens, width = work.rows() * work.queries, attention.head_width
    heads = work.local("act_heads", attention.heads)
    return _Parts(
        tokens=tokens,
        stream=work.rows() * work.local("stream", work.queries) * model.width,
        whole=tokens * model.width,
        heads=tokens * heads * width,
        kv_heads=tokens * work.local("act_kv_heads", attention.kv_heads) * width,
        hidden=tokens * work.local("act_ff", model.feed_forward.hidden),
        scores=tokens * heads * work.sequence,
        gated=model.feed_forward.gated,
    )


def _named(part: _Parts) -> dict[str, int]:
    """Numbers of each activation of a layer that has a name."""
    sizes = {"query": part.heads, "key": part.kv_heads, "value": part.kv_heads, "attention": part.heads}
    return {**sizes, "up": part.hidden, **({"gate": part.hidden} if part.gated else {})}


def _wide(work: Workload) -> int:
    """Bytes that the backward pass of a layer reads, but for scores: of norms their float32 insides and their results,
    of attention its operands and its float32 result, of the hidden layer each step of the activation."""
    part, width = _parts(work), work.width_bytes
    hidden = 6 if part.gated else 5
    narrow = 2 * part.whole + 2 * part.heads + 2 * part.kv_heads + hidden * part.hidden
    return width * narrow + 4 * (6 * part.stream + part.heads)


def _forward(work: Workload) -> int:
    """Bytes of a layer's forward pass where it is largest, in the softmax: scores and their exponentials in float32,
    which become weights in the dtype. To keep them for the backward pass XLA makes the least number and the mask, which
    select of them, arrays of their size."""
    part, width = _parts(work), work.width_bytes
    around = 2 * width * (part.stream + part.heads + part.kv_heads)
    if work.kind == "train" and work.remat == "none":
        return part.scores * (4 + 4 + 4 + 1) + around
    return part.scores * (4 + width) + 4 * part.heads


def _backward(work: Workload) -> int:
    """Bytes of a layer's backward pass where it is largest, in the softmax: float32 scores, weights and the gradient
    of these in the dtype; the stream's gradient and its norm in float32, attention's operands; and what the gradients of
    the hidden layer's matrices are yet to be made of."""
    part, width = _parts(work), work.width_bytes
    around = width * (4 * part.stream + 2 * part.whole + 4 * part.heads + 2 * part.kv_heads)
    around += 4 * (2 * part.stream + part.heads) + width * (3 if part.gated else 2) * part.hidden
    if work.remat == "none":
        return part.scores * (4 + width) + around
    return part.scores * (4 + 2 * width) + around


def _keys(work: Workload) -> int:
    """Numbers of a layer's keys in the cache, and as many of its values."""
    attention = work.model.attention
    heads = work.local("act_kv_heads", attention.kv_heads)
    return work.rows() * work.sequence * heads * attention.head_width


class _Gathered(NamedTuple):
    """Bytes of matrices that are whole along `fsdp` while they are used: those of a layer, those of its attention and
    of the hidden layer's inputs alone, and the larger table."""

    layer: int
    attention: int
    hidden: int
    table: int


def _gathered(work: Workload) -> _Gathered:
    if work.mesh.fsdp == 1:
        return _Gathered(0, 0, 0, 0)
    sizes = {}
    for path, d in operations.parameters(work.model).items():
        if d.inputs:
            numbers = math.prod(work.local(axis, size) for axis, size in zip(d.axes, d.shape, strict=True))
            sizes[path] = work.width_bytes * (numbers if d.table else numbers // work.model.layers)
    layer = {path: size for path, size in sizes.items() if path.startswith("layers/")}
    return _Gathered(
        layer=sum(layer.values()),
        attention=sum(size for path, size in layer.items() if path.startswith("layers/attention/")),
        hidden=sum(size for path, size in layer.items() if path.endswith(("/up", "/gate"))),
        table=max(size for path, size in sizes.items() if path not in layer),
    )
