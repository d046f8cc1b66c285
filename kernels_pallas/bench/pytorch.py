"""The operations in PyTorch: in plain PyTorch for TorchInductor to compile (to Triton), and attention from its
libraries and in Triton itself. Arguments and options are those of `kernels_pallas`, and tensors have the same shapes.
"""

from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels_pallas.bench.peers import Peer
from kernels_pallas.flash_attention import cudnn


def _rms_norm(x, scale=None, *, residual=None, epsilon=1e-6, plus_one=False):
    x = x if residual is None else x + residual
    y = functional.rms_norm(x, x.shape[-1:], scale + 1 if plus_one else scale, epsilon)
    return y if residual is None else (x, y)


def _layer_norm(x, scale=None, bias=None, *, residual=None, epsilon=1e-6, plus_one=False):
    x = x if residual is None else x + residual
    y = functional.layer_norm(x, x.shape[-1:], scale + 1 if plus_one else scale, bias, epsilon)
    return y if residual is None else (x, y)


def _masked(x, where, temperature, soft_cap):
    x = x.float()
    x = x if soft_cap is None else soft_cap * torch.tanh(x / soft_cap)
    return x / temperature if where is None else (x / temperature).masked_fill(~where, -torch.inf)


def _softmax(x, where=None, *, temperature=1.0, soft_cap=None):
    y = _masked(x, where, temperature, soft_cap).softmax(-1)
    return (y if where is None else y.masked_fill(~where, 0)).to(x.dtype)


def _log_softmax(x, where=None, *, temperature=1.0, soft_cap=None):
    y = _masked(x, where, temperature, soft_cap).log_softmax(-1)
    return (y if where is None else y.masked_fill(~where, -torch.inf)).to(x.dtype)


def _rotary_embedding(x, cos, sin, *, interleaved=False):
    cos, sin = (a.float()[..., None, :] for a in (cos, sin))
    split, pairs = ((*x.shape[:-1], -1, 2), -1) if interleaved else ((*x.shape[:-1], 2, -1), -2)
    first, second = x.float().reshape(split).unbind(pairs)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), pairs).reshape(x.shape).to(x.dtype)


ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
}


def _gated_activation(gate, up, *, activation="silu"):
    return ACTIVATIONS[activation](gate) * up


def _bias_activation(x, bias, *, activation="gelu"):
    return ACTIVATIONS[activation](x + bias)


def _matmul(a, b, bias=None, residual=None, *, activation=None):
    y = a @ b if bias is None else a @ b + bias
    y = y if activation is None else ACTIVATIONS[activation](y)
    return y if residual is None else y + residual


def _linear_cross_entropy(
    hidden,
    unembedding,
    targets,
    weights=None,
    *,
    transposed=False,
    soft_cap=None,
    z_loss=0.0,
    reduction="none",
    return_log_z=False,
):
    """Cross-entropy with all logits in memory, rounded to hidden's dtype as the product is."""
    logits = (hidden @ (unembedding.T if transposed else unembedding)).float()
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    flat, labels = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    losses = functional.cross_entropy(flat, labels, ignore_index=-1, reduction="none").reshape(targets.shape)
    log_z = logits.logsumexp(-1) if z_loss or return_log_z else None
    losses = losses + z_loss * log_z.square() * (targets >= 0) if z_loss else losses
    losses = losses if weights is None else losses * weights
    losses = losses.sum() if reduction == "sum" else losses
    return (losses, log_z.detach() if reduction == "sum" else log_z) if return_log_z else losses


def attention(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return attention by kernel(query, key, value, causal, scale), which supports neither sinks nor a soft cap, and no
    mask but the causal one.
    """

    def run(query, key, value, *, key_range=None, scale=None, query_chunk=None, **others):
        if others:
            raise NotImplementedError(f"it has no {', '.join(others)}")
        causal = cudnn.is_causal(key_range, query.shape[1], key.shape[1])
        if causal is None:
            raise NotImplementedError("of masks it has the causal one")
        return kernel(query, key, value, causal, query.shape[-1] ** -0.5 if scale is None else scale)

    return run


def library(backend: str) -> Callable[..., torch.Tensor]:
    """Return PyTorch's own attention with this `SDPBackend`."""

    def kernel(query, key, value, causal, scale):
        by_head = (x.transpose(1, 2) for x in (query, key, value))
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = functional.scaled_dot_product_attention(
                *by_head, is_causal=causal, scale=scale, enable_gqa=query.shape[2] != key.shape[2]
            )
        return out.transpose(1, 2)

    return attention(kernel)


def _native_triton(*arguments):
    from kernels_pallas.bench import native_triton

    return native_triton.flash_attention(*arguments)


PEERS = {
    "rms_norm": (Peer("torch", _rms_norm),),
    "layer_norm": (Peer("torch", _layer_norm),),
    "softmax": (Peer("torch", _softmax),),
    "log_softmax": (Peer("torch", _log_softmax),),
    "rotary_embedding": (Peer("torch", _rotary_embedding),),
    "gated_activation": (Peer("torch", _gated_activation),),
    "bias_activation": (Peer("torch", _bias_activation),),
    "matmul": (Peer("torch", _matmul),),
    "linear_cross_entropy": (Peer("torch", _linear_cross_entropy),),
    "flash_attention": (
        Peer("torch_flash", library("FLASH_ATTENTION"), compiled=False),
        Peer("torch_cudnn", library("CUDNN_ATTENTION"), compiled=False),
        Peer("native_triton", attention(_native_triton), compiled=False, forward_only=True),
    ),
}
