"""The types that values of a config.json must have: one rule for all keys that a family computes with."""

import functools
from collections.abc import Mapping
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.core.schema import sections_at, types_in
from jaxlm.families import rope_keys
from jaxlm.families.family import Family, families
from jaxlm.models.config import ModelConfig

_NAMES = {bool: "true or false", int: "a number", float: "a number", str: "a text"}
# Numbers that no family has a default of.
_NUMBERS = (
    *(
        "max_window_layers",
        "num_key_value_heads",
        "moe_latent_size",
        "original_max_position_embeddings",
        "rotary_dim",
        "sliding_window",
    ),
)
_READ_ELSEWHERE = ("sliding_window_pattern", "mamba_d_head")  # a number or a text


def check(config: Mapping[str, Any], family: Family, where: str) -> None:
    """Raise InputError where a key that a family computes with has a value of another type, such as a text in place of
    a number. null is a key that is left out; 0 and 1 are read as false and true."""
    expected = _expected(family.name)
    for key, value in config.items():
        if key in rope_keys.TABLES:
            _check_positions(key, value, where)
        elif key in expected:
            _check(key, value, expected[key], where)


def _check_positions(table: str, positions: Any, where: str) -> None:
    """Check a table of rotary positions, and the tables of single kinds of layers in it."""
    for key, value in positions.items() if isinstance(positions, Mapping) else ():
        if isinstance(value, Mapping):
            _check_positions(f"{table}.{key}", value, where)
        elif key in rope_keys.LISTS:
            if not isinstance(value, list | None) or not all(_is_a(float, each) for each in value or ()):
                raise InputError(f"{where}: {table}.{key} = {value!r}; it must be a list of numbers")
        elif key in rope_keys.TYPES:
            _check(f"{table}.{key}", value, rope_keys.TYPES[key], where)


def _check(key: str, value: Any, expected: type, where: str) -> None:
    if value is not None and not _is_a(expected, value):
        raise InputError(f"{where}: {key} = {value!r}; it must be {_NAMES[expected]}")


def _is_a(expected: type, value: Any) -> bool:
    if expected is str:
        return isinstance(value, str)
    return isinstance(value, int | float) and (expected is bool or not isinstance(value, bool))


@functools.cache
def _expected(name: str) -> dict[str, type]:
    """Return the type of each key that a family reads: that of its default, in any family, or that of the key of
    [model] which has its value."""
    of_keys: dict[str, type] = dict.fromkeys(_NUMBERS, int)
    for family in families().values():
        of_keys |= {key: type(value) for key, value in family.defaults.items() if type(value) in _NAMES}
    of_keys |= {key: kind for key, targets in families()[name].config.items() if (kind := _type_at(targets[0]))}
    return {key: kind for key, kind in of_keys.items() if key not in _READ_ELSEWHERE}


def _type_at(target: str) -> type | None:
    """Return the type of a key of [model] that is a switch or a number, maybe among others."""
    section, _, key = target.rpartition(".")
    fields = [each.model_fields[key] for each in sections_at(section, ModelConfig) if key in each.model_fields]
    types = set().union(*(types_in(field.annotation) for field in fields))
    return next((kind for kind in (bool, float, int) if kind in types), None)
