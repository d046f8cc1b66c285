"""The keys of a configuration file with their types, defaults and meanings, read from its sections."""

import ast
import functools
import inspect
import itertools
import json
import textwrap
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from jaxlm.core.schema import InWords, Section, kind_of, sections_in

_NAMES = {int: "integer", float: "number", str: "string", bool: "true | false"}
_SIGNS = {Gt: (">", "gt"), Ge: ("≥", "ge"), Lt: ("<", "lt"), Le: ("≤", "le")}
_LARGEST = 2**31  # bounds every count, which is not worth a word


class Key(NamedTuple):
    """A key by its dotted name; `kind` is that of its section, None where that has only one or for `kind` itself."""

    key: str
    kind: str | None
    type: str
    default: str
    meaning: str


class KeyTable(NamedTuple):
    """A table of the file, of one kind: its dotted name, the kind of a table around it where other kinds there lack it,
    its description and its own keys."""

    name: str
    kind: str | None
    within: str | None
    about: str
    keys: list[Key]


def tables(whole: type[Section]) -> list[KeyTable]:
    """Return the tables of a file, each kind of a table by itself, outer ones first."""
    return list(_tables([whole], "", (), None))


def type_of(section: type[Section], name: str) -> str:
    """Return the type of a key in words, such as "integer > 0"."""
    field = section.model_fields[name]
    if any(sections_in(field.annotation)):
        return {"": "table", ".NAME": "tables by name", "[]": "list of tables"}[_several(field)]
    return _type(field.annotation, field.metadata)


def _tables(
    sections: list[type[Section]], name: str, kind_key: tuple[Key, ...], within: str | None
) -> Iterator[KeyTable]:
    """Yield the tables that a dotted name may hold, and once each those inside them."""
    inside: dict[str, FieldInfo] = {}
    kinds: dict[str, list[str | None]] = {}
    for section in sections:
        keys = [*kind_key]
        for key, field in section.model_fields.items():
            place, meaning = f"{name}.{key}".lstrip("."), _meaning(section, key)
            is_table = any(sections_in(field.annotation))
            if is_table:
                inside.setdefault(place + _several(field), field)
                kinds.setdefault(place + _several(field), []).append(kind_of(section))
            if key != "kind" and (meaning or not is_table):
                keys.append(Key(place, kind_of(section), type_of(section, key), _default(field), meaning))
        yield KeyTable(name, kind_of(section), within, _one_line(inspect.getdoc(section)), keys)
    for place, field in inside.items():
        found = list(sections_in(field.annotation))
        own = kinds[place][0] if len(kinds[place]) < len(sections) else within
        yield from _tables(found, place, _kind_key(place, found), own)


def _kind_key(place: str, sections: list[type[Section]]) -> tuple[Key, ...]:
    """Return the key `kind` of the table at a place; none if its section has no kind."""
    kinds = _quoted(sections)
    if not kinds:
        return ()
    return (Key(f"{place}.kind", None, " | ".join(kinds), kinds[0], "Selects the other keys of this table."),)


def _quoted(sections: Iterable[type[Section]]) -> list[str]:
    return [json.dumps(kind) for kind in map(kind_of, sections) if kind is not None]


def _several(field: FieldInfo) -> str:
    """Return how one of several tables under a key is named after it."""
    return {dict: ".NAME", tuple: "[]"}.get(get_origin(field.annotation), "")


def _meaning(section: type[Section], key: str) -> str:
    """Return the meaning of a key, which a section inherits: the description of its field, or the docstring below."""
    for base in section.__mro__:
        field = base.model_fields.get(key) if issubclass(base, Section) else None
        if field and (meaning := field.description or _docstrings(base).get(key)):
            return _one_line(meaning)
    return ""


@functools.cache
def _docstrings(section: type[Section]) -> dict[str, str]:
    """Return the docstrings below the keys in the source of a class; none of a class that is not written as one."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    except OSError:
        return {}
    docstrings = {}
    for pair in itertools.pairwise(definition.body if isinstance(definition, ast.ClassDef) else ()):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                docstrings[key] = text
    return docstrings


def _default(field: FieldInfo) -> str:
    words = [each.default for each in _in_words(field.metadata) if each.default]
    if words or field.is_required():
        return words[0] if words else "required"
    default = field.get_default(call_default_factory=True)
    return "not set" if default is None else json.dumps(default)


def _type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    constraints = [one for each in metadata for one in (each.metadata if isinstance(each, FieldInfo) else [each])]
    if words := [each.type for each in _in_words(constraints) if each.type]:
        return words[0]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], [*arguments[1:], *constraints])
    if origin in (Union, types.UnionType):
        return " | ".join(_type(one, constraints) for one in arguments if one is not type(None))
    if origin is Literal:
        return " | ".join(map(json.dumps, arguments))
    if origin is tuple:
        kind, *bounds = _type(arguments[0]).split(" ", 1)
        return " ".join([f"list of {kind}s", *bounds])
    ends: dict[bool, str] = {}  # of several bounds at one end the outer one counts
    for constraint in constraints:
        if type(constraint) in _SIGNS:
            sign, bound = _SIGNS[type(constraint)]
            value = getattr(constraint, bound)
            shown = value if isinstance(value, int) else f"{value:g}"
            ends |= {sign in "<≤": f"{sign} {shown}"} if value != _LARGEST else {}
    within = " and ".join(ends[end] for end in sorted(ends))
    return f"{_NAMES[annotation]} {within}".rstrip()


def _in_words(metadata: Iterable[Any]) -> Iterator[InWords]:
    return (each for each in metadata if isinstance(each, InWords))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
