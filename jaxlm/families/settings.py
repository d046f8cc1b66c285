"""The keys of a published config.json and those of [model], both ways."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.core.schema import merged
from jaxlm.families import layer_kinds
from jaxlm.families.family import Family, families, named
from jaxlm.models.config import BlockConfig, ModelConfig


def model_of(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the architecture that a config.json describes.

    Raises InputError for a family that jaxlm does not have, and for a key that it does not know or whose value it
    cannot express: nothing is ignored that changes a result.
    """
    family = named(config.get("model_type"), where)
    given = {key: value for key, value in {**family.defaults, **config}.items() if key not in family.inert}
    values: dict[str, Any] = dict(family.model)
    for key, allowed in family.equal.items():
        value = given.pop(key, allowed[0])
        if value is not None and value not in allowed:
            raise InputError(f"{where}: {key} = {value!r}, and jaxlm has {family.name} with {_either(allowed)} alone")
    for key, targets in family.config.items():
        if (value := given.pop(key, None)) is not None:
            for target in targets:
                values = merged(values, _nested(target, value))
    for composite in family.composites:
        values = merged(values, _READERS[composite](given, values, where))
    if left := [key for key, value in given.items() if value not in (None, {})]:
        raise InputError(f"{where}: {', '.join(sorted(left))}: jaxlm knows no such key of {family.name}")
    return ModelConfig.model_validate(values)


def config_of(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the config.json of a model in a family, with both spellings of keys that have two."""
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "transformers_version": "4.40.0",
        "initializer_range": model.initializer_std,
    }
    config |= {key: allowed[0] for key, allowed in family.equal.items()}
    config |= {key: _value(model, targets[0]) for key, targets in family.config.items()}
    for composite in family.composites:
        config |= _WRITERS[composite](model, family)
    return config


def family_of(model: ModelConfig) -> Family:
    """Return the family that a model can be published in. Raises InputError where there is none."""
    for family in families().values():
        try:
            if _alike(model_of(config_of(model, family), family.name), model):
                return family
        except (InputError, ValueError, AttributeError):
            continue
    raise InputError(f"this [model] is none of {', '.join(families())}, and cannot be exported")


def _alike(one: ModelConfig, other: ModelConfig) -> bool:
    """Return whether two models compute the same, whatever the entries of their patterns are called."""
    of_blocks = {*BlockConfig.model_fields, "pattern", "initializer_std"}
    return one.layers == other.layers and one.model_dump(exclude=of_blocks) == other.model_dump(exclude=of_blocks)


def _either(allowed: tuple[Any, ...]) -> str:
    return " or ".join(map(repr, allowed))


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value


def _value(model: ModelConfig, dotted: str) -> Any:
    found: Any = model
    for key in dotted.split("."):
        found = getattr(found, key)
    return found


def _read_query_scale(given: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Gemma divides queries by the root of a number of its own, not of the width of a head."""
    scalar = given.pop("query_pre_attn_scalar")
    same = scalar == values["attention"].get("head_dim")
    return {} if same else {"attention": {"scale": scalar**-0.5}}


def _write_query_scale(model: ModelConfig, family: Family) -> dict[str, Any]:
    attention = model.attention
    scalar = attention.head_dim if attention.scale is None else attention.scale**-2
    whole = round(scalar)
    return {"query_pre_attn_scalar": whole if abs(scalar - whole) < 1e-6 * whole else scalar}


def _read_inner(given: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """GPT-2 leaves out the width of its feed-forward layer: four times the stream's."""
    return {} if "d_ff" in values["feed_forward"] else {"feed_forward": {"d_ff": 4 * values["d_model"]}}


def _write_inner(model: ModelConfig, family: Family) -> dict[str, Any]:
    return {}


# Translations of several keys together.
_READERS = {
    "rope": partial(layer_kinds.read, has_windows=False),
    "rope and windows": partial(layer_kinds.read, has_windows=True),
    "query scale": _read_query_scale,
    "inner width": _read_inner,
}
_WRITERS = {
    "rope": partial(layer_kinds.write, has_windows=False),
    "rope and windows": partial(layer_kinds.write, has_windows=True),
    "query scale": _write_query_scale,
    "inner width": _write_inner,
}
