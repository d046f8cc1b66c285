"""Error messages for invalid configurations, in terms of the keys of the file, with the nearest valid key."""

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_origin

from pydantic import ValidationError

from jaxlm.core.moved_keys import RENAMED
from jaxlm.core.schema import Section, chosen, kind_of, sections_at


def explain(error: ValidationError, whole: type[Section], values: dict[str, Any], filled: set[str]) -> str:
    """Return pydantic's first error as one line about the keys of a configuration file.

    `whole`: the section of the whole file. `values`: its content. `filled`: derived keys, reported only if no other key
    is wrong, since their errors follow from others.
    """
    errors = error.errors()
    if line := _renamed(errors, values):
        return line
    first, *others = [one for one in errors if _key(one["loc"], values) not in filled] or errors
    key, value = _key(first["loc"], values), first.get("input")
    others = [other for other in others if _key(other["loc"], values) != key]  # a union reports each of its types
    shown = "" if isinstance(value, dict) else f" = {value!r}"
    context = first.get("ctx", {})
    match first["type"]:
        case "literal_error" | "int_parsing" | "int_type" if key.startswith("mesh."):
            line = f'{key} = {value!r} is neither a whole number nor "all"'
        case "extra_forbidden":
            line = f"unknown key {key}{_did_you_mean(key, whole, values)}"
            unknown = [_key(other["loc"], values) for other in others if other["type"] == "extra_forbidden"]
            line += f" (unknown too: {', '.join(unknown)})" if unknown else ""
            others = [other for other in others if other["type"] != "extra_forbidden"]
        case "missing":
            line = f"{key} is missing"
        case "value_error":
            said = str(context["error"])
            line = said if not key or f"{key}." in said else f"{key}: {said}"
        case "union_tag_invalid":
            line = f"{key}.kind = {context['tag']!r} is none of {context['expected_tags']}"
        case "union_tag_not_found":
            line = f"{key}.kind is missing"
        case "model_type" | "model_attributes_type":
            line = f"{key} must be a section, [{key}]"
        case "tuple_type":
            line = f"{key}{shown} must be a list"
        case _:
            line = f"{key}{shown}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return line + (f" (and {len(others)} more)" if others else "")


def _renamed(errors: list[Any], values: dict[str, Any]) -> str | None:
    """Return the line that names every key of an earlier version with its present name; None where there is none."""
    renamings = []
    for error in errors:
        keys, value = [_key(error["loc"], values)], error.get("input")
        if error["type"] == "union_tag_invalid":
            keys = [f"{keys[0]}.kind = {error['ctx']['tag']!r}"]
        elif error["type"] == "literal_error":
            keys = [f"{keys[0]} = {str(value).lower() if isinstance(value, bool) else repr(value)}"]
        elif isinstance(value, dict):  # a section that is a value now
            keys += [f"{keys[0]}.{name}" for name in value]
        renamings += [f"{key} is now {RENAMED[key]}" for key in keys if key in RENAMED]
    return "; ".join(renamings) or None


def _key(location: tuple, values: Any) -> str:
    """Return the dotted key of an error, without the names of union members that pydantic inserts."""
    key = ""
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(values, list) and isinstance(part, int):
            values = values[part]
            key += f"[{part}]"
        elif isinstance(values, dict) and (part in values or last):
            values = values.get(part)
            key += f".{part}" if key else str(part)
    return key


def _did_you_mean(key: str, whole: type[Section], values: dict[str, Any]) -> str:
    key = re.sub(r"\[\d+\]", "", key)
    section, _, name = key.rpartition(".")
    if kinds := [kind_of(s) for s in sections_at(section, whole) if name in s.model_fields]:
        return f"; it is a key of {section}.kind = {' or '.join(map(repr, kinds))}"
    known = sorted({_like(known, key) for known in _keys(whole, values)})
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    near = [k for k in known if k.rpartition(".")[2] == name and k.startswith(f"{section}.")]
    near = near or [f"{section}.{n}".lstrip(".") for n in difflib.get_close_matches(name, siblings, 1)]
    near = near or [f"{section}.{n}".lstrip(".") for n in siblings if name in n.split("_")][:1]
    near = near or [k for k in known if k.rpartition(".")[2] == name]
    near = near or ([] if siblings else difflib.get_close_matches(key, known, 1))
    if near:
        return f"; did you mean {near[0]}?"
    return f"; [{section}] knows {', '.join(siblings)}" if section else f"; the sections are {', '.join(siblings)}"


_NAME = "NAME"


def _like(known: str, key: str) -> str:
    """Return a known key with NAME replaced by the name of the same table in `key`."""
    before, named, after = known.partition(f".{_NAME}.")
    given = key.removeprefix(f"{before}.")
    return f"{before}.{given.partition('.')[0]}.{after}" if named and given != key else known


def _keys(section: type[Section], values: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section and its subsections, of the kinds selected by the values."""
    for name, field in section.model_fields.items():
        yield prefix + name
        inside = values.get(name) if isinstance(values, dict) else None
        name += f".{_NAME}" * (get_origin(field.annotation) is dict)
        for inner in chosen(field.annotation, inside):
            yield from _keys(inner, inside, f"{prefix}{name}.")
