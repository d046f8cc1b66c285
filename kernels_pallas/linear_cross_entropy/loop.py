"""The loss and its gradients on one device's tokens and labels, one chunk of tokens at a time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.core.launch import vary
from kernels_pallas.linear_cross_entropy import chunked, mosaic_tpu, triton
from kernels_pallas.linear_cross_entropy.block import finite
from kernels_pallas.linear_cross_entropy.chunks import chunk, padded

KERNELS = {"triton": triton, "mosaic_tpu": mosaic_tpu, "chunked": chunked}


class CrossEntropyPlan(NamedTuple):
    """Settings that are constant over chunks.

    Attributes:
      implementation: a key of KERNELS.
      transposed: the unembedding is [V, D].
      labels_over: mesh axes, manual here, over which the labels are sharded.
    """

    implementation: str
    transposed: bool = False
    soft_cap: float | None = None
    labels_over: tuple[str, ...] = ()

    @property
    def table(self) -> str:
        return "VD" if self.transposed else "DV"


def _unembed(plan: CrossEntropyPlan, hidden_CD: jax.Array, table: jax.Array) -> jax.Array:
    """Return float32 logits [C, V]."""
    return jnp.einsum(f"CD,{plan.table}->CV", hidden_CD, table, preferred_element_type=jnp.float32)


def _look(plan: CrossEntropyPlan, logits_CV: jax.Array, at_C: jax.Array, labels: int) -> tuple[jax.Array, jax.Array]:
    """Return (cross-entropy, log Z) of each token, [C] each, over all devices' labels."""
    found = KERNELS[plan.implementation].statistics(logits_CV, at_C, labels, plan.soft_cap)
    largest, total, at_target = found
    if plan.labels_over:
        largest = jax.lax.pmax(found.largest, plan.labels_over)
        total, at_target = jax.lax.psum(
            (found.total * jnp.exp(found.largest - finite(largest)), at_target), plan.labels_over
        )
    log_z = largest + jnp.log(total)
    return log_z - at_target, log_z


def forward(
    plan: CrossEntropyPlan, hidden_RD: jax.Array, unembedding: jax.Array, targets_R: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (cross-entropy, log Z) of each token, [R] each."""
    labels, table = _table(plan, unembedding)

    def body(_: None, chunk: tuple) -> tuple[None, tuple]:
        hidden_CD, at_C = chunk
        return None, _look(plan, _unembed(plan, hidden_CD, table), at_C, labels)

    _, terms = _by_chunks(body, None, (hidden_RD, _places(plan, targets_R, labels)), labels)
    return terms


def gradients(
    plan: CrossEntropyPlan,
    hidden_RD: jax.Array,
    unembedding: jax.Array,
    targets_R: jax.Array,
    rows: tuple[jax.Array, ...],
    cotangents: Callable[..., tuple[tuple[jax.Array, jax.Array, jax.Array], Any]],
) -> tuple[jax.Array, jax.Array, Any]:
    """Return the cotangents of `hidden`, in its dtype, and of `unembedding`, in float32, and the extras of
    `cotangents`.

    Where the labels are sharded, each device's part of the first is rounded before the sum: float32 would send twice as
    much.

    Args:
      rows: arrays [R], which `cotangents` takes in chunks.
      cotangents: (look, *rows_C) → (log Z, its cotangent, minus that of the target's logit), extras; look() returns the
        cross-entropy and log Z of the chunk, [C] each.
    """
    narrow = hidden_RD.dtype
    labels, table = _table(plan, unembedding)

    def body(d_table: jax.Array, chunk: tuple) -> tuple[jax.Array, tuple]:
        hidden_CD, at_C, *rows_C = chunk
        logits_CV = _unembed(plan, hidden_CD, table)
        (log_z_C, *of_C), extras = cotangents(lambda: _look(plan, logits_CV, at_C, labels), *rows_C)
        unit = _unit(of_C) if narrow == jnp.float16 else None
        of_C = of_C if unit is None else [x / unit for x in of_C]
        d_logits_CV = KERNELS[plan.implementation].gradient(
            logits_CV, at_C, log_z_C, *of_C, labels, plan.soft_cap, narrow
        )
        summed = narrow if unit is None else jnp.float32
        d_hidden_CD = jnp.einsum(f"CV,{plan.table}->CD", d_logits_CV, table, preferred_element_type=summed)
        d_part = jnp.einsum(f"CD,CV->{plan.table}", hidden_CD, d_logits_CV, preferred_element_type=jnp.float32)
        if unit is not None:
            d_hidden_CD, d_part = (d_hidden_CD * unit).astype(narrow), d_part * unit
        return d_table + d_part, (d_hidden_CD, extras)

    at_R = _places(plan, targets_R, labels)
    nothing, _ = vary(jnp.zeros(table.shape, jnp.float32), hidden_RD)
    d_table, (d_hidden_RD, extras) = _by_chunks(body, nothing, (hidden_RD, at_R, *rows), labels)
    if plan.labels_over:
        d_hidden_RD = jax.lax.psum(d_hidden_RD, plan.labels_over)
    return d_hidden_RD, jax.lax.slice_in_dim(d_table, 0, labels, axis=plan.table.index("V")), extras


def _unit(of_C: Sequence[jax.Array]) -> jax.Array:
    """Return the power of two by which a chunk's float16 cotangents are divided.

    float16's smallest number is 6e-8, above the cotangents of most logits in a mean over many tokens. The largest
    becomes 2¹³, below float16's limit of 2¹⁶.
    """
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in of_C]))
    _, exponent = jnp.frexp(largest)
    return jnp.where((largest > 0) & jnp.isfinite(largest), jnp.ldexp(1.0, exponent - 13), 1.0)


def _table(plan: CrossEntropyPlan, unembedding: jax.Array) -> tuple[int, jax.Array]:
    """Return the number of this device's labels, and the unembedding padded with zeros."""
    at = plan.table.index("V")
    labels = unembedding.shape[at]
    more = padded(labels) - labels
    return labels, jnp.pad(unembedding, [(0, more if i == at else 0) for i in (0, 1)]) if more else unembedding


def _places(plan: CrossEntropyPlan, targets_R: jax.Array, labels: int) -> jax.Array:
    """Return the index of each target among this device's labels; −1 if it is not among them."""
    first = labels * jax.lax.axis_index(plan.labels_over) if plan.labels_over else 0
    at_R = targets_R.astype(jnp.int32) - first
    return jnp.where((0 <= at_R) & (at_R < labels), at_R, -1)


def _by_chunks(body: Callable, carry: Any, rows: tuple[jax.Array, ...], labels: int) -> tuple[Any, Any]:
    """Run `jax.lax.scan` over chunks of the first dimension, zero-padded; results are concatenated."""
    R = len(rows[0])
    n, C = chunk(R, labels)
    if n * C > R:
        rows = tuple(jnp.pad(x, [(0, n * C - R)] + [(0, 0)] * (x.ndim - 1)) for x in rows)
    if n == 1:
        carry, results = body(carry, rows)
    else:
        carry, results = jax.lax.scan(body, carry, tuple(x.reshape(n, C, *x.shape[1:]) for x in rows))
        results = jax.tree.map(lambda x: x.reshape(n * C, *x.shape[2:]), results)
    return carry, jax.tree.map(lambda x: x[:R], results)
