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
        content = getattr(table, key) if isinstance(table, Section) else value
        if isinstance(content, Section | dict) or (
            isinstance(content, tuple | list) and isinstance((*content, 0)[0], Section | dict)
        ):
            inside[f"{name}.{key}".lstrip(".")] = content
        elif value is None and isinstance(table, Section):
            yield f"# {key} = <{type_of(type(table), key)}>"
        else:
            yield tomli_w.dumps({key: value}).rstrip("\n")
    for place, content in inside.items():
        several = isinstance(content, tuple | list)
        for one in content if several else [content]:
            yield from ("", f"[[{place}]]" if several else f"[{place}]")
            yield from _lines(one, place)
