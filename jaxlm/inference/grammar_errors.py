"""Plain words for what is wrong with a grammar, from the messages of the library llguidance. Imports no JAX."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_SHOWN = 300  # characters of a message
_TYPES = "array, boolean, integer, null, number, object, string"
_EXAMPLE = '{"type": "object", "properties": {"name": {"type": "string"}}}'

# What the library writes of an expression, in plain words with what would be right.
_EXPRESSIONS = {
    "look-around, including look-ahead and look-behind, is not supported": "there is no look-around; write the texts "
    "that it means",
    "backreferences are not supported": "there are no back-references; write out the texts that may come again",
    "unclosed group": "the ( has no ); close it, or write \\( for the character",
    "unopened group": "the ) has no (; open it, or write \\) for the character",
    "unclosed character class": "the [ has no ]; close it, or write \\[ for the character",
    "unclosed counted repetition": "the { has no }; close it, or write \\{ for the character",
    "repetition operator missing expression": "it repeats nothing; write \\*, \\+ or \\? for the character",
    "unrecognized escape sequence": "there is no such escape; leave out the \\, or write \\\\ for the character",
    "unrecognized flag": "there is no such group; write (…), (?:…) or (?P<name>…)",
    "Unicode property not found": "there is no such property of characters; write one such as \\p{L} or \\p{Lu}",
    "invalid character class range, the start must be <= the end": "the range ends before it begins; exchange its ends",
    "invalid repetition count range, the start must be <= the end": "the most is below the least; exchange them",
    "decimal literal invalid": "the number is too large",
}
_BORDERS = "there are no borders such as \\b, ^ or $ within it; leave them out: it matches the text from end to end"

# Patterns of the library's messages of a schema, and what they mean; {0} and {1} are their groups.
_SCHEMAS = {
    r"Invalid type: (.+)": f'"type" is "{{0}}", and may be one of {_TYPES}',
    r"Unimplemented keys: \[(.+)\]": "a text cannot be held to {0}; leave {0} out, or say it with other keywords",
    r"Unknown format: (.+)": '"format" is "{0}", which is unknown; leave it out, or give a "pattern"',
    r"Pointer '(.*)' does not exist": '"$ref" is "#{0}", and the schema has no such part',
    r"Resource '(.*)' is not present in a registry.*": '"$ref" is "{0}", and may name parts of the schema itself '
    'alone, such as "#/$defs/name"',
    r"Unsatisfiable schema: anyOf is empty": "no value fits it, since a list of choices is empty",
    r"Unsatisfiable schema: (.+)": "no value fits it: {0}",
    r"oneOf constraints are not supported.*": 'a text cannot be held to "oneOf" where a value may fit two of its '
    'schemas; write "anyOf"',
    r"Expected [fiu]\d+ for '(.+)', got (.+)": '"{0}" should be a number, and is {1}',
    r"Expected u?size for '(.+)', got (.+)": '"{0}" should be a whole number, and is {1}',
    r"Expected array for '(.+)', got (.+)": '"{0}" should be a list, and is {1}',
    r"Expected (\w+) for '(.+)', got (.+)": '"{1}" should be of the type {0}, and is {2}',
    r"schema must be an object or boolean": "a schema within it is neither an object nor true or false",
    r"invalid multiple of": '"multipleOf" should be a number above 0',
    r"recursion limit exceeded.*": "it is nested too deeply; name parts of it in $defs",
}

# The same of a Lark grammar.
_LARK = {
    r"no start rule found": 'it has no rule "start"; add one, such as start: "yes" | "no"',
    r'unknown name: "(.+)"': '"{0}" is not defined; add a rule {0}: …, or write it in quotes for the text',
    r'duplicate rule: "(.+)"': '"{0}" is defined twice; join both by |',
    r"lexer error": 'this is no name, "text", /expression/ or operator; a quote may be open',
    r"Expected token '(.+)', found ['\"](.+)['\"] \(at .*\)": "{0} is missing here",
    r"unknown grammar (@.+)": "{0} names another grammar, and there is none",
    r"range end must be >= start, got \((.+), (.+)\)": "{{{0},{1}}} ends before it begins; write {{{1},{0}}}",
    r"failed to compile JSON schema: (.+)": "its JSON schema: {0}",
    r'failed to parse "%json": (.+)': "what stands after %json is no JSON: {0}",
    r"Unknown common regex: (.+?);.*": '"{0}" cannot be imported; import one such as common.INT, common.NUMBER or '
    "common.ESCAPED_STRING",
}


def no_schema(text: str) -> str | None:
    """Return why a text is no JSON schema, as far as its JSON says; None where it may be one."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        schema = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        return f"is no JSON: {error.msg[0].lower()}{error.msg[1:]} at {where}"
    except RecursionError:
        return "is nested too deeply; name parts of it in $defs"
    except ValueError as error:
        return f"is no JSON: {error}"
    return None if isinstance(schema, dict) else f"is {shortened(text)}, and should be an object such as {_EXAMPLE}"


