"""Grammars of a call's arguments between tags: texts that its JSON schema gives types, each as it is read back."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxlm.core.json_text import json_text
from jaxlm.inference.grammar import GrammarError, check_optional, json_rule
from jaxlm.server.answers.call_formats import ArgumentTags
from jaxlm.server.answers.call_syntax import TaggedSyntax, resolved, typed, types_of
from jaxlm.server.answers.grammars import LarkRules

_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
_OF_STRINGS = {"type", "minLength", "maxLength", "pattern"}
_NOT_OF_STRINGS = {
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems", "minItems"),
    *("maxItems", "properties", "required", "additionalProperties", "patternProperties"),
}
_CHOICES = ("anyOf", "oneOf")
# Texts that are read as JSON where they may be: no string beside values of other types is one of them.
_READ_AS_JSON = r"/\s*((?i:true|false|null|none)\s*|[-0-9\[{\"](?s:.*))/"


def tagged_arguments(
    tags: ArgumentTags, syntax: TaggedSyntax, schema: Mapping[str, Any], *, prefix: str, is_lenient: bool
) -> LarkRules:
    """Return the arguments of a function, in the order of its schema and without others than it names.

    Args:
      prefix: of the names of rules, other than those of other functions.
      is_lenient: what cannot be held to is left out, in place of an error.

    Raises GrammarError where a text between tags cannot be held to the schema.
    """
    check_optional(schema)
    if not is_lenient and (strange := [key for key in schema if key not in _OF_OBJECTS | _NOTES]):
        raise GrammarError(
            f"arguments between tags cannot be held to {strange[0]!r} of all; leave it out of the schema"
        )
    declared, required = schema.get("properties"), schema.get("required")
    declared = declared if isinstance(declared, Mapping) else {}
    required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    of_name = {**declared, **{name: {} for name in required if name not in declared}}
    parts, rules = [], []
    for place, (name, its) in enumerate(of_name.items()):
        before = f"{tags.before_key}{name}{tags.before_value}"
        key = syntax.key.match(before)
        if key is None or key.end() < len(before.rstrip("\n")) or key["key"].strip() != name:
            if is_lenient:
                continue
            raise GrammarError(f"the parameter {name!r} cannot stand in a tag; give it another name")
        try:
            value = _Value(its, schema, syntax, is_lenient).rule(tags.behind_value, f"{prefix}{place}")
        except GrammarError as error:
            if not is_lenient:
                raise GrammarError(f"the parameter {name!r}: {error}") from None
            value = _Value({"type": "string"}, {}, syntax, True).rule(tags.behind_value, f"{prefix}{place}")
        part = f"{json.dumps(before)} ({value.expression})"
        parts.append(part if name in required else f"({part})?")
        rules += value.rules
    return LarkRules(" ".join(parts), tuple(rules))


class _Value:
    """The texts of one parameter that are read as values of its schema."""

    def __init__(self, schema: Any, root: Mapping[str, Any], syntax: TaggedSyntax, is_lenient: bool):
        self._schema, self._root, self._syntax, self._is_lenient = schema, root, syntax, is_lenient
        types = types_of(schema, root)
        self._is_text = next((kind == "string" for kind in types if kind != "null"), False)  # whatever it looks like
        self._takes_strings = "string" in types

    def rule(self, behind: str, name: str) -> LarkRules:
        """Return the expression of a value with the text `behind` it. `name`: for its rules."""
        texts, values = [], []
        for each in _alternatives(self._schema, self._root, set()):
            kinds = types_of(each, self._root)
            if isinstance(each, Mapping) and ("enum" in each or "const" in each):
                literals = [each["const"]] if "const" in each else each["enum"]
                literals = literals if isinstance(literals, list) else []
                texts += [json.dumps(text) for value in literals for text in self._texts_of(value)]
            elif "string" in kinds:
                texts.append(self._string(each))
            elif self._takes_strings and kinds and kinds[0] in ("null", "boolean"):
                words = {"null": ["null"], "boolean": ["true", "false"]}[kinds[0]]
                texts += [json.dumps(word) for word in words if self._reads(word, json.loads(word))]
            elif not self._is_text:
                values.append(each if isinstance(each, Mapping) else {})
        if not texts and not values:
            raise GrammarError("no text between tags is read as one of its values")
        expressions, rules = [], []
        if texts:
            marks = "|".join(re.escape(mark).replace("/", r"\/") for mark in self._syntax.marks)
            body = f"({' | '.join(texts)}) & ~/(?s:.*)({marks})(?s:.*)/"
            rules.append(f"TEXT_{name}: ({body}) {json.dumps(behind)}")
            expressions.append(f"TEXT_{name}")
        if values:
            schemas = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
            schema = {**(values[0] if len(values) == 1 else {"anyOf": values}), **schemas}
            expressions.append(f"{json_rule(schema, is_lenient=self._is_lenient)} {json.dumps(behind)}")
        return LarkRules(" | ".join(expressions), tuple(rules))

    def _reads(self, text: str, value: Any) -> bool:
        read = typed(text, self._schema, self._root)
        return read == value and isinstance(read, bool) == isinstance(value, bool)

    def _texts_of(self, value: Any) -> Iterator[str]:
        """Yield the text that is read as a value, if one is."""
        text = value if isinstance(value, str) else json_text(value)
        if self._reads(text, value) and not any(mark in text for mark in self._syntax.marks):
            yield text

    def _string(self, schema: Any) -> str:
        """Return the expression of a terminal: the texts of a schema of strings."""
        strange = [key for key in schema if key not in _OF_STRINGS | _NOT_OF_STRINGS | _NOTES]
        if strange and not self._is_lenient:
            raise GrammarError(f"a text between tags cannot be held to {strange[0]!r}; leave it out of the schema")
        parts = [rf"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/"]
        if "pattern" in schema:
            parts.append(_matching(str(schema["pattern"])))
        if not self._is_text:
            parts.append(f"~{_READ_AS_JSON}")
        return f"({' & '.join(parts)})"


def _alternatives(schema: Any, root: Mapping[str, Any], followed: set[str]) -> Iterable[Any]:
    """Yield the schemas of one type each that a schema chooses from, as far as it does nothing else. `followed`:
    references, each of which is followed once."""
    if not isinstance(schema, Mapping):
        yield schema
        return
    keys = [key for key in schema if key not in _NOTES]
    if keys == ["$ref"]:
        for target in resolved(schema, root, followed):
            yield from _alternatives(target, root, followed)
    elif len(keys) == 1 and keys[0] in _CHOICES and isinstance(schema[keys[0]], list):
        for each in schema[keys[0]]:
            yield from _alternatives(each, root, followed)
    elif isinstance(kinds := schema.get("type"), list) and not {"enum", "const"} & schema.keys():
        for kind in kinds:
            yield {**schema, "type": kind}
    else:
        yield schema


def _matching(pattern: str) -> str:
    """Return the terminal of texts in which a pattern of JSON Schema finds a match: anywhere, unless it says where."""
    depth, is_class, bare = 0, False, re.sub(r"\\.", "..", pattern, flags=re.S)
    for character in bare:
        if is_class:
            is_class = character != "]"
        elif character == "[":
            is_class = True
        depth += {"(": 1, ")": -1}.get(character, 0) * (not is_class)
        if character == "|" and not depth and not is_class and re.search(r"\^|\$", bare):
            raise GrammarError(f"write the pattern {pattern!r} as ^(…)$, so that its choices end where it does")
    begins, ends = bare.startswith("^"), bare.endswith("$")
    inner = re.sub(
        r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], pattern[begins : len(pattern) - ends]
    )
    return f"/{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}/"
