"""Keys of config.json that no result of a model depends on. Imports no JAX."""

import functools
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

_FILE = resources.files("jaxlm.families") / "inert.toml"
_ALWAYS_ON, _USUAL, _USUAL_VALUES = "always_on", "usual", "usual_values"
_NOTHING = (None, False, 0, "", "none", "default", [], {})
_MULTIPLIERS = ("_multiplier", "_scale", "_scaling", "_factor")  # which are 1 where nothing is multiplied


def is_inert(key: str, value: Any) -> bool:
    """Return whether a key that no part of a family reads changes no result: it is one of the keys that concern no
    computation (`inert.toml`), or its value asks for nothing."""
    if _matches(key, _names()[_ALWAYS_ON]):
        return value is not False
    return _is_listed(key) or asks_for_nothing(key, value)


def asks_for_nothing(key: str, value: Any) -> bool:
    """Return whether a value leaves out the part that a key is about: null, false, 0, what is empty, "none", "default",
    and 1 of a multiplier."""
    if isinstance(value, str):
        value = value.lower()
    return value in _NOTHING or (value == 1 and value is not True and key.endswith(_MULTIPLIERS))


def is_usual(key: str, value: Any) -> bool:
    """Return whether nearly every config.json has a key, or has it with this value."""
    names = _names()
    return key in names[_USUAL] or (key in names[_USUAL_VALUES] and names[_USUAL_VALUES][key] == value)


def _is_listed(key: str) -> bool:
    return any(_matches(key, names) for section, names in _names().items() if section != _ALWAYS_ON)


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


@functools.cache
def _names() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
