"""Sections written as TOML, with every key."""

from collections.abc import Iterator
from typing import Any

import tomli_w

from jaxlm.core.reference import type_of
from jaxlm.core.schema import Section


def to_toml(whole: Section) -> str:
    """Return a file with every key: its value, or if it is not set its type, in a comment."""
    return "\n".join(_lines(whole, "")).lstrip() + "\n"


def _lines(table: Section | dict[str, Any], name: str) -> Iterator[str]:
    """Yield the lines of a table below its header: its keys, then the tables inside it."""
    inside = {}
    for key, value in (table.model_dump(mode="json") if isinstance(table, Section) else table).items():
        held = getattr(table, key) if isinstance(table, Section) else value
        if isinstance(held, Section | dict) or (
            isinstance(held, tuple | list) and isinstance((*held, 0)[0], Section | dict)
        ):
            inside[f"{name}.{key}".lstrip(".")] = held
        elif value is None and isinstance(table, Section):
            yield f"# {key} = <{type_of(type(table), key)}>"
        else:
            yield tomli_w.dumps({key: value}).rstrip("\n")
    for place, held in inside.items():
        several = isinstance(held, tuple | list)
        for one in held if several else [held]:
            yield from ("", f"[[{place}]]" if several else f"[{place}]")
            yield from _lines(one, place)
