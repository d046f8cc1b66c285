"""What lies in the memory of one device at the peak of a step, in closed form over the abstract tree.

A step goes through phases. What it holds at its peak is the largest of them, not the sum of all that it ever holds.
Which arrays XLA keeps in each was read from its programs (`jaxlm.lowering.buffers`); docs/memory.md holds the two
against each other.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

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


def memory(work: Workload, kind: str = "gpu") -> Memory:
    """Of a step of this workload on one device of its mesh, on a chip of this kind (`Chip.kind`): "tpu", or any other,
    for which XLA is taken to compile as for a GPU."""
    fused = kind == "tpu"
    phases = _training(work, fused) if work.kind == "train" else _inference(work, fused)
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
    named = _named(part) if work.model.feed_forward.gated else {**_named(part), "gate": 0}
    names = () if work.remat == "full" else work.remat
    return work.model.layers * width * (part.stream + sum(named[name] for name in names))


def trained(work: Workload) -> Memory:
    """What training has of each parameter: master and working copy, gradient and optimizer state. Gradients of the
    tables and the working copy of the layers are never there at once."""
    leaves = operations.parameters(work.model).values()
    total = sum(work.stored(d.axes, d.shape) for d in leaves)
    working = total * work.width_bytes if work.dtype != "float32" else 0
    state = 4 * sum(operations.state_numbers(work, d) for d in leaves) + (4 * total if work.average else 0)
    return Memory(4 * total + working, total * work.width_bytes + _sums(work, total), state, 0, 0, 0)


def _sums(work: Workload, numbers: int) -> int:
    """Bytes of gradients added over microbatches."""
    return 4 * numbers if work.microbatches > 1 else 0


def _training(work: Workload, fused: bool) -> Iterator[Memory]:
    """The end of the forward pass, the loss, the first backward pass of a layer, and the update."""
    stored = {path: work.stored(d.axes, d.shape) for path, d in operations.parameters(work.model).items()}
    of_layers = sum(numbers for path, numbers in stored.items() if path.startswith("layers/"))
    total, width, part, whole = sum(stored.values()), work.width_bytes, _parts(work), _gathered(work)
    held, sums, saved = trained(work), _sums(work, total), kept(work)
    logits, state = part.tokens * work.local("act_vocab", work.model.vocabulary), held.optimizer

    yield Memory(held.parameters + whole.layer, sums, state, saved + _forward(work, fused), 0, 0)
    yield Memory(held.parameters + whole.table, sums, state, saved, logits * (4 + width), 0)
    made = sums + width * of_layers + whole.hidden
    # That of the unembedding is made from the gradient of the logits, which waits until the layers are done if it is a
    # narrow copy.
    waits = logits * width if work.dtype != "float32" else 0
    yield Memory(held.parameters + whole.attention, made, state, saved + _backward(work, fused), waits, 0)
    yield Memory(4 * total, sums or width * total, state, 0, 0, 0)


def _inference(work: Workload, fused: bool) -> Iterator[Memory]:
    """A layer, and the unembedding of the last tokens."""
    leaves, whole = operations.parameters(work.model).values(), _gathered(work)
    held, cache = work.width_bytes * sum(work.stored(d.axes, d.shape) for d in leaves), kv_cache(work)
    logits = 4 * work.rows() * work.local("act_vocab", work.model.vocabulary)
    read = work.width_bytes * _keys(work)  # the keys, then the values, of the layer
    yield Memory(held + whole.layer, 0, 0, _forward(work, fused) + read, 0, cache)
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
    )


def _named(part: _Parts) -> dict[str, int]:
    """Numbers of each activation of a layer that has a name."""
    sizes = {"query": part.heads, "key": part.kv_heads, "value": part.kv_heads, "attention": part.heads}
    return {**sizes, "up": part.hidden, "gate": part.hidden}


def _wide(work: Workload) -> int:
    """Bytes that the backward pass of a layer reads, but for scores: of norms their float32 insides and their results,
    of attention its operands and its result, also in float32, of the hidden layer each step of the activation, which a
    gated one takes in float32."""
    part, width, model = _parts(work), work.width_bytes, work.model
    normed = 3 * (part.heads + part.kv_heads) if model.attention.qk_norm else 0
    narrow = 2 * part.whole + 2 * part.heads + 2 * part.kv_heads + part.hidden
    steps = part.hidden * 5 * (4 if model.feed_forward.gated else width)
    return width * narrow + steps + 4 * (6 * part.stream + normed + part.heads)


def _scores(work: Workload, phase: Literal["forward", "backward"], fused: bool) -> int:
    """Bytes of attention's scores that a layer works with at once, beside those that are kept. XLA for a TPU makes
    weights of float32 scores within the product that reads them, and the mask an array of their size; for a GPU it
    makes weights an array in the dtype, and to keep what it makes also exponentials and the mask's values."""
    part, width, keeps = _parts(work), work.width_bytes, work.kind == "train" and work.remat == "none"
    if phase == "backward":
        copied = not (fused or keeps or work.dtype == "float32")
        return part.scores * (width + 4 + (width if copied else 0))  # a gradient, scores, and weights beside them
    if fused:
        return part.scores * (4 + 1)
    return part.scores * (4 + 4 + 4 + 1 if keeps else 4 + width)


def _forward(work: Workload, fused: bool) -> int:
    """Bytes of a layer's forward pass where it is largest, in the softmax."""
    part, width = _parts(work), work.width_bytes
    around = width * part.stream + (0 if fused else 4 * part.heads)
    return _scores(work, "forward", fused) + around


def _backward(work: Workload, fused: bool) -> int:
    """Bytes of a layer's backward pass where it is largest, in the softmax: attention's operands and the stream with
    its gradient, of which a GPU has float32 copies, and what the gradients of the hidden layer's matrices are yet to be
    made of."""
    part, width, acts = _parts(work), work.width_bytes, 3 if work.model.feed_forward.gated else 2
    if fused:
        around = width * (2 * part.stream + 3 * part.heads + 2 * part.kv_heads + 2 * part.hidden)
    else:
        around = width * (4 * part.stream + 2 * part.whole + 4 * part.heads + 2 * part.kv_heads + acts * part.hidden)
        around += 4 * (2 * part.stream + part.heads)
    return _scores(work, "backward", fused) + around


def _keys(work: Workload) -> int:
    """Numbers of a layer's keys in the cache, and as many of its values."""
    attention = work.model.attention
    heads = work.local("act_kv_heads", attention.kv_heads)
    return work.rows() * work.sequence * heads * attention.head_width


class _Gathered(NamedTuple):
    """Bytes of matrices that are whole along `fsdp` while they are used: those of a layer, of its attention and of its
    hidden layer's inputs alone, and the larger table."""

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
