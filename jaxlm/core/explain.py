"""Error messages for invalid configurations, in terms of the keys of the file, with the nearest valid key."""

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_origin

from pydantic import ValidationError

from jaxlm.core.moved_keys import RENAMED
from jaxlm.core.schema import InWords, Section, chosen, kind_of, sections_at


def message_of(error: Any) -> str:
    """Return what one of pydantic's errors says, without the words that pydantic puts before a validator's own."""
    if error["type"] in ("value_error", "assertion_error"):
        return str(error["ctx"]["error"])
    return f"{error['msg'][:1].lower()}{error['msg'][1:]}"


def first_line(error: ValidationError) -> str:
    """Return pydantic's first error as "key: what it says"; what it says alone where it is of no single key."""
    first = error.errors()[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), message_of(first)]))


def explain(error: ValidationError, whole: type[Section], values: dict[str, Any], filled: set[str]) -> str:
    """Return pydantic's first error, with all unknown and all missing keys, as one line about the keys of a file.

    `whole`: the section of the whole file. `values`: its content. `filled`: derived keys, reported only if no other key
    is wrong, since their errors follow from others.
    """

    def named(one: Any) -> str:
        return _key(one["loc"], values, whole)

    errors = error.errors()
    if line := _renamed(errors, whole, values):
        return line
    causes = [one for one in errors if named(one) not in filled]
    causes = [one for one in causes if one["type"] != "missing" or not _follows(named(one), whole)] or causes
    ranks = {"extra_forbidden": 0, "missing": 2}  # what is missing may be in a table that is wrong, and comes last
    first, *others = sorted(causes or errors, key=lambda one: ranks.get(one["type"], 1))
    key, value = named(first), first.get("input")
    expected = [*dict.fromkeys(each for one in (first, *others) if named(one) == key for each in _expected(one))]
    others = [other for other in others if named(other) != key]  # a union reports each of its types
    shown = "" if isinstance(value, dict) else f" = {value!r}"
    context = first.get("ctx", {})
    match first["type"]:
        case "literal_error" | "int_parsing" | "int_type" if key.startswith("mesh."):
            line = f'{key} = {value!r} is neither a whole number nor "all"'
        case "extra_forbidden":
            line = f"unknown key {key}{_did_you_mean(key, whole, values)}"
            unknown, others = _split(others, "extra_forbidden")
            line += f" (unknown too: {', '.join(map(named, unknown))})" if unknown else ""
        case "missing":
            missing, others = _split(others, "missing")
            line = f"{_listed([key, *map(named, missing)])} {'are' if missing else 'is'} missing"
        case "value_error":
            text = message_of(first)
            line = text if not key or f"{key}." in text else f"{key}: {text}"
        case "union_tag_invalid":
            line = f"{key}.kind = {context['tag']!r} is none of {context['expected_tags']}"
        case "union_tag_not_found":
            line = f"{key}.kind is missing"
        case "model_type" | "model_attributes_type":
            line = f"{key} must be a section, [{key}]"
        case "bool_parsing" | "bool_type":
            line = f"{key}{shown} must be {', '.join(expected[:-1])} or {expected[-1]}"
        case "dict_type":
            line = f"{key}{shown} must be a table, [{key}]"
        case "tuple_type":
            line = f"{key}{shown} must be a list"
        case "too_short":
            line = f"{key}{shown} must be a list of {context['min_length']} or more"
        case "too_long":
            line = f"{key}{shown} must be a list of {context['max_length']} at most"
        case _:
            line = f"{key}{shown}: {message_of(first)}"
    missing, others = _split(others, "missing")
    line += f" (missing too: {_listed(list(map(named, missing)))})" if missing else ""
    return line + (f" (and {len(others)} more)" if others else "")


def _follows(key: str, whole: type[Section]) -> bool:
    """Return whether the value of a key that is left out follows from other keys."""
    section, _, name = _unnumbered(key).rpartition(".")
    fields = [s.model_fields[name] for s in sections_at(section, whole) if name in s.model_fields]
    return any(isinstance(each, InWords) and each.default for field in fields for each in field.metadata)


def _split(errors: list[Any], kind: str) -> tuple[list[Any], list[Any]]:
    """Return the errors of a type and the others."""
    return [one for one in errors if one["type"] == kind], [one for one in errors if one["type"] != kind]


def _listed(keys: list[str]) -> str:
    """Return keys as a list in words, those of outer tables first."""
    *others, last = sorted(dict.fromkeys(keys), key=lambda key: key.count("."))
    return f"{', '.join(others)} and {last}" if others else last


def _expected(error: Any) -> list[str]:
    """Return what one type of a union takes, in words; none for a type that has no short words."""
    if error["type"] == "literal_error":
        return [error["ctx"]["expected"]]
    words = {"bool": ["true", "false"], "int": ["a number"], "float": ["a number"], "string": ["a string"]}
    return words.get(error["type"].partition("_")[0], [])


def _renamed(errors: list[Any], whole: type[Section], values: dict[str, Any]) -> str | None:
    """Return the line that names every key of an earlier version with its present name; None where there is none."""
    renamings = []
    for error in errors:
        keys, value = [_key(error["loc"], values, whole)], error.get("input")
        if error["type"] == "union_tag_invalid":
            keys = [f"{keys[0]}.kind = {error['ctx']['tag']!r}"]
        elif error["type"] == "literal_error":
            keys = [f"{keys[0]} = {str(value).lower() if isinstance(value, bool) else repr(value)}"]
        elif isinstance(value, dict):  # a section that is a value now
            keys += [f"{keys[0]}.{name}" for name in value]
        renamings += [f"{key} is now {RENAMED[key]}" for key in keys if key in RENAMED]
    return "; ".join(renamings) or None


def _key(location: tuple, values: Any, whole: type[Section]) -> str:
    """Return the dotted key of an error, without the names of union members that pydantic inserts."""
    key = ""
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(values, list) and isinstance(part, int):
            values = values[part] if part < len(values) else {}  # of an entry that is missing
            key += f"[{part}]"
        elif isinstance(values, dict) and (part in values or last or _is_key(part, key, whole)):
            values = values.get(part, {})
            key += f".{part}" if key else str(part)
    return key


def _is_key(part: Any, table: str, whole: type[Section]) -> bool:
    """Return whether a table, which may be left out, has this key."""
    return any(part in section.model_fields for section in sections_at(_unnumbered(table), whole))


def _unnumbered(key: str) -> str:
    """Return a key without the numbers of tables in a list."""
    return re.sub(r"\[\d+\]", "", key)


def _did_you_mean(key: str, whole: type[Section], values: dict[str, Any]) -> str:
    key = _unnumbered(key)
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
