"""Translation between rotary positions of a published config.json, in two spellings, and [model.position]."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.families import inert
from jaxlm.families.family import Family
from jaxlm.models.block_config import BlockConfig
from jaxlm.models.config import ModelConfig

_ORIGINAL = "original_max_position_embeddings"
_PART = "partial_rotary_factor"
_OUTSIDE = ("rope_theta", _PART)  # which older files have outside of `rope_scaling`
# Keys of a scaling in config.json and in [model.position.scaling], by its kind.
_SCALINGS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor", _ORIGINAL: "original_context_length"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        _ORIGINAL: "original_context_length",
    },
    "yarn": {
        **{name: name for name in ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor")},
        **{"mscale": "mscale", "mscale_all_dim": "mscale_all_dim", _ORIGINAL: "original_context_length"},
    },
    "longrope": {
        **{"factor": "factor", "attention_factor": "attention_factor", _ORIGINAL: "original_context_length"},
        **{"short_factor": "short_factors", "long_factor": "long_factors"},
    },
}
_OLD_NAMES = {"su": "longrope"}
TABLES = ("rope_scaling", "rope_parameters")
LISTS = ("short_factor", "long_factor")
# The types of the other keys in these tables.
TYPES: dict[str, type] = {
    **{key: float for key in (*_OUTSIDE, *chain(*_SCALINGS.values())) if key not in LISTS},
    **{"truncate": bool, "rope_type": str, "type": str},
}


def read(
    entries: dict[str, Any], kinds: Sequence[str], values: Mapping[str, Any], where: str
) -> dict[str, dict[str, Any]]:
    """Take the keys of rotary positions out of `entries`. Return `position` of each kind of layer.

    As in transformers, `rope_scaling` goes before `rope_parameters`, whose `rope_theta` goes before the key of that
    name. Raises InputError for a scaling that jaxlm lacks, and where a value in `rope_parameters` would be lost.
    """
    old = {key: entries.pop(key, None) for key in _OUTSIDE}
    scaling, parameters = (entries.pop(key, None) or {} for key in TABLES)
    if not (isinstance(scaling, Mapping) and isinstance(parameters, Mapping)):
        raise InputError(f"{where}: rope_scaling and rope_parameters have to be tables, or null")
    local = entries.pop("rope_local_base_freq", None)
    context = {"max": values["context_length"], _ORIGINAL: entries.pop(_ORIGINAL, None)}
    if local is not None:
        scalings = _by_kind(parameters, kinds, where) if parameters else {}
        if scalings is None:
            raise InputError(f"{where}: rope_parameters must have a table for each of {', '.join(kinds)}")
        tables = {
            kinds[0]: {**old, **scalings.get(kinds[0], {}), **scaling},
            kinds[1]: {**old, "rope_theta": local, **scalings.get(kinds[1], {})},
        }
    else:
        scalings = scaling or parameters
        by_kind = _by_kind(scalings, kinds, where) or {}
        lost = {key: value for key, value in parameters.items() if scaling and key in _OUTSIDE}
        if any(value != scaling.get(key, old[key]) for key, value in lost.items()):
            raise InputError(
                f"{where}: rope_scaling goes before rope_parameters, whose {' and '.join(lost)} would be lost; keep "
                "one of the two"
            )
        tables = {kind: {**old, **(by_kind.get(kind, {}) if by_kind else scalings)} for kind in kinds}
    return {kind: _position(parameters, context, where) for kind, parameters in tables.items()}


def check_whole(entries: Mapping[str, Any], family: Family, where: str) -> None:
    """Raise InputError where a file rotates a part of each head and its family has no key for that: transformers
    ignores it there without a scaling, and fails with one."""
    if _PART in family.defaults:
        return
    tables = [entries, *(entries.get(key) for key in TABLES)]
    tables += [inner for table in tables[1:] if isinstance(table, Mapping) for inner in table.values()]
    for table in tables:
        part = table.get(_PART) if isinstance(table, Mapping) else None
        if part not in (None, 1):
            raise InputError(
                f"{where}: {_PART} = {part!r}, and {family.name} has 1.0 alone; if no result depends on it, take it "
                "out of the file"
            )


def stretched(positions: Iterable[Mapping[str, Any]], context: int) -> int:
    """Return the tokens that a model with these positions holds, where config.json gives a `context`.

    It is that one, but for files that give the original context: those with dynamic scaling, which computes with it,
    and those to which YaRN was added. They hold `factor` times as many.
    """
    lengths = [context]
    for position in positions:
        scaling = position.get("scaling", {})
        if scaling.get("kind") in ("dynamic", "yarn") and scaling["original_context_length"] == context:
            lengths += [math.floor(factor * context) for factor in [scaling.get("factor")] if factor]
    return max(lengths)


def _by_kind(parameters: Mapping[str, Any], kinds: Sequence[str], where: str) -> dict[str, Mapping[str, Any]] | None:
    """Return the parameters of each kind of layer; None where all layers have the same."""
    if not parameters or not all(isinstance(value, Mapping) for value in parameters.values() if value is not None):
        return None
    if strange := parameters.keys() - set(kinds):
        raise InputError(f"{where}: rope_parameters has {', '.join(sorted(strange))}, which jaxlm does not have")
    return {kind: value or {} for kind, value in parameters.items()}


def write(blocks: Mapping[str, BlockConfig], model: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the keys of rotary positions, in both spellings, of a layer of each kind."""
    ropes = {kind: _parameters(block, family) for kind, block in blocks.items()}
    full, *others = ropes.values()
    entries: dict[str, Any] = {
        "rope_theta": full["rope_theta"],
        "rope_scaling": _old_scaling(full),
        "rope_parameters": full,
    }
    if "rope_local_base_freq" in family.defaults:
        whole, local = ropes.get("full_attention", full), ropes.get("sliding_attention", full)
        entries = {
            "rope_theta": whole["rope_theta"],
            "rope_scaling": _old_scaling(whole),
            "rope_local_base_freq": local["rope_theta"],
            "rope_parameters": {"full_attention": whole, "sliding_attention": local},
        }
    elif any(rope != full for rope in others):
        raise InputError(f"{family.name} has one kind of rotary positions")
    for block in blocks.values():
        position: Any = block.position
        if position.scaling is not None and position.scaling.kind == "dynamic":
            entries["max_position_embeddings"] = position.scaling.original_context_length
    if _ORIGINAL in family.outer and _ORIGINAL in full:
        entries[_ORIGINAL] = full[_ORIGINAL]
        # Beside it transformers 4 takes three keys alone, and what follows from the two lengths; 5 reads them first.
        if "attention_factor" not in full and full["factor"] == model.context_length / full[_ORIGINAL]:
            factors = {key: full[key] for key in ("short_factor", "long_factor") if key in full}
            entries["rope_scaling"] = {"type": full["rope_type"], **factors}
    if _PART in full:
        entries[_PART] = full[_PART]
    return entries


