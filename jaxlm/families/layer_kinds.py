"""Windows and rotary positions of a published config.json, which may differ between kinds of layers, both ways."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.families.family import Family
from jaxlm.models.config import BlockConfig, ModelConfig, RopeConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NAMES = {_FULL: "global", _SLIDING: "local"}
# Keys of a scaling in config.json and in [model.position.scaling], by its kind.
_SCALINGS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_context_length",
    },
}


def read(given: dict[str, Any], values: Mapping[str, Any], where: str, has_windows: bool) -> dict[str, Any]:
    """Take the keys of windows and rotary positions out of `given`. Return those of [model].

    Both spellings are read: `rope_theta` and `rope_scaling`, and `rope_parameters`, which goes before them;
    `layer_types`, and the older keys from which they follow. Raises InputError for a kind of layer or of scaling that
    jaxlm lacks.
    """
    ropes = _ropes(given, where)
    if not has_windows:
        return {"position": ropes[_FULL]}
    kinds = _kinds(given, values["num_layers"], where)
    window = given.pop("sliding_window", None)
    for key in ("use_sliding_window", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"):
        given.pop(key, None)
    if window is None:
        kinds = [_FULL] * len(kinds)
    if len(set(kinds)) == 1:
        of_all = {} if kinds[0] == _FULL else {"attention": {"window": window}}
        return {"position": ropes[kinds[0]], **of_all}
    patches: dict[str, Any] = {_FULL: {}, _SLIDING: {"attention": {"window": window}}}
    # A patch adds keys and takes none away.
    base, other = (_SLIDING, _FULL) if "scaling" in ropes[_FULL] else (_FULL, _SLIDING)
    if ropes[base] != ropes[other]:
        changes = {key: value for key, value in ropes[other].items() if ropes[base].get(key) != value}
        patches[other] = {"position": changes, **patches[other]}
    return {"position": ropes[base], "pattern": _pattern(kinds, patches)}


def write(model: ModelConfig, family: Family, has_windows: bool) -> dict[str, Any]:
    """Return the keys of windows and rotary positions, in both spellings."""
    windowed = [block.window is not None for block in model.layers]
    kinds = [_SLIDING if is_windowed else _FULL for is_windowed in windowed]
    windows = {block.window for block in model.layers} - {None}
    if len(windows) > 1:
        raise InputError(f"layers have windows of {sorted(windows)}, and {family.name} has one")
    if windows and not has_windows:
        raise InputError(f"{family.name} has no windows")
    found: dict[str, Any] = {"sliding_window": next(iter(windows), None)} if has_windows else {}
    ropes: dict[str, Any] = {}
    for kind, block in zip(kinds, model.layers, strict=True):
        ropes.setdefault(kind, _parameters(block, family))
        if ropes[kind] != _parameters(block, family):
            raise InputError(f"layers of one kind have several rotary positions, and {family.name} has one")
    full = ropes.get(_FULL, ropes.get(_SLIDING))
    sliding = ropes.get(_SLIDING, full)
    found |= {"rope_theta": full["rope_theta"], "rope_scaling": _old_scaling(full), "rope_parameters": full}
    if sliding != full:
        found["rope_parameters"] = {_FULL: full, _SLIDING: sliding}
        found["rope_local_base_freq"] = sliding["rope_theta"]
    if "use_sliding_window" in family.defaults:
        found |= {"use_sliding_window": any(windowed), "max_window_layers": _first(windowed)}
    if any(windowed):
        found["layer_types"] = kinds
    return found


def _first(windowed: Sequence[bool]) -> int:
    return windowed.index(True) if True in windowed else len(windowed)


def _kinds(given: dict[str, Any], layers: int, where: str) -> list[str]:
    """Return the kind of each layer."""
    window, types = given.get("sliding_window"), given.pop("layer_types", None)
    if given.get("use_sliding_window") is False:
        given["sliding_window"] = window = None
    if types is not None:
        if strange := set(types) - _NAMES.keys():
            raise InputError(f"{where}: layer_types has {', '.join(sorted(strange))}, which jaxlm does not have")
        if len(types) != layers:
            raise InputError(f"{where}: layer_types names {len(types)} layers, and num_hidden_layers = {layers}")
        return list(types)
    every = given.get("sliding_window_pattern") or given.get("_sliding_window_pattern")
    if every:
        return [_FULL if (layer + 1) % every == 0 else _SLIDING for layer in range(layers)]
    if window is None:
        return [_FULL] * layers
    first = given.get("max_window_layers") if "use_sliding_window" in given else 0
    return [_SLIDING if layer >= (first or 0) else _FULL for layer in range(layers)]


def _pattern(kinds: Sequence[str], patches: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the shortest pattern that gives these kinds."""
    period = next(n for n in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % n] for i in range(len(kinds))))
    entries, seen = [], dict.fromkeys(kinds, 0)
    for kind, run in groupby(kinds[:period]):
        seen[kind] += 1
        name = _NAMES[kind] + (str(seen[kind]) if seen[kind] > 1 else "")
        entries.append({"name": name, "layers": len(list(run)), **patches[kind]})
    return entries


