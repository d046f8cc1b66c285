"""Families: one file each, with the keys of config.json and the names of tensors of the family's models."""

import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.core.schema import merged
from jaxlm.families.rule import TensorRule, matching, named_kinds

_FILES = resources.files("jaxlm.families") / "tables"
_REFUSED = resources.files("jaxlm.families") / "refused.toml"
# Sections of a family's file whose keys are added to those of its base; a key of "" takes one away.
_SECTIONS = ("config", "defaults", "equal", "weights", "alternatives", "further", "copies", "repeats", "prefixes")


@dataclass(frozen=True)
class Family:
    """A published family.

    Attributes:
      name: `model_type` in config.json.
      architecture: the entry of `architectures` in config.json.
      model: keys of [model] that all models of the family share.
      config: by key of config.json, the key of [model] with the same value, or several such keys.
      defaults: values of keys that a config.json may leave out.
      equal: keys of config.json that, if present, must have one of these values.
      inert: keys that change no result in this family, beside those of `jaxlm.families.inert`.
      composites: translations of several keys together (`jaxlm.families.settings`).
      rules: the rules for the family's tensors.
      alternatives: the rules for a second layout, which is read and not written.
      further: by the key with the number of layers after the last, which predict tokens further ahead, how the names of
        their tensors begin; {l} stands for a layer, and names without it are of all these. An import keeps them for an
        export, and computes nothing with them.
      dropped: names of tensors that are no parameters; {l} stands for a layer.
      copies: tensors that a file may repeat under another name: by the name of the copy, the name of the tensor.
      aliases: by the older name of a key, its name today.
      repeats: by a key that the family does not read, the key whose value it may repeat.
      prefixes: by the prefix of tensor names in some files, the prefix that the rules have.
      outer: keys of rotary positions that are also written outside of `rope_parameters`.
      layer_lists: keys with an entry for each layer, which say how many layers there are where no number does.
      bases: the number of files that the family's file builds on.
    """

    name: str
    architecture: str
    model: Mapping[str, Any]
    config: Mapping[str, tuple[str, ...]]
    defaults: Mapping[str, Any]
    equal: Mapping[str, tuple[Any, ...]]
    inert: frozenset[str]
    composites: tuple[str, ...]
    rules: tuple[TensorRule, ...]
    alternatives: tuple[TensorRule, ...]
    further: Mapping[str, str]
    dropped: tuple[str, ...]
    copies: Mapping[str, str]
    aliases: Mapping[str, str]
    repeats: Mapping[str, str]
    prefixes: Mapping[str, str]
    outer: frozenset[str]
    layer_lists: tuple[str, ...]
    bases: int

    def renamed(self, name: str) -> str:
        """Return the name that the family has for a tensor."""
        prefixes = self.prefixes.items()
        return next((now + name.removeprefix(old) for old, now in prefixes if name.startswith(old)), name)

    def rules_of(self, names: Iterable[str]) -> tuple[TensorRule, ...]:
        """Return the rules for a file with tensors of these names: those of the second layout in place of the others
        for the same arrays, if the file has one of its tensors."""
        second = [rule.name for rule in self.alternatives if not any(rule.name == first.name for first in self.rules)]
        if not matching(names, second):
            return self.rules
        kept = [rule for rule in self.rules if not any(other.replaces(rule) for other in self.alternatives)]
        return (*kept, *self.alternatives)


@functools.cache
def families() -> dict[str, Family]:
    """Return all families by their `model_type`, the plainest first: Llama, then those with one kind of attention, by
    the number of files that a family builds on, and of translations of several keys together."""
    names = sorted(file.name.removesuffix(".toml") for file in _FILES.iterdir() if file.name.endswith(".toml"))
    found = [_family(name) for name in names if "model_type" in _read(name)]
    return {family.name: family for family in sorted(found, key=_parts)}


def _parts(family: Family) -> tuple[bool, int, int, int, str]:
    """Return what orders families."""
    kinds = len(named_kinds(family.rules))
    return family.name != "llama", kinds, family.bases, len(family.composites), family.name


def named(model_type: Any, where: str) -> Family:
    """Return the family of a `model_type`. Raises InputError for a family that jaxlm does not have; it names the part
    that is missing, where that is known."""
    if (part := _refused().get(model_type)) is not None:
        raise InputError(f"{where} has model_type {model_type!r}, whose layers have {part}: jaxlm lacks this part")
    if model_type not in families():
        raise InputError(f"{where} has model_type {model_type!r}; jaxlm reads {', '.join(families())}")
    return families()[model_type]


@functools.cache
def _refused() -> dict[str, str]:
    """Return the part that a family's layers have and [model] has not, by `model_type`."""
    parts = tomllib.loads(_REFUSED.read_text(encoding="utf-8"))
    return {model_type: part for part, model_types in parts.items() for model_type in model_types}


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_FILES / f"{name}.toml").read_text(encoding="utf-8"))


def _resolved(name: str) -> dict[str, Any]:
    own = _read(name)
    if "base" not in own:
        return own
    base = _resolved(own.pop("base"))
    for section in _SECTIONS:
        both = {**base.get(section, {}), **own.get(section, {})}
        own[section] = {key: value for key, value in both.items() if value != ""}
    own["model"] = merged(base.get("model", {}), own.get("model", {}))
    for key in ("inert", "dropped"):
        own[key] = [*base.get(key, []), *own.get(key, [])]
    return {**base, **own}


def _family(name: str) -> Family:
    description = _resolved(name)
    return Family(
        name=description["model_type"],
        architecture=description["architecture"],
        model=description["model"],
        config={key: _all(value) for key, value in description["config"].items()},
        defaults=description.get("defaults", {}),
        equal={key: _all(value) for key, value in description.get("equal", {}).items()},
        inert=frozenset(description.get("inert", ())),
        composites=tuple(description["composites"]),
        rules=_rules(description["weights"]),
        alternatives=_rules(description.get("alternatives", {})),
        further=description.get("further", {}),
        dropped=tuple(description.get("dropped", ())),
        copies=description.get("copies", {}),
        aliases=description.get("aliases", {}),
        repeats=description.get("repeats", {}),
        prefixes=description.get("prefixes", {}),
        outer=frozenset(description.get("outer", ())),
        layer_lists=tuple(description.get("layer_lists", ())),
        bases=_bases(name),
    )


def _rules(lines: Mapping[str, str | list[str]]) -> tuple[TensorRule, ...]:
    """Return the rules of lines. A tensor with several has one for each form of a layer that the family has."""
    return tuple(TensorRule.parse(tensor, line) for tensor, all_lines in lines.items() for line in _all(all_lines))


def _bases(name: str) -> int:
    base = _read(name).get("base")
    return 0 if base is None else 1 + _bases(base)


def _all(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)
