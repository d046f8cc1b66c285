"""Keys that have another name, section or default than in earlier versions."""

from collections.abc import Mapping
from typing import Any

# Keys that moved to another section as they are. A configuration that has one is refused; that of an earlier run is
# read.
MOVED = {
    "training.dtype": "execution.dtype",
    "training.kernels": "execution.kernels",
    "training.remat": "execution.remat",
    "training.scan_layers": "execution.scan_layers",
}

# Keys and values that earlier versions of a configuration have, and their present names in words.
RENAMED = {
    **MOVED,
    "model.vocabulary": "vocab_size",
    "model.context": "context_length",
    "model.layers": "num_layers",
    "model.width": "d_model",
    "model.kernels": "execution.kernels",
    "model.post_norms": 'model.norm_placement = "both" where it was true',
    "model.scale_embeddings": 'model.embedding_scale = "sqrt_d_model" where it was true',
    "model.attention.heads": "num_heads",
    "model.attention.kv_heads": "num_kv_heads",
    "model.attention.head_width": "head_dim",
    "model.attention.qk_norm = true": "'head'",
    "model.attention.qk_norm = false": "'none'",
    "model.attention.window.size": "model.attention.window",
    "model.attention.window.global_every": "a [[model.pattern]] of layers with and without model.attention.window",
    "model.attention.window.rope_theta": "position.theta of the entry of [[model.pattern]] that has the window",
    "model.attention.window.rotary_base": "position.theta of the entry of [[model.pattern]] that has the window",
    "model.feed_forward.hidden": "d_ff",
    "model.position.base": "theta",
    "model.position.scaling.original_context": "original_context_length",
    "model.position.kind = 'rotary'": "'rope'",
    "model.attention.kind = 'grouped_query'": "'gqa'",
}

# Defaults of earlier versions that are others now, by key. A run that was begun with one keeps it.
FORMER_DEFAULTS = {"data.held_out": 0.1, "execution.scan_layers": True}

_FORMER = {now: before for before, now in MOVED.items()}


def former(key: str) -> str:
    """Return the name that a key had before it moved."""
    return _FORMER.get(key, key)


def with_present_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of an earlier run's configuration with each key where it moved to. A key that stands there
    already stays where it was, and is refused as unknown."""
    present = {name: dict(table) if isinstance(table, Mapping) else table for name, table in values.items()}
    for before, now in MOVED.items():
        (section, name), (present_section, present_name) = before.split("."), now.split(".")
        table, other = present.get(section), present.setdefault(present_section, {})
        if isinstance(table, dict) and name in table and isinstance(other, dict) and present_name not in other:
            other[present_name] = table.pop(name)
    return present
