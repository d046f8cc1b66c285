"""Pages of eight bits: the numbers of a token's head share a scale.

A scale of more tokens would have to change as a page fills, and a token's entry would depend on those beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.core import checks
from kernels_pallas.core.rounding import MOST


def check(operation: str, key: Any, value: Any, key_scales: Any, value_scales: Any) -> None:
    """Check pages and the scales of those of eight bits, which others have none of. Raises ValueError."""
    given = ("key", key, key.shape[-1], key_scales), ("value", value, value.shape[-2], value_scales)
    if key_scales is None and value_scales is None:
        checks.floating(operation, key=key, value=value)
        return
    for name, pages, size, scales in given:
        checks.array(operation, **{f"{name}_scales": scales})
        if pages.dtype.name not in MOST:
            raise ValueError(f"{operation}: {name} is {pages.dtype} with scales; it must be {' or '.join(MOST)}")
        wanted, found = (*pages.shape[:2], 1, size), f"{scales.dtype}{list(scales.shape)}"
        if scales.shape != wanted or scales.dtype != jnp.float32:
            raise ValueError(f"{operation}: {name}_scales is {found}; it must be float32{list(wanted)}")


def multiplied(query: jax.Array, key: jax.Array) -> jnp.dtype:
    """Return the dtype in which a kernel multiplies queries and keys. Numbers of eight bits it holds exactly."""
    if key.dtype.name in MOST:
        return query.dtype
    return jnp.promote_types(query.dtype, key.dtype)
