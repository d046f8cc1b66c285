"""Costs of the kernels of a step on one device, as each kernel declares them (`costs` in kernels_pallas)."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.costs.paper import Use
from jaxlm.costs.step.scopes import ACTIVATION, LOSS, NORMS, POSITIONS, Elementwise
from jaxlm.costs.workload import Workload
from kernels_pallas.core.launch import KernelCost, KernelCosts
from kernels_pallas.flash_attention import costs as attention_costs
from kernels_pallas.flash_attention import runs_kernel
from kernels_pallas.gated_activation import costs as gated_costs
from kernels_pallas.layer_norm import costs as layer_norm_costs
from kernels_pallas.linear_cross_entropy import chunks
from kernels_pallas.linear_cross_entropy.costs import gradient_cost, statistics_cost
from kernels_pallas.rms_norm import costs as rms_norm_costs
from kernels_pallas.rotary_embedding import costs as rotary_costs

_NORMS = {"rms_norm": rms_norm_costs, "layer_norm": layer_norm_costs}


class Loss(NamedTuple):
    """The chunks of a microbatch's loss, the tokens in each, and each device's labels, padded."""

    chunks: int
    tokens: int
    labels: int


def elementwise(work: Workload, use: Use) -> Iterator[Elementwise]:
    """Yield the kernel of an operation except attention; none where XLA computes it."""
    if not work.runs_kernels:
        return

    def arrays() -> list[jax.ShapeDtypeStruct]:
        return [_array(work, *work.shape(*each)) for each in zip(use.marker.operands, use.shapes, strict=True)]

    match use.name:
        case "rms_norm" | "layer_norm":
            x, *vectors = arrays()
            residual = vectors.pop() if len(use.marker.results) == 2 else None
            heads = use.marker.operands[0][-1] == "act_head_dim"
            scope = POSITIONS if heads else NORMS if use.loop is not None else use.scope
            yield _launched(scope, use.times, _NORMS[use.name](x, *vectors, residual=residual))
        case "rope":
            x, *angles = arrays()
            angles = [jax.ShapeDtypeStruct(each.shape, jnp.float32) for each in angles]
            yield _launched(POSITIONS, use.times, rotary_costs(x, *angles))
        case "gated_activation":
            yield _launched(ACTIVATION, use.times, gated_costs(*arrays(), activation=use.options["name"]))
        case "cross_entropy" if chunked := loss(work):
            sizes = chunked.tokens, chunked.labels, use.options["soft_cap"]
            kernels = statistics_cost(*sizes), gradient_cost(*sizes, work.dtype)
            # The gradient of the logits is made in the forward pass.
            once = KernelCost(*map(sum, zip(*kernels, strict=True)))
            yield _launched(LOSS, chunked.chunks, KernelCosts(once, KernelCost()))


def attention(work: Workload, keys: int | None = None) -> KernelCosts | None:
    """Return the attention cost of a layer with these keys, all scores visible; None if XLA runs it instead: with few
    queries, or with a head dim that the platform's kernel does not take."""
    (K, G), H = work.head_groups(), work.model.attention.head_dim
    if not work.runs_kernels:
        return None
    return _attention(work.platform, work.rows(), work.queries, keys or work.keys, K, G, H, work.dtype)


@functools.lru_cache(maxsize=1024)
def _attention(platform: str, B: int, T: int, S: int, K: int, G: int, H: int, dtype: str) -> KernelCosts | None:
    key, query = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, S, K, H), (B, T, K * G, H)))
    if not runs_kernel(platform, query, key, key):
        return None
    return attention_costs(query, key, key, implementation="triton")  # kernels for TPUs cost the same


def loss(work: Workload) -> Loss | None:
    """Return the chunks of a microbatch's loss; None if its logits are held whole: in inference, or if they are
    few."""
    tokens, labels = work.rows() * work.queries, work.local("act_vocab", work.model.vocab_size)
    if not work.runs_kernels or work.kind != "train" or tokens * labels < chunks.WORTHWHILE:
        return None
    return Loss(*chunks.chunk(tokens, labels), chunks.padded(labels))


def _launched(scope: str, times: int, costs: KernelCosts) -> Elementwise:
    return Elementwise(scope, times, *costs, kernel=True)


def _array(work: Workload, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, work.dtype)
