"""Costs of the kernels of a step on one device, as each kernel declares them (`costs` in kernels_pallas)."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.costs.step.elementwise import (
    ACTIVATION,
    HEADS,
    LAST_NORM,
    LOSS,
    NORMS,
    POSITIONS,
    RESIDUAL,
    SOFTMAX,
    Elementwise,
)
from jaxlm.costs.workload import Workload
from kernels_pallas.core.launch import KernelCost, KernelCosts
from kernels_pallas.flash_attention import costs as attention_costs
from kernels_pallas.flash_attention import serves
from kernels_pallas.gated_activation import costs as gated_costs
from kernels_pallas.layer_norm import costs as layer_norm_costs
from kernels_pallas.linear_cross_entropy import chunks
from kernels_pallas.linear_cross_entropy.costs import gradient_cost, statistics_cost
from kernels_pallas.rms_norm import costs as rms_norm_costs
from kernels_pallas.rotary_embedding import costs as rotary_costs

_NORMS = {"rms": rms_norm_costs, "layer": layer_norm_costs}


class Loss(NamedTuple):
    """The chunks of a microbatch's loss, the tokens in each, and each device's labels, padded."""

    chunks: int
    tokens: int
    labels: int


def elementwise(work: Workload) -> Iterator[Elementwise]:
    """Yield the kernels of a step except attention, as elementwise work around its products."""
    if not work.runs_kernels:
        return
    model, settings = work.model, work.model.attention
    rows, queries, L, H = work.rows(), work.queries, model.num_layers, settings.head_dim
    norm, vectors = _NORMS[model.norm.kind], 2 if getattr(model.norm, "bias", False) else 1
    stream = _array(work, rows * work.local("residual", queries), model.d_model)
    gains = [_array(work, model.d_model)] * vectors
    yield _launched(NORMS, L, norm(stream, *gains))
    yield _launched(NORMS, L, norm(stream, *gains, residual=stream))
    if model.post_norms:
        yield _launched(NORMS, L, norm(stream, *gains))
        yield _launched(LAST_NORM, L, norm(stream, *gains))
    yield _launched("final_norm", 1, norm(stream, *gains))

    angles = jax.ShapeDtypeStruct((rows, queries, H // 2), jnp.float32)
    for name, axis, heads in (
        ("query", "act_heads", settings.num_heads),
        ("key", "act_kv_heads", settings.num_kv_heads),
    ):
        x = _array(work, rows, queries, work.local(axis, heads), H)
        if settings.qk_norm:
            yield _launched(POSITIONS, L, norm(x, *[_array(work, H)] * vectors), makes=name)
        if model.position.kind == "rope":
            yield _launched(POSITIONS, L, rotary_costs(x, angles, angles), makes=name)
    if model.feed_forward.gated:
        hidden = _array(work, rows * queries, work.local("act_feed_forward", model.feed_forward.d_ff))
        yield _launched(ACTIVATION, L, gated_costs(hidden, hidden, activation=model.feed_forward.activation))
    if chunked := loss(work):
        sizes = chunked.tokens, chunked.labels, model.logit_soft_cap
        kernels = statistics_cost(*sizes), gradient_cost(*sizes, work.dtype)
        # The gradient of the logits is made in the forward pass.
        yield _launched(
            LOSS, chunked.chunks, KernelCosts(KernelCost(*map(sum, zip(*kernels, strict=True))), KernelCost())
        )


def instead_of(work: Workload) -> set[str]:
    """Return the scopes of the loops that kernels replace."""
    found = {part.scope for part in elementwise(work)}
    return found | ({RESIDUAL} if found else set()) | ({SOFTMAX, HEADS} if attention(work) else set())


def attention(work: Workload) -> KernelCosts | None:
    """Return the attention cost of a layer, with all scores visible; None if the reference runs instead: with few
    queries, or with a head dim that the kernels of some chip do not take."""
    (K, G), H = work.head_groups(), work.model.attention.head_dim
    if not work.runs_kernels or not serves(work.queries, H):
        return None
    return _attention(work.rows(), work.queries, work.sequence, K, G, H, work.dtype)


@functools.lru_cache(maxsize=1024)
def _attention(B: int, T: int, S: int, K: int, G: int, H: int, dtype: str) -> KernelCosts:
    key, query = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, S, K, H), (B, T, K * G, H)))
    return attention_costs(query, key, key, implementation="triton")  # kernels for TPUs cost the same


def loss(work: Workload) -> Loss | None:
    """Return the chunks of a microbatch's loss; None if its logits are held whole: in inference, or if they are
    few."""
    tokens, labels = work.rows() * work.queries, work.local("act_vocab", work.model.vocab_size)
    if not work.runs_kernels or work.kind != "train" or tokens * labels < chunks.WORTHWHILE:
        return None
    return Loss(*chunks.chunk(tokens, labels), chunks.padded(labels))


def _launched(scope: str, times: int, costs: KernelCosts, makes: str = "") -> Elementwise:
    return Elementwise(scope, times, *costs, kernel=True, makes=makes)


def _array(work: Workload, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, work.dtype)
