"""The forms in which families of models write calls of tools, as data, and that of a chat template."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from jaxlm.server.answers.call_syntax import CallSyntax, JsonSyntax, NamedJsonSyntax, TaggedSyntax


class ArgumentTags(NamedTuple):
    """The texts before the key of an argument, between the key and its value, and behind the value."""

    before_key: str
    before_value: str
    behind_value: str


@dataclass(frozen=True)
class CallFormat:
    """A form in which models write calls.

    Attributes:
      start: what stands before a call; None where an answer that begins with a brace is calls as a whole.
      end: what stands behind a call; None where a call ends with the answer.
      syntax: of the text between.
      controls: control tokens that are parts of a call. Those in `dropped` stand around calls and say nothing.
      opening: what begins any call, from there to the name of its function, and from the name to the arguments.
      closing: what ends the calls, from the arguments of the last on.
      between: what stands between the arguments of a call and the name of the next.
      tags: around the arguments and their keys; None where arguments are JSON.
    """

    start: str | None
    end: str | None
    syntax: CallSyntax
    opening: tuple[str, str, str]
    controls: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    closing: str = ""
    between: str = ""
    tags: ArgumentTags | None = None

    @property
    def marks(self) -> frozenset[str]:
        """The control tokens and texts that are parts of the form."""
        return frozenset(mark for mark in (self.start, self.end, *self.controls, *self.dropped) if mark)


_JSON = JsonSyntax()
_TAGS = "<tool_call>", "</tool_call>"
_DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_AROUND = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def _function_tags(newline: str) -> TaggedSyntax:
    """Return the text `<function=NAME><parameter=KEY>VALUE</parameter></function>`, with line breaks around values or
    without."""
    return TaggedSyntax(
        re.compile(r"\s*<function=(?P<name>[^>\n]+)>"),
        re.compile(rf"\s*<parameter=(?P<key>[^>\n]+)>{newline}"),
        # A value ends with its tag; models forget the tag where the next argument begins a line.
        re.compile(rf"{newline}</parameter>(?=\s*(?:<parameter=|</function>|\Z))|(?=\n<parameter=)"),
        "</function>",
        "<parameter=",
        "</parameter>",
    )


FORMATS = {
    "hermes": CallFormat(  # Qwen 2.5 and 3 among others
        *_TAGS,
        _JSON,
        ("<tool_call>", '\n{"name": "', '", "arguments": '),
        closing="}\n</tool_call>",
        between='}\n</tool_call>\n<tool_call>\n{"name": "',
    ),
    "qwen3-coder": CallFormat(
        *_TAGS,
        _function_tags("\n?"),
        ("<tool_call>", "\n<function=", ">\n"),
        closing="</function>\n</tool_call>",
        between="</function>\n</tool_call>\n<tool_call>\n<function=",
        tags=ArgumentTags("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "seed-oss": CallFormat(
        "<seed:tool_call>",
        "</seed:tool_call>",
        _function_tags(""),
        ("<seed:tool_call>", "\n<function=", ">\n"),
        closing="</function>\n</seed:tool_call>",
        between="</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=",
        tags=ArgumentTags("<parameter=", ">", "</parameter>\n"),
    ),
    "glm": CallFormat(  # 4.5 and later
        *_TAGS,
        TaggedSyntax(
            re.compile(r"\s*(?P<name>[\w.-]+)\s*"),
            re.compile(r"\s*<arg_key>(?P<key>[^<\n]+)</arg_key>\s*<arg_value>"),
            re.compile(r"</arg_value>(?=\s*(?:<arg_key>|\Z))"),
            "",
            "<arg_value>",
            "</arg_value>",
        ),
        ("<tool_call>", "", "\n"),
        closing="</tool_call>",
        between="</tool_call>\n<tool_call>",
        tags=ArgumentTags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "nemotron": CallFormat(
        "<TOOLCALL>",
        "</TOOLCALL>",
        _JSON,
        ("<TOOLCALL>", '[{"name": "', '", "arguments": '),
        closing="}]</TOOLCALL>",
        between='}, {"name": "',
    ),
    "deepseek-v3": CallFormat(  # and R1
        *_DEEPSEEK,
        NamedJsonSyntax(
            re.compile(r"\s*\w*<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n"),
            re.compile(r"\s*```\s*"),
        ),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "\n```json\n"),
        ("<｜tool▁sep｜>",),
        _DEEPSEEK_AROUND,
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    ),
    "deepseek": CallFormat(  # V3.1
        *_DEEPSEEK,
        NamedJsonSyntax(re.compile(r"\s*(?P<name>[^<\n]+)<｜tool▁sep｜>"), re.compile(r"\s*")),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "", "<｜tool▁sep｜>"),
        ("<｜tool▁sep｜>",),
        _DEEPSEEK_AROUND,
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
    ),
    "mistral-list": CallFormat(
        "[TOOL_CALLS]",
        None,
        _JSON,
        ("[TOOL_CALLS]", '[{"name": "', '", "arguments": '),
        closing="}]",
        between='}, {"name": "',
    ),
    "mistral": CallFormat(  # from v11 of its tokenizers on
        "[TOOL_CALLS]",
        None,
        NamedJsonSyntax(
            re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]"), re.compile(r"\s*(?:\[TOOL_CALLS\]|\Z)")
        ),
        ("[TOOL_CALLS]", "", "[ARGS]"),
        ("[ARGS]", "[CALL_ID]"),
        closing="",
        between="[TOOL_CALLS]",
    ),
    "llama3": CallFormat(
        None,
        None,
        _JSON,
        ('{"name": "', "", '", "parameters": '),
        dropped=("<|python_tag|>",),
        closing="}",
        between='}; {"name": "',
    ),
    "json": CallFormat(None, None, _JSON, ('{"name": "', "", '", "arguments": '), closing="}", between='}; {"name": "'),
}
