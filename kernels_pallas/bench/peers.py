"""Peers of the kernels in benchmarks: others' versions of the same operations, timed on the same numbers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.bench.timing import KernelTime
from kernels_pallas.core.cases import KernelCase


class Peer(NamedTuple):
    """Another library's version of an operation.

    Attributes:
      name: its name in the results.
      function: takes a case's arguments, as tensors, and its options; raises NotImplementedError for unsupported ones.
      compiled: True if TorchInductor compiles it; otherwise it is already a kernel.
      forward_only: it has no gradient.
    """

    name: str
    function: Callable[..., Any]
    compiled: bool = True
    forward_only: bool = False


def call(peer: Peer, case: KernelCase, training: bool, device: str = "cuda") -> Callable[[], Any]:
    """Return a call on a case's random arguments.

    It returns the results, or in training (results, gradients) of every differentiable argument, from random
    cotangents.
    """
    import torch

    if training and peer.forward_only:
        raise NotImplementedError("it is a forward pass alone")
    tensors = {name: _tensor(x, device) for name, x in case.draw(case.dtypes[0]).items()}
    inputs = [tensors[name].requires_grad_(training) for name in case.differentiable()]
    function = functools.partial(peer.function, **case.options)
    if peer.compiled:
        torch.compiler.reset()  # otherwise PyTorch stops compiling a function at its ninth shape
        function = torch.compile(function, dynamic=False)

    def results() -> tuple:
        y = function(**tensors)
        return y if isinstance(y, tuple) else (y,)

    if not training:
        return results
    cotangents = [_tensor(jax.random.normal(jax.random.key(1), y.shape), device).to(y.dtype) for y in results()]

    def both() -> tuple:
        made = results()
        pulled = [i for i, y in enumerate(made) if y.requires_grad]  # a result may be a constant
        return made, torch.autograd.grad([made[i] for i in pulled], inputs, [cotangents[i] for i in pulled])

    return both


def _tensor(x: jax.Array, device: str) -> Any:
    import torch

    wide = np.array(x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x)
    return torch.from_numpy(wide).to(device, getattr(torch, x.dtype.name))  # NumPy has no bfloat16 that PyTorch takes


def measure(
    peer: Peer, case: KernelCase, training: bool, rounds: int = 7, seconds: float = 0.05
) -> tuple[KernelTime, int]:
    """Time as `timing.measure` does, by CUDA events; also return the bytes that PyTorch allocated beyond arguments and
    results.
    """
    import torch

    run = call(peer, case, training)

    def in_a_row(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls

    for _ in range(3):  # the first call compiles
        run()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    temporary = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del results
    calls = max(1, min(1000, round(seconds / max(in_a_row(3), 1e-7))))
    return KernelTime.of([in_a_row(calls) for _ in range(rounds)], "device"), temporary


def give_back() -> None:
    """Have PyTorch free its cached memory: JAX is on the same GPU."""
    import torch

    torch.cuda.empty_cache()
