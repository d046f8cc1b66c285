"""JSON schemas of many kinds, each from a seed."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = ["name", "age", "größe", "日付", "a b", 'quo"te', "back\\slash", "é", "emoji 🙂", "", "$ref", "type"]
WORDS = ["Oslo", "Zürich", "東京", 'a "b"', "new\nline", "", "🙂🙃", "\u2028", "tab\t", "/"]
PATTERNS = ["^[a-z]{2,5}$", r"^\d{3}-\d{4}$", "^(ja|nein|vielleicht)$", "^[A-F0-9]{1,8}$", "^é+ü?$"]


def make(seed: int) -> Schema:
    """Return a schema whose values are of bounded length, or likely short."""
    draw = random.Random(seed)
    kind = (_record, _tree, _list_of_records, _nested, _union, _linked, _any)[seed % 7]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **kind(draw)}


def _integer(draw: random.Random) -> Schema:
    low = draw.randint(-1000, 1000)
    bounds: Schema = {"minimum": low, "maximum": low + draw.choice([0, 1, 7, 99, 12345])}
    if draw.random() < 0.3:
        bounds = {"exclusiveMinimum": low - 1, "exclusiveMaximum": low + draw.randint(1, 50)}
    return {"type": "integer", **bounds}


def _number(draw: random.Random) -> Schema:
    if draw.random() < 0.5:
        return {"type": "number", "minimum": 0.25, "maximum": draw.choice([0.5, 1, 3.75])}
    return {"enum": [draw.choice([0, -1.5, 2.5e10, 1e-3]), 7]}


def _string(draw: random.Random) -> Schema:
    if draw.random() < 0.4:
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 6)}


def _enum(draw: random.Random) -> Schema:
    values = [*draw.sample(WORDS, 3), draw.choice([None, True, 12, -0.5])]
    return {"enum": values} if draw.random() < 0.7 else {"const": draw.choice(values)}


def _simple(draw: random.Random) -> Schema:
    either: Schema = {"type": draw.choice(["boolean", "null", ["boolean", "null"]])}
    return draw.choice([_integer, _number, _string, _enum, lambda _: either])(draw)


def _object(draw: random.Random, value: Callable[[random.Random], Schema]) -> Schema:
    names = draw.sample(NAMES, draw.randint(1, 4))
    required = [name for name in names if draw.random() < 0.7]
    properties = {name: value(draw) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(draw: random.Random, items: Schema) -> Schema:
    least = draw.randint(0, 2)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + draw.randint(0, 3)}


def _record(draw: random.Random) -> Schema:
    return _object(draw, _simple)


def _list_of_records(draw: random.Random) -> Schema:
    return _array(draw, _record(draw))


def _nested(draw: random.Random) -> Schema:
    return _object(draw, lambda draw: draw.choice([_simple, _record, _list_of_records])(draw))


def _union(draw: random.Random) -> Schema:
    pair = {"type": "array", "prefixItems": [_simple(draw), _simple(draw)], "items": False, "minItems": 2}
    return {"anyOf": [_record(draw), pair, {"type": "null"}]}


def _tree(draw: random.Random) -> Schema:
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    node = {"type": "object", "properties": {"value": _simple(draw), "children": children}}
    return {"$defs": {"node": {**node, "required": ["value"], "additionalProperties": False}}, "$ref": "#/$defs/node"}


def _linked(draw: random.Random) -> Schema:
    rest = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
    properties = {"head": _simple(draw), "rest": rest}
    return {"type": "object", "properties": properties, "required": ["head", "rest"], "additionalProperties": False}


def _any(draw: random.Random) -> Schema:
    return _array(draw, draw.choice([_simple, _record, _union])(draw))