def explained(kind: str, text: str, message: str) -> str:
    """Return in one line what a message of the library means, with what would be right where that is known.

    Args:
      kind, text: of the grammar, as in `Grammar`.
      message: as the library writes it, of several lines.
    """
    message = message.strip()
    if (meant := _of_expression(message)) is not None:
        where = _place(text, lambda schema: "pattern" in schema or "patternProperties" in schema)
        is_schema, line = kind in ("json_object", "json_schema"), re.match(r"at (\d+)\(\d+\): ", message)
        at = f"line {line[1]}: " if kind == "lark" and line else ""
        return shortened(f"{where}: {meant}" if is_schema and where else at + meant)
    first_line = message.partition("\n")[0]
    if first_line.startswith("NoExtension"):
        return "no text fits it"
    if kind == "lark":
        return shortened(_of_lark(first_line))
    for pattern, meaning in _SCHEMAS.items():
        if found := re.fullmatch(pattern, first_line):
            where = _place(text, _has(first_line, found[1] if found.groups() else "")) if kind == "json_schema" else ""
            meant = meaning.format(*found.groups())
            return shortened(f"{where}: {meant}" if where else meant)
    return shortened(message)


def shortened(text: str) -> str:
    """Return a text in one line that is not too long."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def _of_expression(message: str) -> str | None:
    """Return what a message says of a regular expression, with where; None for one of something else."""
    lines = message.splitlines()
    if (begin := next((i for i, line in enumerate(lines) if "regex parse error:" in line), None)) is not None:
        parts = lines[begin + 1 :]
        error = next((i for i, line in enumerate(parts) if line.startswith("error: ")), None)
        if error is None:
            return None
        why = parts[error].removeprefix("error: ")
        at = parts[1].find("^") - 4 if error == 2 else -1  # an expression of one line, under which a sign points
        where = f"at character {at + 1} of '{parts[0][4:]}': " if at >= 0 else ""
        return where + _EXPRESSIONS.get(why, why)
    return _BORDERS if "lookarounds not supported" in message else None


def _of_lark(message: str) -> str:
    found = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", message)
    line, column, why = found.groups() if found else ("", "", message)
    for pattern, meaning in _LARK.items():
        if match := re.fullmatch(pattern, why):
            why = meaning.format(*match.groups())
            break
    return f"line {line}, column {column}: {why}" if line else why


def _has(message: str, name: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return whether a schema is the one that a message is of."""
    if message.startswith("Invalid type"):
        return lambda schema: name in (of if isinstance(of := schema.get("type"), list) else [of])
    if message.startswith("Unknown format"):
        return lambda schema: schema.get("format") == name
    if message.startswith("Unimplemented keys"):
        keys = json.loads(f"[{name}]")
        return lambda schema: all(key in schema for key in keys)
    if message.startswith("Expected"):
        return lambda schema: name in schema
    return lambda schema: False


def _place(text: str, has: Callable[[Mapping[str, Any]], bool]) -> str:
    """Return the path of the first part of a schema that has something; "" for the whole, or where none has."""

    def walk(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, Mapping):
            if has(value):
                yield path
            for key, each in value.items():
                yield from walk(each, f"{path}.{key}" if path else key)
        elif isinstance(value, list):
            for i, each in enumerate(value):
                yield from walk(each, f"{path}[{i}]")

    try:
        return next(walk(json.loads(text), ""), "")
    except (ValueError, RecursionError):
        return ""
