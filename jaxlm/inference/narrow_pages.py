"""Pages of eight bits: what a layer keeps of a token, rounded, and the scales of its heads.

Each token has scales of its own. Scales of whole pages would have to change as a page fills, and what a token reads
would depend on which tokens were written together.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxlm.inference.settings import CacheDtype
from jaxlm.models.cache import CacheEntry, Slot
from jaxlm.models.views import scales_of
from kernels_pallas.paged_attention import rounded_rows

_DTYPES: dict[CacheDtype, str] = {"int8": "int8", "fp8": "float8_e4m3fn"}


def narrowed(entries: Mapping[str, CacheEntry], dtype: CacheDtype) -> dict[str, CacheEntry]:
    """Return entries whose slots of tokens are of eight bits, beside slots of their float32 scales, of which a token
    has one for each head. States stay as they are."""
    return {name: entry._replace(slots=dict(_with_scales(entry.slots, dtype))) for name, entry in entries.items()}


def rounded(pages: Mapping[str, jax.Array], new: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return entries [..., H] of slots by name as these pages keep them: those with scales rounded, beside the scales
    [..., 1]."""
    kept = {}
    for name, x in new.items():
        if scales_of(name) in pages:
            kept[name], kept[scales_of(name)] = rounded_rows(x, pages[name].dtype)
        else:
            kept[name] = x
    return kept


def _with_scales(slots: Mapping[str, Slot], dtype: CacheDtype) -> list[tuple[str, Slot]]:
    """Return slots with the scales of those that are rounded. Scales lie as attention reads them, tokens last."""
    kept: list[tuple[str, Slot]] = []
    for name, slot in slots.items():
        if slot.per == "sequence" or slot.dtype is not None:
            kept.append((name, slot))
            continue
        scales = slot._replace(
            shape=(*slot.shape[:-1], 1), axes=(*slot.axes[:-1], None), dtype=jnp.dtype("float32"), tokens_last=True
        )
        kept += [(name, slot._replace(dtype=jnp.dtype(_DTYPES[dtype]))), (scales_of(name), scales)]
    return kept
