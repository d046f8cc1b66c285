"""Packed rows by cuDNN: their documents, what is asked of cuDNN, and what is refused. No GPU is needed, and none is
compiled for: XLA asks the chip for cuDNN's plans.
"""

import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as stablehlo
from numerics import drawn
from test_measured import H100, on

from jaxlm.models.positions import packed_causal_mask
from kernels_pallas import flash_attention
from kernels_pallas.flash_attention import causal, cudnn, intersection, sliding_window
from kernels_pallas.flash_attention.cases import segments
from kernels_pallas.flash_attention.operands import Operands

T = 12
ROWS = ([12], [5, 7], [1, 1, 10], [3, 4, 5])  # lengths of the documents of each row


def mask(rows):
    return packed_causal_mask(jnp.asarray([np.concatenate([np.arange(n) for n in row]) for row in rows], jnp.int32))


@pytest.mark.parametrize("documents", [3, 4, 20])
def test_the_documents_of_packed_rows(documents):
    lengths, first, is_kept = jax.jit(lambda mask: cudnn.packed_documents(mask, len(ROWS), documents))(mask(ROWS))
    assert is_kept.all()
    assert lengths.shape == (4, documents) and first.shape == (4, documents + 1)
    for row, lengths_of_row, first_of_row in zip(ROWS, lengths.tolist(), first.tolist(), strict=True):
        none = documents - len(row)
        assert lengths_of_row == row + [-1] * none
        assert first_of_row == [0, *np.cumsum(row)[:-1].tolist()] + [-1] * (none + 1)


@pytest.mark.parametrize(
    "broken",
    [
        mask(([3, 3, 3, 3],)),
        intersection(causal(T), sliding_window(T, 3)),
        segments(5, 7),
        (mask(([5, 7],)).start, mask(([5, 7],)).start),
    ],
    ids=["more documents", "window", "not causal", "padding"],
)
def test_rows_that_are_not_what_was_promised_are_found(broken):
    is_kept = jax.jit(lambda start, end: cudnn.packed_documents((start, end), 1, 3)[2])(*broken)
    assert not is_kept.any()


def _as_documented(query, key, value, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
    """Attend as JAX says that cuDNN does: causal in each document, and nothing where there is none."""
    assert mask_type == stablehlo.MaskType.PADDING_CAUSAL
    assert (q_seqlen is kv_seqlen, q_offsets is kv_offsets) == (True, True)
    query, key, value = map(np.asarray, (query, key, value))
    out = np.full(query.shape, 7.0, np.float32)
    for b, (lengths, firsts) in enumerate(zip(q_seqlen.tolist(), q_offsets.tolist(), strict=True)):
        for length, at in zip(lengths, firsts, strict=False):
            here = slice(at, at + max(length, 0))
            scores = scale * np.einsum("TNH,SNH->NTS", query[b, here], key[b, here])
            weights = np.exp(np.where(np.tri(max(length, 0), dtype=bool), scores, -np.inf))
            out[b, here] = np.einsum("NTS,SNH->TNH", weights / weights.sum(-1, keepdims=True), value[b, here])
    return jnp.asarray(out)


def test_documents_attend_as_the_reference_does(monkeypatch):
    monkeypatch.setattr(stablehlo, "dot_product_attention", _as_documented)
    arrays = drawn(*[(len(ROWS) + 1, T, 2, 8)] * 3)
    key_range = mask([*ROWS, [3, 3, 3, 3]])
    start, end = (_Unknown(np.asarray(x)) for x in key_range)
    got = cudnn.flash_attention(Operands(*arrays, None, None, None, None), (start, end), 0.3, 3)
    wanted = flash_attention(*arrays, key_range=key_range, scale=0.3)
    chex.assert_trees_all_close(got[:-1], wanted[:-1], rtol=1e-5, atol=1e-5)
    assert jnp.isnan(got[-1]).all()  # a row of four documents, and three were promised


class _Unknown:
    """An array that is not known while tracing, but can be looked at."""

    def __init__(self, x):
        self.x, self.shape, self.ndim, self.dtype = x, x.shape, x.ndim, x.dtype

    def __jax_array__(self):
        return jnp.asarray(self.x)


def _lowered(monkeypatch, function, *shapes):
    monkeypatch.setattr(cudnn, "is_absent", lambda: None)
    monkeypatch.setattr(stablehlo, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(stablehlo, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(stablehlo, "is_cuda_compute_capability_equal", lambda capability: False)
    text = on(H100, lambda: jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text())
    calls = re.findall(r"custom_call @([\w$]*fmha\w*)\(.*?backend_config = \"(.*?[^\\])\"", text)
    return {name: json.loads(config.replace("\\22", '"').replace('\\"', '"')) for name, config in calls}


def test_what_cudnn_is_asked_for_packed_rows(monkeypatch):
    operand = jax.ShapeDtypeStruct((2, 64, 2, 64), "bfloat16")
    side = jax.ShapeDtypeStruct((2, 64), "int32")

    def loss(query, key, value, start, end):
        options = dict(key_range=(start, end), documents=5, deterministic=False, implementation="cudnn")
        return flash_attention(query, key, value, **options).astype(jnp.float32).sum()

    calls = _lowered(monkeypatch, jax.grad(loss, argnums=(0, 1, 2)), operand, operand, operand, side, side)
    assert set(calls) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    for config in calls.values():
        asked = config["cudnn_fmha_backend_config"]
        assert (asked["mask_type"], asked["max_seg_per_batch"]) == ("PADDING_CAUSAL", 5)
        assert asked["fmha_scale"] == 0.125 and asked["dropout_rate"] == 0
        assert not asked.get("force_deterministic")


def _packed(device, heads=(2, 2), **options):
    N, K = heads
    query, key = (jax.ShapeDtypeStruct((2, 64, n, 64), "bfloat16") for n in (N, K))
    side = jax.ShapeDtypeStruct((2, 64), "int32")

    def call(query, key, value, start, end):
        return flash_attention(query, key, value, key_range=(start, end), implementation="cudnn", **options)

    return on(device, lambda: jax.eval_shape(call, query, key, key, side, side))


def test_packed_rows_that_cudnn_does_not_serve(monkeypatch):
    with pytest.raises(NotImplementedError, match="cudnn cannot serve this call: .*packed rows whose most `documents`"):
        _packed(H100)
    with pytest.raises(NotImplementedError, match="it serves packed rows on Hopper and later"):
        _packed("NVIDIA A100-SXM4-80GB", documents=3)
    with pytest.raises(NotImplementedError, match="it cannot be compiled ahead of time, and there is no GPU here"):
        _packed(H100, documents=3)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    with pytest.raises(NotImplementedError, match="JAX before 0.12 finds keys of packed rows by the number of query"):
        _packed(H100, (4, 2), documents=3)
    with pytest.raises(ValueError, match="documents is 0; it must be a positive whole number"):
        _packed(H100, documents=0)
