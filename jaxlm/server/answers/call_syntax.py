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

    def is_inside(self, text: str) -> bool:
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

    def is_inside(self, text: str) -> bool:
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

    def is_inside(self, text: str) -> bool:
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

    Attributes:
      head: a pattern of what stands before the arguments, with the group `name`.
      argument: a pattern of an argument, with groups `key` and `value`.
      tail: what ends a call behind its arguments; "" where only a mark does.
      opens: what stands before a value.
      closes: what stands behind it.
    """

    head: re.Pattern[str]
    argument: re.Pattern[str]
    tail: str
    opens: str
    closes: str

    @property
    def ends_itself(self) -> bool:
        return bool(self.tail)

    def calls(self, text: str, schemas: Schemas) -> list[WrittenCall]:
        if (head := self.head.match(text)) is None:
            raise ValueError("no name of a function")
        name, at, schema = head["name"].strip(), head.end(), schemas.get(head["name"].strip()) or {}
        declared = schema.get("properties")
        arguments = {}
        while (match := self.argument.match(text, at)) is not None:
            key, at = match["key"].strip(), match.end()
            of_key = declared.get(key) if isinstance(declared, Mapping) else None
            arguments[key] = typed(match["value"], of_key, schema)
        if text[at:].strip() != self.tail:
            raise ValueError("text behind the arguments")
        return [WrittenCall(name, arguments)]

    def is_inside(self, text: str) -> bool:
        has_ended = bool(self.tail) and text.rstrip().endswith(self.tail)
        return not has_ended and text.rfind(self.opens) > text.rfind(self.closes)


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value of an argument that is written as a text.

    It is of the first type of its schema that the text can be; a text where it can be none. Without a type it is the
    value of the text as JSON, where it is JSON.

    Args:
      root: the schema of all arguments, which references point into.
    """
    types = _types(schema, root)
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
_MOST_REFERENCES = 16  # that lead to each other


def _types(schema: Any, root: Mapping[str, Any], references: int = 0) -> list[str]:
    """Return the types that a JSON schema allows, in its order; none where it says none."""
    if not isinstance(schema, Mapping) or references > _MOST_REFERENCES:
        return []
    types: list[str] = []
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        target: Any = root
        for name in reference.removeprefix("#/").split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        types += _types(target, root, references + 1)
    kinds = schema.get("type")
    types += [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            types += _types(each, root, references + 1)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not types and isinstance(values, list):
        types += [_type_of(value) for value in values]
    return list(dict.fromkeys(_OTHER_NAMES.get(kind, kind) for kind in types))


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
    return JsonSyntax().is_inside(text)
