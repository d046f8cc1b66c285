"""The syntaxes of calls between the marks of their form: names of functions, and arguments as JSON or between tags."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jaxlm.core.json_text import DECODER, json_value

Schemas = Mapping[str, Mapping[str, Any] | None]
"""The JSON schema of the arguments of each function that may be called; None for a function without one."""


class WrittenCall(NamedTuple):
    """A call as a model wrote it: both parts may be anything."""

    name: Any
    arguments: Any


class CallSyntax(Protocol):
    """A syntax of calls: reads the text of one or more."""

    @property
    def ends_itself(self) -> bool:
        """Return whether a text that is whole shows it, without a mark behind it."""
        ...

    def calls(self, text: str, schemas: Schemas) -> list[WrittenCall]:
        """Return the calls that a text holds. Raises ValueError where it holds anything else."""
        ...

    def is_inside(self, text: str, schemas: Schemas) -> bool:
        """Return whether a text breaks off inside a value, so that a mark behind it is a part of the value."""
        ...


@dataclass(frozen=True)
class JsonSyntax:
    """JSON: an object with `name` and `arguments` (or `parameters`), a list of them, or several with semicolons
    between."""

    ends_itself = True

    def calls(self, text: str, schemas: Schemas) -> list[WrittenCall]:
        calls = []
        for value in _values(text):
            for each in value if isinstance(value, list) else [value]:
                if not isinstance(each, dict) or "name" not in each:
                    raise ValueError("an object without a name")
                calls.append(WrittenCall(each["name"], each.get("arguments", each.get("parameters"))))
        return calls

    def is_inside(self, text: str, schemas: Schemas) -> bool:
        try:
            for _ in _values(text):
                pass
        except (ValueError, RecursionError) as error:
            return _is_open_string(error)
        return False


@dataclass(frozen=True)
class NamedJsonSyntax:
    """The name of a function, and the JSON of its arguments; maybe several.

    Attributes:
      head: a pattern of what stands before the arguments, with the group `name`.
      tail: a pattern of what stands behind them.
    """

    head: re.Pattern[str]
    tail: re.Pattern[str]
    ends_itself = True

    def calls(self, text: str, schemas: Schemas) -> list[WrittenCall]:
        calls, at = [], 0
        while at < len(text):
            name, value, at = self._call(text, at)
            calls.append(WrittenCall(name, value))
        return calls

    def is_inside(self, text: str, schemas: Schemas) -> bool:
        at = 0
        try:
            while at < len(text):
                _, _, at = self._call(text, at)
        except (ValueError, RecursionError) as error:
            return _is_open_string(error)
        return False

    def _call(self, text: str, at: int) -> tuple[str, Any, int]:
        """Return the name and the arguments of the call that stands there, and where it ends."""
        if (head := self.head.match(text, at)) is None:
            raise ValueError("no name of a function")
        value, at = DECODER.raw_decode(text, head.end())
        if (tail := self.tail.match(text, at)) is None:
            raise ValueError("text behind the arguments")
        return head["name"].strip(), value, tail.end()


@dataclass(frozen=True)
class TaggedSyntax:
    """The name of a function, and its arguments between tags, as texts that its JSON schema gives types.

    A value of a type that is no string ends where its JSON does, and any other with its tag.

    Attributes:
      head: a pattern of what stands before the arguments, with the group `name`.
      key: a pattern of what stands before a value, with the group `key`.
      behind: a pattern of what stands behind a value.
      tail: what ends a call behind its arguments; "" where only a mark does.
      opens: what stands before a value.
      closes: what stands behind it.
    """

    head: re.Pattern[str]
    key: re.Pattern[str]
    behind: re.Pattern[str]
    tail: str
    opens: str
    closes: str

    @property
    def ends_itself(self) -> bool:
        return bool(self.tail)

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that no bare value may hold, because they may end it."""
        return tuple(mark for mark in (self.opens, self.closes, self.tail) if mark)

    def calls(self, text: str, schemas: Schemas) -> list[WrittenCall]:
        if (head := self.head.match(text)) is None:
            raise ValueError("no name of a function")
        name, at = head["name"].strip(), head.end()
        arguments = {}
        schema = schemas.get(name) or {}
        while (found := self._value(text, at, schema)) is not None:
            key, value, at = found
            arguments[key] = typed(value, _of_key(schema, key), schema)
        if text[at:].strip() != self.tail:
            raise ValueError("text behind the arguments")
        return [WrittenCall(name, arguments)]

    def is_inside(self, text: str, schemas: Schemas) -> bool:
        if (head := self.head.match(text)) is None:
            return False
        schema, at = schemas.get(head["name"].strip()) or {}, head.end()
        try:
            while (found := self._value(text, at, schema)) is not None:
                at = found[2]
        except ValueError as error:
            return _is_open_string(error)
        rest = text[at:]
        has_ended = bool(self.tail) and rest.rstrip().endswith(self.tail)
        return not has_ended and rest.rfind(self.opens) > rest.rfind(self.closes)

    def _value(self, text: str, at: int, schema: Mapping[str, Any]) -> tuple[str, str, int] | None:
        """Return the key and the value of the argument that stands there, and where it ends; None without one. Raises
        ValueError where JSON breaks off in it."""
        if (key := self.key.match(text, at)) is None:
            return None
        name, begin = key["key"].strip(), key.end()
        kinds = types_of(_of_key(schema, name), schema)
        if kinds and "string" not in kinds and (json := self._json_end(text, begin)) is not None:
            return name, text[begin : json.start()], json.end()
        behind = self.behind.search(text, begin)
        return behind and (name, text[begin : behind.start()], behind.end())

    def _json_end(self, text: str, begin: int) -> re.Match[str] | None:
        """Return what stands behind the JSON there; None where there is no JSON with its tag. Raises ValueError where
        it breaks off inside a string."""
        blanks = len(text[begin:]) - len(text[begin:].lstrip())
        try:
            _, end = DECODER.raw_decode(text, begin + blanks)
        except (ValueError, RecursionError) as error:
            if _is_open_string(error):
                raise
            return None
        blanks = len(text[end:]) - len(text[end:].lstrip())
        return self.behind.match(text, end) or self.behind.match(text, end + blanks)


