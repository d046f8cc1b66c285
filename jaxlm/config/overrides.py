"""Overrides: `key=value` on a command line, with dotted keys, in place of what a file says."""

import tomllib
from collections.abc import Callable, Iterable
from typing import Any

from jaxlm.config.experiment import Experiment
from jaxlm.core.errors import InputError
from jaxlm.core.schema import kind_of, leaves, sections_at, table_at


def assigned(overrides: Iterable[str], example: str = "training.steps=100") -> dict[str, Any]:
    """Return the nested values that `key=value` assignments set. Raises InputError, with an `example` of one."""
    values: dict[str, Any] = {}
    for override in overrides:
        assign(values, override, example)
    return values


def overridden(overrides: Iterable[str]) -> list[str]:
    """Return the dotted keys that `key=value` overrides set, of overrides that `load` took."""
    return list(overridden_values(overrides))


def overridden_values(overrides: Iterable[str]) -> dict[str, Any]:
    """Return {dotted key: value} of overrides."""
    return dict(leaves(assigned(overrides)))


def effective(overrides: Iterable[str], load: Callable[[list[str]], Experiment]) -> list[str]:
    """Return the overrides without those that set what the rest of the configuration, as `load` returns it, gives."""
    left = list(overrides)
    for key in dict.fromkeys(override.partition("=")[0].strip() for override in left):
        others = [override for override in left if override.partition("=")[0].strip() != key]
        try:
            same = load(others).model_dump(mode="json") == load(left).model_dump(mode="json")
        except InputError:  # without it there is none
            continue
        left = others if same else left
    return left


def assign(values: dict[str, Any], override: str, example: str = "training.steps=100") -> None:
    """Set in nested values what a `key=value` assignment says. Raises InputError, with an `example` of one."""
    key, equals, text = override.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not name or not all(sections):
        raise InputError(f"{override!r} is no override; write key=value, such as {example}")
    try:
        override.encode()
        document = tomllib.loads(f"value = {text}")
    except UnicodeEncodeError:
        raise InputError(f"{override!r} is not UTF-8; rename what it names") from None
    except RecursionError:
        raise InputError(f"{key}: its value has too many brackets in one another") from None
    except ValueError:
        document = {"value": text}  # a bare word is a string; so is a number of more digits than Python reads
    value = document.pop("value")
    if document:
        raise InputError(f"{override!r} sets more than {key}; give each key=value by itself")
    table = values
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise InputError(f"{key}: {section} is a value, not a section")
    table[name] = value


def leave_other_kinds(values: dict[str, Any], file: dict[str, Any], keys: set[str]) -> None:
    """Drop the file's keys that only its `kind` knows from each section whose `kind` one of these overrides changed.

    (A file that names another `kind` than its base drops all keys of the base's section.)"""
    for key in keys:
        section, _, name = key.rpartition(".")
        before, now, sections = table_at(section, file), table_at(section, values), sections_at(section, Experiment)
        if name != "kind" or not sections or not all(isinstance(t.get("kind", ""), str) for t in (before, now)):
            continue
        known = {kind_of(s): s.model_fields.keys() for s in sections}
        was, is_now = (known.get(table.get("kind", kind_of(sections[0])), set()) for table in (before, now))
        for other in before.keys() & (was - is_now) if is_now else ():
            if not any(f"{given}.".startswith(f"{section}.{other}.") for given in keys):
                now.pop(other, None)


def leave_other_length(values: dict[str, Any], keys: set[str]) -> None:
    """Drop the file's length of a run, in steps or epochs, where one of these overrides gives it by the other."""
    training, schedule = table_at("training", values), table_at("optimizer.schedule", values)
    if "training.steps" in keys and "training.epochs" not in keys:
        training.pop("epochs", None)
    if "training.epochs" in keys and "training.steps" not in keys:
        steps = training.pop("steps", None)
        if steps is not None and "optimizer.schedule.decay_steps" not in keys and schedule.get("decay_steps") == steps:
            schedule.pop("decay_steps")  # which ends with the run
