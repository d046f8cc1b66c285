"""The same operations in PyTorch, compiled by TorchInductor (which writes Triton) or from its own libraries."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.bench.timing import Time
from kernels_pallas.cases import Case


def torch_call(operation: str, case: Case, backward: bool) -> Callable[[], Any] | None:
    """A call of the operation on the GPU, forward or forward and backward; None where PyTorch or the GPU is missing,
    or the operation is not written below."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or operation not in _OPERATIONS:
        return None
    tensors = {}
    for name, x in case.draw(case.dtypes[0]).items():
        wide = np.asarray(x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x)
        tensor = torch.from_numpy(wide.copy()).cuda()  # NumPy has no bfloat16 that PyTorch takes
        tensors[name] = tensor.to(getattr(torch, x.dtype.name))
    inputs = [tensors[name].requires_grad_(backward) for name in case.differentiable()]
    function = torch.compile(functools.partial(_OPERATIONS[operation], **case.options))
    if not backward:
        return lambda: function(**tensors)

    def both():
        y = function(**tensors)
        results = y if isinstance(y, tuple) else (y,)
        return torch.autograd.grad(results, inputs, [r.detach() for r in results])

    return both


def torch_measure(call: Callable[[], Any], rounds: int = 7, seconds: float = 0.05) -> Time:
    """As `timing.measure`, by CUDA's events."""
    import torch

    def in_a_row(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls

    for _ in range(3):  # the first compiles
        call()
    calls = max(1, min(1000, round(seconds / max(in_a_row(3), 1e-7))))
    return Time.of([in_a_row(calls) for _ in range(rounds)], "device")


def _rms_norm(x, scale=None, *, residual=None, epsilon=1e-6, plus_one=False):
    import torch

    x = x if residual is None else x + residual
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], scale + 1 if plus_one else scale, epsilon)
    return y if residual is None else (x, y)


def _layer_norm(x, scale=None, bias=None, *, residual=None, epsilon=1e-6, plus_one=False):
    import torch

    x = x if residual is None else x + residual
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], scale + 1 if plus_one else scale, bias, epsilon)
    return y if residual is None else (x, y)


def _masked(x, where, temperature, soft_cap):
    import torch

    x = x.float()
    x = x if soft_cap is None else soft_cap * torch.tanh(x / soft_cap)
    return x / temperature if where is None else (x / temperature).masked_fill(~where, -torch.inf)


def _softmax(x, where=None, *, temperature=1.0, soft_cap=None):
    return _masked(x, where, temperature, soft_cap).softmax(-1).to(x.dtype)


def _log_softmax(x, where=None, *, temperature=1.0, soft_cap=None):
    return _masked(x, where, temperature, soft_cap).log_softmax(-1).to(x.dtype)


def _rotary_embedding(x, cos, sin, *, interleaved=False):
    import torch

    cos, sin = (a.float()[..., None, :] for a in (cos, sin))
    split, pairs = ((*x.shape[:-1], -1, 2), -1) if interleaved else ((*x.shape[:-1], 2, -1), -2)
    first, second = x.float().reshape(split).unbind(pairs)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), pairs).reshape(x.shape).to(x.dtype)


def _activate(x, name):
    import torch

    functions = torch.nn.functional
    match name:
        case "silu":
            return functions.silu(x)
        case "gelu":
            return functions.gelu(x)
        case "gelu_tanh":
            return functions.gelu(x, approximate="tanh")
        case "relu_squared":
            return functions.relu(x).square()
        case "relu":
            return functions.relu(x)
    return x


def _gated_activation(gate, up, *, activation="silu"):
    return _activate(gate, activation) * up


def _bias_activation(x, bias, *, activation="gelu"):
    return _activate(x + bias, activation)


def _matmul(a, b, bias=None, residual=None, *, activation=None):
    y = a @ b if bias is None else a @ b + bias
    y = _activate(y, activation)
    return y if residual is None else y + residual


_OPERATIONS = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "rotary_embedding": _rotary_embedding,
    "gated_activation": _gated_activation,
    "bias_activation": _bias_activation,
    "matmul": _matmul,
}