def _of_key(schema: Mapping[str, Any], key: str) -> Any:
    """Return the schema of a property; None for one that is not declared."""
    declared = schema.get("properties")
    return declared.get(key) if isinstance(declared, Mapping) else None


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value of an argument that is written as a text.

    It is of the first type of its schema that the text can be; a text where it can be none. Without a type it is the
    value of the text as JSON, where it is JSON.

    Args:
      root: the schema of all arguments, which references point into.
    """
    types = types_of(schema, root)
    bare = text.strip()
    if "null" in types and (bare == "null" or (bare == "None" and "string" not in types)):
        return None
    for kind in types or ["any"]:
        if kind == "string":
            return text
        if kind == "boolean" and bare.lower() in ("true", "false"):  # some templates show True
            return bare.lower() == "true"
        try:
            value = json_value(bare)
        except (ValueError, RecursionError):
            continue
        if kind == "any":
            return value
        if kind == "integer" and isinstance(value, float) and value.is_integer():
            return int(value)
        if kind in _PYTHON_TYPES and isinstance(value, _PYTHON_TYPES[kind]) and not isinstance(value, bool):
            return value
    return text


_PYTHON_TYPES = {"integer": int, "number": int | float, "object": dict, "array": list}
_OTHER_NAMES = {  # that tools give types, which JSON Schema does not
    **{"str": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean"},
    **{"dict": "object", "list": "array"},
}


def types_of(schema: Any, root: Mapping[str, Any], followed: set[str] | None = None) -> list[str]:
    """Return the types that a JSON schema allows, in its order; none where it says none. `followed`: references, each
    of which is followed once."""
    if not isinstance(schema, Mapping):
        return []
    followed = set() if followed is None else followed
    types: list[str] = []
    for target in resolved(schema, root, followed):
        types += types_of(target, root, followed)
    kinds = schema.get("type")
    types += [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            types += types_of(each, root, followed)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not types and isinstance(values, list):
        types += [_type_of(value) for value in values]
    return list(dict.fromkeys(_OTHER_NAMES.get(kind, kind) for kind in types))


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any], followed: set[str]) -> list[Any]:
    """Return what the reference of a schema points to, unless it was followed before, and add it to those."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/") or reference in followed:
        return []
    followed.add(reference)
    target: Any = root
    for name in reference.removeprefix("#/").split("/"):
        target = target.get(name) if isinstance(target, Mapping) else None
    return [target]


def _type_of(value: Any) -> str:
    """Return the type of a value in JSON Schema's terms."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, kind in _PYTHON_TYPES.items() if isinstance(value, kind)), "string")


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, with semicolons between."""
    at = 0
    while at < len(text := text.strip()):
        value, at = DECODER.raw_decode(text, at)
        yield value
        rest = text[at:].lstrip()
        at = len(text) - len(rest)
        if rest:
            if rest[0] != ";":
                raise ValueError("text after a call")
            at += 1 + len(rest[1:]) - len(rest[1:].lstrip())


def _is_open_string(error: Exception) -> bool:
    """Return whether JSON cannot be read since it breaks off inside a string."""
    return isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated string")


def is_inside_json_string(text: str) -> bool:
    """Return whether JSON breaks off inside a string."""
    return JsonSyntax().is_inside(text, {})
