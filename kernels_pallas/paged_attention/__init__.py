"""Attention whose keys and values lie in pages, which a table of each sequence names."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core import checks
from kernels_pallas.core.attention.key_range import KeyRange
from kernels_pallas.core.choice import cannot_lower, choose, fastest
from kernels_pallas.core.rounding import rounded_rows
from kernels_pallas.core.target import TargetChip
from kernels_pallas.paged_attention import mosaic_gpu, mosaic_tpu, reference, scales, triton, xla

__all__ = ["paged_attention", "rounded_rows"]

# In order of preference.
KERNELS = {"triton": triton, "mosaic_gpu": mosaic_gpu, "mosaic_tpu": mosaic_tpu}
_UNMEASURED = ("mosaic_gpu",)  # beside Triton's, which serve more calls


def paged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | int,
    table: jax.Array,
    *,
    key_range: KeyRange | tuple[Any, Any],
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """softmax(cap · tanh(scale · q·kᵀ / cap)) · v over the keys in range of each sequence, read from pages (vLLM,
    arXiv:2309.06180, section 4.1).

    A query's result depends on its own sequence alone, to the bit on a CPU: not on the other rows, on how many there
    are, on the pages that hold the keys, or on what else these pages hold.

    Args:
      query: [Q, T, N, H] in float32, bfloat16 or float16: T queries of each of Q sequences.
      key: [P, K, H, S], pages of S tokens, of any of these dtypes, or of eight bits with scales; N a multiple of K, as
        in `flash_attention`.
      value: [P, K, S, V] like key. Products contract H of keys and S of values, and are the faster for finding them
        before the last axis. Or V: a token's value is then the first V channels of its key.
      table: int32 [Q, M]: the pages of a sequence's tokens, of which the key at position p lies at index p modulo S of
        page p // S. Entries of pages that nobody sees may be any.
      key_range: int32 [Q, T] each: query t sees the positions from start to before end. One that sees nothing gives
        zeros.
      scale: positive; 1 / √H where None.
      soft_cap: positive; scores stay between −cap and cap.
      sinks: [N], a score in each row's sum that has no value, as in `flash_attention`.
      key_scales, value_scales: float32 [P, K, 1, S], of keys and values in int8 or float8_e4m3fn (`rounded_rows`).
        Scores are multiplied by those of keys, and weights by those of values, which are the keys' where values are a
        part of the keys.
      implementation: "reference", "triton", "mosaic_gpu" (Hopper), "mosaic_tpu" or "xla"; None is "triton" on NVIDIA
        GPUs and "mosaic_tpu" on TPUs where they serve, "mosaic_gpu" where JAX no longer lowers Triton, and otherwise
        "xla", which walks over the pages that a row sees and holds the scores of one page of each sequence; on the GPUs
        of a mesh in context it gathers all pages of the table at once.

    Returns [Q, T, N, V] in query's dtype. It has no derivative.

    Under a mesh of several devices the kernel runs inside `jax.shard_map`; elsewhere None is "xla".

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    _check(query, key, value, table, key_range, sinks, key_scales, value_scales)
    reasons = {name: lambda _, name=name: KERNELS[name].unsupported_reason(query, key, value) for name in KERNELS}
    chosen = choose("paged_attention", implementation, reasons | {"xla": lambda _: None}, by_name=_UNMEASURED)
    width = value if isinstance(value, int) else value.shape[-1]
    if 0 in (*query.shape[:3], *key.shape, width, *table.shape):  # of nothing there is one result
        return jnp.zeros((*query.shape[:3], width), query.dtype)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    soft_cap = None if soft_cap is None else float(soft_cap)
    attend = (KERNELS | {"reference": reference, "xla": xla})[chosen].paged_attention
    options = {"key_range": KeyRange(*key_range), "scale": scale, "soft_cap": soft_cap, "sinks": sinks}
    if key_scales is not None:
        options |= {"key_scales": key_scales, "value_scales": None if isinstance(value, int) else value_scales}
    return attend(query, key, value, table, **options)


def kernel_on(chip: TargetChip, query: Any, key: Any, value: Any) -> str | None:
    """Return the kernel that None takes on a chip, which need not be here, or None without one.

    Args:
      query, key, value: arrays, or shapes and dtypes; of values that are a part of the keys the number of channels.
    """

    def unsupported_reason(name: str) -> str | None:
        return cannot_lower(name, chip) or KERNELS[name].unsupported_reason(query, key, value)

    name = fastest("paged_attention", unsupported_reason, KERNELS, chip, _UNMEASURED).name
    return name if name in KERNELS else None


def _check(
    query: Any,
    key: Any,
    value: Any,
    table: Any,
    key_range: tuple[Any, Any],
    sinks: Any,
    key_scales: Any,
    value_scales: Any,
) -> None:
    operation = "paged_attention"
    if isinstance(value, int):
        checks.array(operation, key=key)
        if key.ndim == 4 and value > key.shape[2]:
            raise ValueError(f"{operation}: values of {value} channels are no part of keys {list(key.shape)}")
        shape, value_scales = ((*key.shape[:2], key.shape[3], value) if key.ndim == 4 else key.shape), key_scales
        value = jax.ShapeDtypeStruct(shape, key.dtype)
    checks.array(operation, query=query, key=key, value=value, table=table)
    checks.floating(operation, query=query, sinks=sinks)
    if not query.ndim == key.ndim == value.ndim == 4 or table.ndim != 2:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value, table))
        raise ValueError(f"{operation}: query, key, value and table are {shapes}; they must have 4, 4, 4 and 2 axes")
    (*pages, size, _), (*of_key, width, of_size) = value.shape, key.shape
    if [*pages, size] != [*of_key, of_size] or width != query.shape[-1] or key.dtype != value.dtype:
        raise ValueError(
            f"{operation}: key is {list(key.shape)} {key.dtype} and value {list(value.shape)} {value.dtype} for query "
            f"{list(query.shape)}; they must be [P, K, H, S] and [P, K, S, …] in one dtype, and query [Q, T, N, H]"
        )
    scales.check(operation, key, value, key_scales, value_scales)
    if not key.shape[1] or query.shape[2] % key.shape[1]:
        raise ValueError(f"{operation}: {query.shape[2]} query heads are no multiple of {key.shape[1]} key/value heads")
    if table.shape[0] != query.shape[0] or not jnp.issubdtype(table.dtype, np.integer):
        raise ValueError(f"{operation}: table is {table.dtype} {list(table.shape)} for {query.shape[0]} sequences")
    if any(x.shape != query.shape[:2] for x in key_range):
        shapes = " and ".join(str(list(x.shape)) for x in key_range)
        raise ValueError(f"{operation}: key_range is {shapes}; both must be {list(query.shape[:2])}")
    if sinks is not None and sinks.shape != query.shape[2:3]:
        raise ValueError(f"{operation}: sinks is {list(sinks.shape)}; it must be {list(query.shape[2:3])}")
