"""The form that a request asks of a text: JSON, the values of a schema, or the texts of another grammar."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxlm.inference.grammar import Grammar
from jaxlm.server.refusals import Refusal
from jaxlm.server.request_body import RequestBody

JsonSchema = Annotated[dict[str, Any], Field(strict=True)]


class NamedSchema(RequestBody):
    """A JSON schema under a name."""

    name: str
    """For the caller; nothing depends on it."""
    description: str | None = None
    """For the caller; nothing depends on it."""
    json_schema: Annotated[JsonSchema, Field(alias="schema")]
    """Every text is one of its values. A keyword that cannot be held to is refused."""
    strict: bool | None = None
    """Texts are held to the schema with either value."""


class ResponseFormat(RequestBody):
    """The form of a text."""

    type: Literal["text", "json_object", "json_schema"]
    """Any text, an object of JSON, or a value of `json_schema`."""
    json_schema: NamedSchema | None = None
    """The schema, of the type "json_schema" alone."""

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that it means. Raises Refusal for a schema too few or too many."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise Refusal(
                'response_format: json_schema and the type "json_schema" go together; give both or neither',
                param="response_format",
            )
        if self.json_schema is not None:
            return Grammar("json_schema", json.dumps(self.json_schema.json_schema))
        return Grammar("json_object") if self.type == "json_object" else None


class StructuredOutputs(RequestBody):
    """The form of a text, one of several, as vLLM's server takes it."""

    json_value: Annotated[JsonSchema | str | None, Field(alias="json")] = None
    """A JSON schema, or the text of one."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    """Texts of which it is one."""
    grammar: str | None = None
    """A Lark grammar, of which the text is the rule `start`."""
    json_object: Literal[True] | None = None
    """The text is an object of JSON."""
    whitespace_pattern: Annotated[str, Field(min_length=1)] | None = None
    """A regular expression of the blanks that may stand between any two tokens of the JSON; by default one space may
    follow a comma or a colon."""

    @property
    def held(self) -> Grammar:
        """The grammar that it means. Raises Refusal for none, and for several."""
        given = self.model_dump(by_alias=True, exclude={"whitespace_pattern"})
        forms = {name: value for name, value in given.items() if value is not None}
        if len(forms) != 1:
            raise Refusal(
                f"structured_outputs has {', '.join(forms) or 'nothing'}; give only one of json, regex, choice, "
                "grammar, json_object",
                param="structured_outputs",
            )
        ((name, value),) = forms.items()
        if self.whitespace_pattern is not None and name not in ("json", "json_object"):
            raise Refusal(
                f"structured_outputs.whitespace_pattern is of json and json_object, and {name} is given; leave it out",
                param="structured_outputs.whitespace_pattern",
            )
        blanks = self.whitespace_pattern or ""
        match name:
            case "json":
                schema = value if isinstance(value, str) else json.dumps(value)
                return Grammar("json_schema", schema, whitespace=blanks)
            case "regex":
                return Grammar("regex", value)
            case "choice":
                # One terminal: the library has a limit for the rules that a text may be in at once.
                return Grammar("lark", f"start: CHOICE\nCHOICE: {' | '.join(json.dumps(each) for each in value)}")
            case "grammar":
                return Grammar("lark", value)
        return Grammar("json_object", whitespace=blanks)


class TextFormat(RequestBody):
    """The form of a text, as /v1/responses has it."""

    type: Literal["text", "json_object", "json_schema"]
    """Any text, an object of JSON, or a value of `schema`."""
    name: str | None = None
    """For the caller; nothing depends on it."""
    description: str | None = None
    """For the caller; nothing depends on it."""
    json_schema: Annotated[JsonSchema | None, Field(alias="schema")] = None
    """Every text is one of its values, with the type "json_schema" alone."""
    strict: bool | None = None
    """Texts are held to the schema with either value."""

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that it means. Raises Refusal for a schema too few or too many."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise Refusal(
                'text.format: schema and the type "json_schema" go together; give both or neither', param="text.format"
            )
        if self.json_schema is not None:
            return Grammar("json_schema", json.dumps(self.json_schema))
        return Grammar("json_object") if self.type == "json_object" else None
