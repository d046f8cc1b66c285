"""Sizes of layers that follow from other keys of [model], where a file has none. Imports no JAX."""

from typing import Any

from jaxlm.core.schema import Kinds, chosen, kind_of, merged
from jaxlm.models.block_config import ATTENTIONS, FEED_FORWARDS
from jaxlm.models.layer_config import LayerConfig


def with_default_sizes(values: dict[str, Any]) -> dict[str, Any]:
    """Return [model] with the sizes that follow from several of its tables written into those of attention and of the
    feed-forward layer, so that a resolved file is whole. Raises ValueError, in one line."""
    attention, feed_forward = (values.get(name, {}) for name in ("attention", "feed_forward"))
    width, pattern = values.get("d_model"), values.get("pattern")
    filled = {**values, "attention": attention, "feed_forward": feed_forward}
    if isinstance(feed_forward, dict) and isinstance(width, int):
        filled["feed_forward"] = _with_own_sizes(FEED_FORWARDS, feed_forward, width)
        if isinstance(pattern, list | tuple):
            pattern = tuple(_with_sizes_of_kind(entry, feed_forward, width) for entry in pattern)
            filled["pattern"] = pattern
    if not isinstance(attention, dict):
        return filled
    filled["attention"] = _with_head_dim(attention, width, "model.attention")
    if isinstance(pattern, list | tuple):
        base = {"kind": kind_of(next(iter(ATTENTIONS))), **attention}
        filled["pattern"] = tuple(_with_own_heads(entry, base, width, i) for i, entry in enumerate(pattern))
    return filled


def _with_own_sizes(kinds: Kinds, table: dict[str, Any], width: int) -> dict[str, Any]:
    """Return a table with the sizes that its section takes from the model's width."""
    section, *others = chosen(kinds, table)
    return table if others or not issubclass(section, LayerConfig) else section.with_sizes(table, width)


def _with_head_dim(attention: dict[str, Any], width: Any, key: str) -> dict[str, Any]:
    """Return a table of attention, which stands at a key, with the default of `head_dim`."""
    if "num_heads" not in attention:
        return attention
    heads = attention["num_heads"]
    for name, size in ((f"{key}.num_heads", heads), ("model.d_model", width)):
        if size is not None and not isinstance(size, int):
            raise ValueError(f"{name} = {size!r}: it must be an integer")
    sections = chosen(ATTENTIONS, attention)
    asked = all("head_dim" in s.model_fields and s.model_fields["head_dim"].is_required() for s in sections)
    if asked and "head_dim" not in attention and isinstance(width, int) and heads > 0:
        if width % heads:
            raise ValueError(
                f"{key}.num_heads = {heads} does not divide model.d_model = {width}: "
                f"change one of them, or set {key}.head_dim"
            )
        return {**attention, "head_dim": width // heads}
    return attention


def _with_sizes_of_kind(entry: Any, base: dict[str, Any], width: int) -> Any:
    """Return an entry of a pattern with the sizes of its feed-forward layer, if that is of another kind than the
    model's."""
    patch = entry.get("feed_forward") if isinstance(entry, dict) else None
    default = kind_of(next(iter(FEED_FORWARDS)))
    if not isinstance(patch, dict) or patch.get("kind", base.get("kind", default)) == base.get("kind", default):
        return entry
    return {**entry, "feed_forward": _with_own_sizes(FEED_FORWARDS, patch, width)}


def _with_own_heads(entry: Any, base: dict[str, Any], width: Any, index: int) -> Any:
    """Return an entry of a pattern with the defaults of attention that follow from its keys and not from the model's.

    The model's defaults would be merged into it otherwise.
    """
    patch = entry.get("attention") if isinstance(entry, dict) else None
    if not isinstance(patch, dict):
        return entry

    def resolved(table: dict[str, Any], key: str) -> dict[str, Any]:
        filled = _with_head_dim(table, width, key)
        try:
            (section,) = chosen(ATTENTIONS, filled)
            return section.model_validate(filled).model_dump(exclude_none=True)
        except ValueError:  # said where the whole block is validated
            return filled

    def patched(table: dict[str, Any]) -> dict[str, Any]:
        return merged({"attention": table}, {"attention": patch})["attention"]

    inherited = patched(resolved(base, "model.attention"))
    own = resolved(patched(base), f"model.pattern[{index}].attention")
    changes = {name: value for name, value in own.items() if inherited.get(name) != value}
    return {**entry, "attention": {**patch, **changes}} if changes else entry
