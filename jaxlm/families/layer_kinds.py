"""Windows and rotary positions of a published config.json, which may differ between layers, both ways."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxlm.core.errors import InputError
from jaxlm.families import rope_keys
from jaxlm.families.family import Family
from jaxlm.families.layer_patterns import LAYERS
from jaxlm.models.block_config import BlockConfig
from jaxlm.models.config import ModelConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
_KINDS = (_FULL, _SLIDING)
# Of layers in a pattern, by whether they have a window and rotary positions.
_NAMES = {(False, True): "global", (True, True): "local", (False, False): "unrotated", (True, False): "local_unrotated"}
_OLD_KEYS = ("use_sliding_window", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern")


@dataclass(frozen=True)
class LayerKinds:
    """The ways in which the layers of a family may differ.

    `windows`: some layers may have a window. `kinds`: transformers requires a window's size and the kind of each layer,
    even if no layer has a window. `rotates`: the layers with rotary positions, which are all layers, layers with a
    window, layers with a window or all if no window is given, or the layers of a list.
    """

    windows: bool = False
    kinds: bool = False
    rotates: Literal["all", "windowed", "windowed or all", "listed"] = "all"

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Take the keys of windows and rotary positions out of `entries`, and return the corresponding keys of [model].

        Both spellings are read: `rope_parameters`, or else `rope_theta` and `rope_scaling`; `layer_types`, or the older
        keys that determine the kinds of layers. Raises InputError for a kind of layer or of scaling that jaxlm lacks.
        """
        layers = values["num_layers"]
        ropes = rope_keys.read(entries, _KINDS, values, where)
        typed = entries.get("layer_types") is not None
        if not self.windows:
            _drop_unused_windows(entries, layers)
        kinds = _kinds(entries, layers, where) if self.windows else [_FULL] * layers
        window = entries.pop("sliding_window", None) if self.windows else None
        for key in _OLD_KEYS if self.windows else ():
            entries.pop(key, None)
        if window is None:
            kinds = [_FULL] * layers
        rotated = self._rotated(entries, kinds, window, where)
        if self.rotates == "listed" and window is not None and not typed:  # SmolLM3's two kinds
            kinds = [_FULL if rotates else _SLIDING for rotates in rotated]
        unrotated = {"kind": "none"}
        found = [
            (window if kind == _SLIDING else None, ropes[kind] if rotates else unrotated)
            for kind, rotates in zip(kinds, rotated, strict=True)
        ]
        return {**_model(found), "context_length": rope_keys.stretched(ropes.values(), values["context_length"])}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        """Return the keys of windows and rotary positions, in both spellings. Raises InputError if the family has
        no keys for the model's layers."""
        windowed = [block.window is not None for block in model.layers]
        rotated = [block.position.kind == "rope" for block in model.layers]
        windows = {block.window for block in model.layers} - {None}
        if len(windows) > 1 or (windows and not self.windows):
            raise InputError(f"{family.name} has {'one window' if self.windows else 'no windows'}")
        window = next(iter(windows), None)
        if window is None and self.kinds and not (self.rotates == "windowed or all" and any(rotated)):
            window = family.defaults["sliding_window"]
        entries: dict[str, Any] = {"sliding_window": window} if self.windows else {}
        kinds = [_SLIDING if is_windowed else _FULL for is_windowed in windowed]
        if rotating := _rotating(model.layers, kinds, rotated, family):
            entries |= rope_keys.write(rotating, model, family)
        elif self.rotates == "all":
            raise InputError(f"{family.name} has rotary positions")
        if "use_sliding_window" in family.defaults:
            entries |= {"use_sliding_window": any(windowed), "max_window_layers": _first(windowed)}
        if any(windowed) or self.kinds:
            entries["layer_types"] = kinds
        if self.rotates == "listed":
            entries["no_rope_layers"] = [int(rotates) for rotates in rotated]
        elif rotated != self._rotated({}, kinds, window):
            raise InputError(f"{family.name} rotates other layers")
        return entries

    def _rotated(
        self, entries: dict[str, Any], kinds: Sequence[str], window: int | None, where: str = ""
    ) -> list[bool]:
        """Return whether each layer has rotary positions."""
        if self.rotates == "windowed" or (self.rotates == "windowed or all" and window is not None):
            return [kind == _SLIDING for kind in kinds]
        if self.rotates == "listed":
            every = entries.pop("no_rope_layer_interval", None) or len(kinds) + 1
            listed = entries.pop("no_rope_layers", None) or [(layer + 1) % every for layer in range(len(kinds))]
            if not isinstance(listed, list) or len(listed) != len(kinds):
                raise InputError(f"{where}: no_rope_layers = {listed!r}; it must be a list of {len(kinds)} layers")
            return [bool(rotates) for rotates in listed]
        return [True] * len(kinds)


