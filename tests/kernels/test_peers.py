"""Benchmark peers compute the same results: others' versions against the references, on this CPU."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from numerics import assert_close, drawn, results_and_gradients

from kernels_pallas.bench import peers, run
from kernels_pallas.core.cases import CaseArray, KernelCase
from kernels_pallas.core.registry import OPERATIONS
from kernels_pallas.core.target import of_kind
from kernels_pallas.flash_attention import causal


@pytest.fixture
def pytorch():
    pytest.importorskip("torch")
    from kernels_pallas.bench import pytorch

    return pytorch


def compare(name, peer, case, training):
    """Compare results, and gradients in training, in float32."""
    operation, case = OPERATIONS[name], dataclasses.replace(case, dtypes=("float32",))
    found = peers.call(peer._replace(compiled=False), case, training, "cpu")()
    arguments = case.draw("float32")
    wanted = jax.tree.leaves(operation.reference(**arguments, **case.options))
    pairs = list(zip(found[0] if training else found, wanted, strict=True))
    if training:
        cotangents = drawn(*(y.shape for y in wanted), seed=1)
        _, gradients = results_and_gradients(operation.reference, case)(arguments, cotangents)
        pairs += zip(found[1], (gradients[name] for name in case.differentiable()), strict=True)
    for got, want in pairs:
        assert_close(f"{name}, {case.name}", got.detach().numpy(), want, roundings=0, dtype="float32")


def attention(name, queries, keys, heads, **options):
    shapes = {"query": (2, queries, heads[0], 32), "key": (2, keys, heads[1], 32), "value": (2, keys, heads[1], 32)}
    return KernelCase(name, {name: CaseArray(shape) for name, shape in shapes.items()}, options)


ATTENTION = (
    attention("grouped", 37, 37, (4, 2), key_range=causal(37), query_chunk=16),
    attention("more keys", 20, 50, (2, 2), scale=0.3),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "flash_attention"])
def test_pytorch_computes_the_same(name, pytorch):
    for peer in pytorch.PEERS.get(name, ()):
        for case in OPERATIONS[name].used_in("test"):
            if "empty" not in case.name:  # nothing to time in an empty case
                compare(name, peer, case, training=True)


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_pytorchs_attention_is_told_the_same(case, pytorch):
    """PyTorch's fused kernels are for GPUs; its plain implementation takes the same arguments."""
    compare("flash_attention", peers.Peer("plain", pytorch.library("MATH"), compiled=False), case, training=True)


@pytest.mark.slow
def test_native_triton_computes_the_same():
    """Interpreted, which is decided when Triton is imported."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    code = """
import functools
from kernels_pallas.bench import native_triton, peers, pytorch
from test_peers import ATTENTION, compare

kernel = functools.partial(native_triton.flash_attention, blocks=(32, 16))
for case in ATTENTION:
    compare("flash_attention", peers.Peer("native", pytorch.attention(kernel)), case, training=False)
    print(case.name)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.split("\n")[:-1] == [case.name for case in ATTENTION], ran.stderr


def test_native_triton_compiles_for_hopper(pytorch):
    """Products run on the matrix units and loads run ahead of them, within a block's shared memory."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from kernels_pallas.bench import native_triton

    sizes = dict(N=16, K=16, H=128, CAUSAL=True, QUERIES=128, KEYS=64)
    arguments = dict.fromkeys(("query", "key", "value", "out"), "*bf16") | {"scale": "fp32", "T": "i32", "S": "i32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(arguments.values()) if kind != "fp32"}
    source = ASTSource(native_triton._forward, arguments | dict.fromkeys(sizes, "constexpr"), sizes, aligned)
    kernel = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8, num_stages=3))
    assert kernel.metadata.shared <= of_kind("gpu", "NVIDIA H100 80GB HBM3").scratchpad
    assert "wgmma.mma_async" in kernel.asm["ptx"] and "cp.async" in kernel.asm["ptx"]


def test_peers_are_those_of_operations(pytorch):
    assert pytorch.PEERS.keys() <= OPERATIONS.keys()


def test_an_operation_may_have_no_peer(pytorch, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delitem(pytorch.PEERS, "rms_norm")
    assert run.peers_of("rms_norm") == () != run.peers_of("layer_norm")


def test_what_means_something_else_is_left_out(pytorch):
    of_attention = {case.name: case for case in OPERATIONS["flash_attention"].used_in("bench")}
    flash, _, native = pytorch.PEERS["flash_attention"]
    for name, reason in (
        ("packed, sinks, 8192 × 64", "it has no sinks"),
        ("window 4096, cap, 8192 × 256", "it has no soft_cap"),
    ):
        case = dataclasses.replace(of_attention[name], arrays={})
        with pytest.raises(NotImplementedError, match=reason):
            flash.function(**dict.fromkeys(of_attention[name].arrays), **case.options)
    with pytest.raises(NotImplementedError, match="it is a forward pass alone"):
        peers.call(native, of_attention["small"], training=True)
