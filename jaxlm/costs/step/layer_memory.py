"""Memory of one layer on one device: the activations kept for its backward pass, and its working memory.

Which arrays XLA keeps was read from its programs (`jaxlm.lowering.buffers`), of plain JAX and of steps with kernels.
`fused` says that they are those for a TPU, which puts more of an attention without kernels into one fusion.
"""

from typing import Literal, NamedTuple

from jaxlm.costs.step import kernel_costs
from jaxlm.costs.workload import Workload
from jaxlm.models.config import ModelConfig


def norms_per_layer(model: ModelConfig) -> int:
    """Return the number of norms of the residual stream in a layer."""
    return 4 if model.norm_placement == "both" else 2


def kept(work: Workload) -> int:
    """Bytes that all layers keep for their backward pass: the stream before each and what has the names that are
    kept, with attention's output its log-sum-exp; without rematerialisation all that it reads, the masks of its two
    dropouts among it. That of the embedding's stays in any case."""
    part, itemsize = parts(work), work.itemsize
    mask = part.stream if work.dropout else 0
    if work.remat == "none":
        return work.model.num_layers * (_whole(work) + 2 * mask) + mask
    named = _named(part) if work.model.feed_forward.gated else {**_named(part), "gate": 0}
    names = () if work.remat == "full" else work.remat
    numbers = part.stream + sum(named[name] for name in names)
    sums = (
        4 * part.heads // work.model.attention.head_dim if kernel_costs.attention(work) and "attention" in names else 0
    )
    return work.model.num_layers * (itemsize * numbers + sums) + mask


def forward(work: Workload, fused: bool) -> int:
    """Bytes of a layer's forward pass where it is largest: in the softmax; with kernels in the hidden layer."""
    part, itemsize = parts(work), work.itemsize
    if kernel_costs.attention(work):
        return itemsize * (_hidden(work, 3, 2) + part.stream + part.whole)
    around = itemsize * part.stream + (0 if fused else 4 * part.heads)
    return _scores(work, "forward", fused) + around


def backward(work: Workload, fused: bool) -> int:
    """Bytes of a layer's backward pass where it is largest. In the softmax that is attention's operands and the stream
    with its gradient, of which a GPU has float32 copies, and what the gradients of the hidden layer's matrices are yet
    to be made of. With kernels it is in the hidden layer: all that the layer keeps, and the gradients there."""
    part, itemsize, acts = parts(work), work.itemsize, 3 if work.model.feed_forward.gated else 2
    if kernel_costs.attention(work):
        return _whole(work) + itemsize * (_hidden(work, 2, 0) + 2 * part.stream)
    if fused:
        around = itemsize * (2 * part.stream + 3 * part.heads + 2 * part.kv_heads + 2 * part.hidden)
    else:
        around = itemsize * (4 * part.stream + 2 * part.whole + 4 * part.heads + 2 * part.kv_heads + acts * part.hidden)
        around += 4 * (2 * part.stream + part.heads)
    return _scores(work, "backward", fused) + around


class Parts(NamedTuple):
    """Numbers on one device of the arrays in a layer: the stream between blocks, what is as wide as it and whole in
    the sequence, as wide as all query heads, as all key heads and as the hidden layer, and attention's scores."""

    tokens: int
    stream: int
    whole: int
    heads: int
    kv_heads: int
    hidden: int
    scores: int


def parts(work: Workload) -> Parts:
    """Return the size of each array of a layer on one device, in numbers: for its rows of a microbatch, with heads and
    hidden layer sharded over `tensor`."""
    model, attention = work.model, work.model.attention
    tokens, width = work.rows() * work.queries, attention.head_dim
    heads = work.local("act_heads", attention.num_heads)
    return Parts(
        tokens=tokens,
        stream=work.rows() * work.local("residual", work.queries) * model.d_model,
        whole=tokens * model.d_model,
        heads=tokens * heads * width,
        kv_heads=tokens * work.local("act_kv_heads", attention.num_kv_heads) * width,
        hidden=tokens * work.local("act_feed_forward", model.feed_forward.d_ff),
        scores=work.rows() * heads * work.scores(),
    )


def _whole(work: Workload) -> int:
    """Bytes that the backward pass of a layer reads, which are kept where nothing is computed again."""
    part, itemsize = parts(work), work.itemsize
    if not kernel_costs.attention(work):
        attention = work.model.attention
        # Slopes of a cap, and where windows are of some layers alone the mask, which is another in each.
        more = 4 * bool(attention.soft_cap) + (len({block.window for block in work.model.layers}) > 1)
        return _wide(work) + part.scores * (4 + itemsize + more)
    # The stream and its norm, twice, and what further norms read; queries, the result of attention, and that again as a
    # product takes it; keys and values; of an activation that is no kernel result and slope. Log-sum-exps are float32.
    normed = part.heads + part.kv_heads if work.model.attention.qk_norm else 0
    streams = norms_per_layer(work.model) * part.stream + 2 * part.whole
    narrow = streams + 3 * part.heads + 2 * part.kv_heads + normed + _hidden(work, 3, 2)
    return itemsize * narrow + 4 * part.heads // work.model.attention.head_dim


def _hidden(work: Workload, gated: int, plain: int) -> int:
    """Numbers of so many arrays as wide as the hidden layer: with a gate, or without."""
    return parts(work).hidden * (gated if work.model.feed_forward.gated else plain)


def _wide(work: Workload) -> int:
    """Bytes that the backward pass of a layer reads without kernels, but for scores: of norms their float32 insides and
    their results, of attention its operands and its result, also in float32, of the hidden layer the activation's
    result and slope, with a gate both slopes."""
    part, itemsize, model = parts(work), work.itemsize, work.model
    normed = 3 * (part.heads + part.kv_heads) if model.attention.qk_norm else 0
    narrow = 2 * part.whole + 2 * part.heads + 2 * part.kv_heads + _hidden(work, 3, 2)
    return itemsize * narrow + 4 * (3 * norms_per_layer(model) * part.stream + normed + part.heads)


def _scores(work: Workload, phase: Literal["forward", "backward"], fused: bool) -> int:
    """Bytes of attention's scores that a layer works with at once, beside those that are kept. XLA for a TPU makes
    weights of float32 scores within the product that reads them, and the mask an array of their size; for a GPU it
    makes weights an array in the dtype, and to keep what it makes also exponentials and the mask's values."""
    part, itemsize, keeps = parts(work), work.itemsize, work.kind == "train" and work.remat == "none"
    if phase == "backward":
        copied = not (fused or keeps or work.dtype == "float32")
        return part.scores * (itemsize + 4 + (itemsize if copied else 0))  # a gradient, scores, and weights beside them
    if fused:
        return part.scores * (4 + 1)
    return part.scores * (4 + 4 + 4 + 1 if keeps else 4 + itemsize)


def _named(part: Parts) -> dict[str, int]:
    """Numbers of each activation of a layer that has a name."""
    sizes = {"query": part.heads, "key": part.kv_heads, "value": part.kv_heads, "attention": part.heads}
    return {**sizes, "up": part.hidden, "gate": part.hidden}