def _model(layers: Sequence[tuple[int | None, dict[str, Any]]]) -> dict[str, Any]:
    """Return the keys of [model] for layers with these windows and positions, and what each layer changes of them."""
    positions = [position for _, position in layers]
    rotary = [position for position in positions if position["kind"] == "rope"] or positions
    # A patch adds keys and takes none away.
    base = next((position for position in rotary if "scaling" not in position), rotary[0])
    whole = layers[0][0] if len({window for window, _ in layers}) == 1 else None
    keys: dict[str, Any] = {"position": base, **({} if whole is None else {"attention": {"window": whole}})}
    patches = []
    for window, position in layers:
        patch: dict[str, Any] = {}
        if position != base:
            kept = base if position["kind"] == base["kind"] else {}
            patch["position"] = {key: value for key, value in position.items() if kept.get(key) != value}
        if window != whole:
            patch["attention"] = {"window": window}
        patches.append((_NAMES[window is not None, position["kind"] == "rope"], patch))
    return {**keys, LAYERS: patches}


def _rotating(
    blocks: Sequence[BlockConfig], kinds: Sequence[str], rotated: Sequence[bool], family: Family
) -> dict[str, BlockConfig]:
    """Return a layer of each kind with rotary positions. Raises InputError for several of a kind."""
    first_blocks: dict[str, BlockConfig] = {}
    for block, kind, rotates in zip(blocks, kinds, rotated, strict=True):
        if rotates and first_blocks.setdefault(kind, block).position != block.position:
            raise InputError(f"layers of one kind have several rotary positions, and {family.name} has one")
    return first_blocks


def _drop_unused_windows(entries: dict[str, Any], layers: int) -> None:
    """Take keys of windows that ask for none out of the `entries` of a family without windows."""
    if entries.get("sliding_window") is None or entries.get("use_sliding_window") is False:
        for key in ("sliding_window", *_OLD_KEYS):
            entries.pop(key, None)
    if entries.get("layer_types") == [_FULL] * layers:
        del entries["layer_types"]


def _first(windowed: Sequence[bool]) -> int:
    return windowed.index(True) if True in windowed else len(windowed)


def _kinds(entries: dict[str, Any], layers: int, where: str) -> list[str]:
    """Return the kind of each layer."""
    window, types = entries.get("sliding_window"), entries.pop("layer_types", None)
    if entries.get("use_sliding_window") is False:
        entries["sliding_window"] = window = None
    every = entries.get("sliding_window_pattern") or entries.get("_sliding_window_pattern")
    if every and not (set(every) <= set("LG") if isinstance(every, str) else type(every) is int):
        raise InputError(f"{where}: sliding_window_pattern = {every!r}; it must be a whole number, or letters L and G")
    if types is not None:
        if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
            raise InputError(f"{where}: layer_types = {types!r}; it must be a list of the kinds of the layers")
        if strange := set(types) - set(_KINDS):
            raise InputError(f"{where}: layer_types has {', '.join(sorted(strange))}, which jaxlm does not have")
        if len(types) != layers:
            raise InputError(f"{where}: layer_types names {len(types)} layers, and num_hidden_layers = {layers}")
        return list(types)
    if isinstance(every, str):  # a letter for each layer of a period: L local, G global
        return [_SLIDING if every[layer % len(every)] == "L" else _FULL for layer in range(layers)]
    if every:
        return [_FULL if (layer + 1) % every == 0 else _SLIDING for layer in range(layers)]
    if window is None:
        return [_FULL] * layers
    first = entries.get("max_window_layers") if "use_sliding_window" in entries else 0
    return [_SLIDING if layer >= (first or 0) else _FULL for layer in range(layers)]