def _ropes(given: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return `position` of each kind of layer."""
    theta, scaling = given.pop("rope_theta", None), given.pop("rope_scaling", None) or {}
    parameters, local = given.pop("rope_parameters", None) or {}, given.pop("rope_local_base_freq", None)
    old = {"rope_theta": theta, **scaling}
    if parameters and all(isinstance(value, Mapping) for value in parameters.values()):
        if strange := parameters.keys() - _NAMES.keys():
            raise InputError(f"{where}: rope_parameters has {', '.join(sorted(strange))}, which jaxlm does not have")
        each = {kind: parameters.get(kind, {}) for kind in _NAMES}
    else:
        each = {kind: parameters for kind in _NAMES}
        if local is not None:
            full = _position({**old, **parameters}, where)
            return {_FULL: full, _SLIDING: _position({"rope_theta": local}, where)}
    return {kind: _position({**({} if one else old), "rope_theta": theta, **one}, where) for kind, one in each.items()}


def _position(parameters: dict[str, Any], where: str) -> dict[str, Any]:
    left = dict(parameters)
    kinds = {left.pop(key) for key in ("rope_type", "type") if left.get(key) is not None}
    kind = next(iter(kinds), "default")
    position = {"kind": "rope", "theta": float(left.pop("rope_theta"))}
    if kind != "default":
        if kind not in _SCALINGS:
            raise InputError(f"{where}: rope_type {kind!r} is a scaling that jaxlm does not have")
        keys = _SCALINGS[kind]
        scaling = {ours: left.pop(theirs) for theirs, ours in keys.items() if left.get(theirs) is not None}
        position["scaling"] = {"kind": kind, **scaling}
    if left := {key: value for key, value in left.items() if value is not None}:
        raise InputError(f"{where}: {', '.join(sorted(left))}: jaxlm knows no such key of rope_type {kind!r}")
    return position


def _parameters(block: BlockConfig, family: Family) -> dict[str, Any]:
    """Return the rotary positions of a layer as `rope_parameters` has them."""
    if not isinstance(block.position, RopeConfig):
        raise InputError(f"positions of the kind {block.position.kind!r} are not {family.name}'s")
    found: dict[str, Any] = {"rope_theta": block.position.theta, "rope_type": "default"}
    if (scaling := block.position.scaling) is not None:
        if scaling.kind not in _SCALINGS:
            raise InputError(f"a scaling of the kind {scaling.kind!r} is not {family.name}'s")
        keys = _SCALINGS[scaling.kind]
        found |= {"rope_type": scaling.kind, **{theirs: getattr(scaling, ours) for theirs, ours in keys.items()}}
    return found


def _old_scaling(parameters: dict[str, Any]) -> dict[str, Any] | None:
    if parameters["rope_type"] == "default":
        return None
    return {key: value for key, value in parameters.items() if key != "rope_theta"}