def _old_scaling(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling`, the scaling in the spelling of transformers 4."""
    return None if parameters["rope_type"] == "default" else {k: x for k, x in parameters.items() if k not in _OUTSIDE}


def _position(parameters: dict[str, Any], context: Mapping[str, Any], where: str) -> dict[str, Any]:
    left = {key: value for key, value in parameters.items() if value is not None}
    older = left.pop("type", "default")
    kind = left.pop("rope_type", older)
    kind = _OLD_NAMES.get(kind, kind)
    position: dict[str, Any] = {"kind": "rope", "theta": float(left.pop("rope_theta"))}
    fraction = left.pop(_PART, 1.0)
    if fraction != 1:
        position["fraction"] = float(fraction)
    if kind != "default":
        if kind not in _SCALINGS:
            raise InputError(f"{where}: rope_type {kind!r} is a scaling that jaxlm does not have")
        position["scaling"] = _scaling(kind, left, context)
    strange = sorted(key for key, value in left.items() if kind != "default" and not inert.is_inert(key, value))
    if strange:
        raise InputError(f"{where}: {', '.join(strange)}: jaxlm knows no such key of rope_type {kind!r}")
    return position


def _scaling(kind: str, left: dict[str, Any], context: Mapping[str, Any]) -> dict[str, Any]:
    """Take the keys of a scaling out of `left`. What is left out follows from the context, as in transformers."""
    scaling = {ours: left.pop(theirs) for theirs, ours in _SCALINGS[kind].items() if theirs in left}
    original = context[_ORIGINAL] or scaling.get("original_context_length") or context["max"]
    if kind == "dynamic":
        original = context["max"]
    if kind == "linear":
        left.pop(_ORIGINAL, None)  # it divides all frequencies, whatever the original context
    else:
        scaling["original_context_length"] = original
    if kind in ("yarn", "longrope") and "factor" not in scaling:
        scaling["factor"] = context["max"] / original
    if kind == "yarn" and not (scaling.get("mscale") and scaling.get("mscale_all_dim")):  # either alone is ignored
        scaling.pop("mscale", None), scaling.pop("mscale_all_dim", None)
    for key in ("short_factors", "long_factors"):
        if key in scaling:
            scaling[key] = [float(x) for x in scaling[key]]
    return {"kind": kind, **scaling}


def _parameters(block: BlockConfig, family: Family) -> dict[str, Any]:
    """Return the rotary positions of a layer in the form of `rope_parameters`. Raises InputError if the layer rotates a
    part of each head and the family has no key for that."""
    position: Any = block.position
    parameters: dict[str, Any] = {"rope_theta": position.theta, "rope_type": "default"}
    if _PART in family.defaults:
        parameters[_PART] = position.fraction
    elif position.fraction != 1:
        raise InputError(f"{family.name} rotates whole heads")
    if (scaling := position.scaling) is not None:
        values = {theirs: getattr(scaling, ours) for theirs, ours in _SCALINGS[scaling.kind].items()}
        values = {key: list(x) if isinstance(x, tuple) else x for key, x in values.items() if x is not None}
        if scaling.kind == "yarn" and not scaling.mscale_all_dim:
            values.pop("mscale"), values.pop("mscale_all_dim")
        if scaling.kind == "dynamic":
            values.pop(_ORIGINAL)
        parameters |= {"rope_type": scaling.kind, **values}
    return parameters
