"""What lies in the memory of one device, in closed form over the abstract tree."""

import math
from typing import NamedTuple

from jaxlm.costs import operations
from jaxlm.costs.workload import Workload


class Memory(NamedTuple):
    """Bytes on one device at the peak of a step.

    `parameters`: the float32 masters, and the copy in the dtype that computes with its gathered layers; in inference
    that copy alone. `gradients`: in that dtype, and the float32 sums of microbatches. `optimizer`: its state, and the
    average of the parameters where there is one. `activations`: what layers keep for the backward pass, and the work
    of one layer. `logits`: float32, with their gradient. `kv_cache`: keys and values.
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
    leaves = operations.parameters(work.model)
    stored = {path: work.stored(d.axes, d.shape) for path, d in leaves.items()}
    total, width = sum(stored.values()), work.width_bytes
    working = total * width if work.kind != "train" or work.dtype != "float32" else 0
    if work.kind != "train":
        cache = kv_cache(work)
        return Memory(working + _gathered(work), 0, 0, _layer(work), _logits(work), cache)
    summed = 4 * total if work.microbatches > 1 else 0
    state = 4 * sum(operations.state_numbers(work, d) for d in leaves.values())
    return Memory(
        parameters=4 * total + working + _gathered(work),
        gradients=total * width + summed,
        optimizer=state + (4 * total if work.average else 0),
        activations=kept(work) + _layer(work),
        logits=_logits(work),
        kv_cache=0,
    )


def kv_cache(work: Workload) -> int:
    """Bytes of keys and values that one device holds for its sequences."""
    attention = work.model.attention
    heads = work.local("act_kv_heads", attention.kv_heads)
    return 2 * work.model.layers * work.rows() * work.sequence * heads * attention.head_width * work.width_bytes


def kv_bytes_per_token(work: Workload) -> int:
    """Bytes of keys and values that a token adds to the cache, over the whole mesh without replicas."""
    attention = work.model.attention
    return 2 * work.model.layers * attention.kv_heads * attention.head_width * work.width_bytes


def _gathered(work: Workload) -> int:
    """Matrices that are whole along `fsdp` while they are used: those of a layer and of the next, and one table."""
    if work.mesh.fsdp == 1:
        return 0
    layers = tables = 0
    for d in operations.parameters(work.model).values():
        numbers = math.prod(work.local(axis, size) for axis, size in zip(d.axes, d.shape, strict=True) if d.inputs)
        if d.table:
            tables = max(tables, numbers)
        elif d.inputs:
            layers += numbers // work.model.layers
    return work.width_bytes * (2 * layers + tables)


def _stream(work: Workload) -> int:
    """Numbers of the residual stream between two blocks on one device."""
    return work.rows() * work.local("stream", work.queries) * work.model.width


def _named(work: Workload) -> dict[str, int]:
    """Numbers on one device of each activation of a layer that has a name."""
    model, tokens = work.model, work.rows() * work.queries
    heads = work.local("act_heads", model.attention.heads) * model.attention.head_width
    kv_heads = work.local("act_kv_heads", model.attention.kv_heads) * model.attention.head_width
    hidden = work.local("act_ff", model.feed_forward.hidden)
    sizes = {"query": heads, "key": kv_heads, "value": kv_heads, "attention": heads, "up": hidden}
    if model.feed_forward.gated:
        sizes["gate"] = hidden
    return {name: tokens * size for name, size in sizes.items()}


def _whole_layer(work: Workload) -> int:
    """Bytes that the backward pass of a layer reads: norms' inputs and outputs, named activations, the activation's
    result, and the softmax with its scores in float32 and its weights in the dtype."""
    model, width = work.model, work.width_bytes
    tokens, named = work.rows() * work.queries, _named(work)
    heads = work.local("act_heads", model.attention.heads)
    scores = work.rows() * heads * work.queries * work.sequence
    gathered = 2 * tokens * model.width  # what the two norms give, whole in sequence and width
    return (
        width * (2 * _stream(work) + gathered + sum(named.values()) + named["up"])
        + scores * (4 + width)
        + 4 * named["attention"]
    )


def kept(work: Workload) -> int:
    """Bytes that all layers keep for their backward pass."""
    layers = work.model.layers
    if work.remat == "none":
        return layers * _whole_layer(work)
    names = () if work.remat == "full" else work.remat
    named = _named(work)
    return layers * work.width_bytes * (_stream(work) + sum(named[name] for name in names if name in named))


def _layer(work: Workload) -> int:
    """Bytes that one layer works with beyond what is kept."""
    if work.kind == "train" and work.remat == "none":
        return 0
    if work.kind == "train":
        return 2 * _whole_layer(work)  # recomputed, and the gradients of it
    return _whole_layer(work) // 2


def _logits(work: Workload) -> int:
    tokens = work.rows() * (work.queries if work.kind == "train" else 1)
    numbers = tokens * work.local("act_vocab", work.model.vocabulary)
    return numbers * 4 * (2 if work.kind == "train" else 1)
