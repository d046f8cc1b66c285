"""Chat templates: messages as token ids, by the Jinja template that a published model comes with.

A template comes from outside and is run in Jinja's immutable sandbox, with the functions that published ones call
(transformers' `apply_chat_template`). Control tokens that the template writes become their ids; one that is spelled
out in a message stays text.
"""

import copy
import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxlm.core.errors import InputError
from jaxlm.core.json_text import json_text
from jaxlm.data import named_templates
from jaxlm.data.call_shapes import CallShape, Message, shape_of
from jaxlm.data.config import expanded
from jaxlm.data.message_checks import check_shown, known_role
from jaxlm.data.tokenizers import Tokenizer

FILE, SETTINGS, _OLD_FILE = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"
_SPECIAL_TOKENS = "special_tokens_map.json"  # of older files, for what SETTINGS does not name
_DEFAULT = "default"  # of several templates with names
# Code points that are no characters (Unicode 16, section 23.7): each stands for the first letter of a control token
# that a message spells out, while its template runs.
_STAND_INS = [chr(code) for code in range(0xFDD0, 0xFDEF)]
_GIVEN = frozenset({"messages", "tools", "add_generation_prompt"})  # to every template
_SHOWN = 200  # characters of a template's own complaint
_ANSWER = "\ue000"  # a letter that no template writes


class ChatTemplate:
    """A chat template with the tokenizer that it is for.

    Args:
      source: the template.
      tokenizer: of the model.
      variables: that the template reads, such as `bos_token`.
      name: of the file, for messages.
      now: the clock that `strftime_now` reads.

    Attributes:
      reads: the variables that it reads beside the messages, tools, and whether an answer follows.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any],
        name: str,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ):
        self.source, self.tokenizer, self.name = source, tokenizer, name
        self.variables = dict(variables)
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            reads = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise InputError(f"{name} is no chat template: {_first_line(error)}") from None
        self.reads = reads - environment.globals.keys() - _GIVEN

    def to_json(self) -> str:
        """Return a text that `from_json` reads; equal templates have equal texts."""
        return json.dumps({"source": self.source, "variables": self.variables, "name": self.name})

    @classmethod
    def from_json(cls, text: str, tokenizer: Tokenizer) -> "ChatTemplate":
        """Return the template that `to_json` wrote, with the clock of this machine."""
        described = json.loads(text)
        return cls(described["source"], tokenizer, described["variables"], described["name"])

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> "ChatTemplate":
        """Return this template with variables of its own set, such as `enable_thinking`. Raises InputError for one that
        it does not read."""
        if not kwargs:
            return self
        for name in kwargs:
            if name not in self.reads:
                read = ", ".join(sorted(self.reads)) or "none"
                raise InputError(f"chat_template_kwargs: {self.name} reads no {name!r}; what it reads is {read}")
        template = copy.copy(self)
        template.variables = self.variables | dict(kwargs)
        for of_former_variables in ("stop_token_ids", "_call_shape"):
            template.__dict__.pop(of_former_variables, None)
        return template

    def encode(
        self,
        messages: Sequence[Message],
        *,
        reply: bool,
        tools: Sequence[Any] | None = None,
        continues: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation. Nothing is put before them: a template writes its own beginning.

        Args:
          messages: each with a `role` and its `content`, and what else the template knows.
          reply: whether the assistant's next message begins after them.
          tools: descriptions of functions, for a template that shows them.
          continues: whether the conversation ends within its last message, behind the content, which then goes on.

        Raises InputError where the template refuses the messages or fails, or does not show a content to continue.
        """
        return self.tokenizer.encode_rendered(self._pieces(messages, reply, tools, continues))

    def check_shown(
        self, messages: Sequence[Message], *, reply: bool, tools: Sequence[Any] | None = None, calls: bool = True
    ) -> None:
        """Raise InputError where the template drops the result of a call, a message of a role that it does not know,
        or, with `calls`, the name of a call."""
        check_shown(messages, lambda marked: self.render(marked, reply=reply, tools=tools), calls)

    def render(
        self,
        messages: Sequence[Message],
        *,
        reply: bool,
        tools: Sequence[Any] | None = None,
        continues: bool = False,
    ) -> str:
        """Return the text that `encode` encodes. Raises InputError as it does."""
        return self._text(self._pieces(messages, reply, tools, continues))

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """The control token that the template writes behind an answer; empty where it writes none.

        It ends what is drawn beside the ids that the model's files name, which may be those of a base model.
        """
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}
        # First at the end: gpt-oss ends an answer there with <|return|>, and with <|end|> what it thinks before.
        for conversation in ([question, answer], [question, answer, question]):
            try:
                pieces = list(self._pieces(conversation, False, None))
            except InputError:  # it asks for other messages
                continue
            for piece, following in pairwise(pieces):
                if isinstance(piece, str) and isinstance(following, int) and piece.rstrip().endswith(_ANSWER):
                    return frozenset([following])
        return frozenset()

    @cached_property
    def _call_shape(self) -> CallShape:
        """The shape in which the template shows messages with calls."""
        return shape_of(lambda messages, shape: self._text(self._pieces(messages, False, None, shape=shape)))

    def _text(self, pieces: Iterable[str | int]) -> str:
        names = {token: name for name, token in self.tokenizer.controls.items()}
        return "".join(piece if isinstance(piece, str) else names[piece] for piece in pieces)

    def _pieces(
        self,
        messages: Sequence[Message],
        reply: bool,
        tools: Sequence[Any] | None,
        continues: bool = False,
        shape: CallShape | None = None,
    ) -> Iterator[str | int]:
        """Yield what the template writes: texts, and the ids of control tokens between them."""
        messages = [
            {**message, "role": known_role(message["role"], self.source, place)}
            for place, message in enumerate(messages)
        ]
        if any(message.get("tool_calls") for message in messages):
            shape = shape or self._call_shape
            messages = [shape.shaped(message) for message in messages]
        context = {"messages": list(messages), "tools": list(tools) if tools else None}
        used = set(json.dumps(context, ensure_ascii=False))
        free = iter(character for character in _STAND_INS if character not in used)
        end = next(free, "") if continues else ""
        if continues:
            context["messages"][-1:] = _ended_by(messages, end)
        stands_for: dict[str, str] = {}

        def hidden(match: re.Match[str]) -> str:
            first = match[0][0]
            if first not in stands_for and (stand_in := next(free, None)) is not None:
                stands_for[first] = stand_in
            if first not in stands_for:
                raise InputError("the messages hold every code point that could stand for a control token in them")
            return stands_for[first] + match[0][1:]

        shown = _mapped(context, lambda text: self._control.sub(hidden, text)) if self._control else context
        try:
            text = self._template.render(**self.variables, **shown, add_generation_prompt=reply)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise InputError(f"{self.name} cannot show these messages: {_first_line(error)}") from None
        if continues:
            text = self._up_to(end, text)
        as_given = str.maketrans({stand_in: first for first, stand_in in stands_for.items()})
        at = 0
        for match in self._control.finditer(text) if self._control else ():
            if match.start() > at:
                yield text[at : match.start()].translate(as_given)
            yield self.tokenizer.controls[match[0]]
            at = match.end()
        if at < len(text):
            yield text[at:].translate(as_given)

    def _up_to(self, end: str, text: str) -> str:
        """Return the text before the mark `end`, without the blanks before it where the template drops such."""
        at = text.rfind(end)
        if at < 0:
            raise InputError(f"{self.name} does not show the content of the last message, so that it cannot go on")
        return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()

    @cached_property
    def _control(self) -> re.Pattern[str] | None:
        """A pattern of all control tokens, the longest first."""
        names = sorted(self.tokenizer.controls, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None


def load(
    folder: Path, tokenizer: Tokenizer, now: Callable[[], datetime.datetime] = datetime.datetime.now
) -> ChatTemplate | None:
    """Return the chat template in a folder of published files, or None. `now` is the clock that it reads.

    It is `chat_template.jinja`, or `chat_template` in tokenizer_config.json (a text, or a list of named ones of which
    "default" is taken) or in chat_template.json. Raises InputError for files that are broken.
    """
    if (folder / FILE).is_file():
        return read(folder / FILE, folder, tokenizer, now)
    for file in (folder / SETTINGS, folder / _OLD_FILE):
        if (source := _chosen(_table(file).get("chat_template"), file)) is not None:
            return ChatTemplate(source, tokenizer, _tokens(folder, tokenizer), f"chat_template of {file}", now)
    return None


def read(
    file: Path, folder: Path, tokenizer: Tokenizer, now: Callable[[], datetime.datetime] = datetime.datetime.now
) -> ChatTemplate:
    """Return the chat template in a file, with the names of tokens that a folder of published files has. Raises
    InputError for files that are missing or broken."""
    return ChatTemplate(_text(file), tokenizer, _tokens(folder, tokenizer), str(file), now)


def chosen(path_or_name: str, key: str, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template at a path, or by a name of `jaxlm.data.named_templates`; a path that exists goes before
    a name.

    Args:
      path_or_name: as a key or option gives it.
      key: that key or option, for messages.
      folder: has the names of tokens, as in `read`.

    Raises InputError where it is neither.
    """
    if (file := expanded(path_or_name, key)).exists():
        return read(file, folder, tokenizer)
    if path_or_name not in named_templates.NAMES:
        names = ", ".join(named_templates.NAMES)
        raise InputError(f"{key}: there is no file {path_or_name}, and the templates that have a name are {names}")
    tokens = _tokens(folder, tokenizer)
    source = named_templates.source(path_or_name, tokenizer, tokens.get("eos_token"))
    return ChatTemplate(source, tokenizer, tokens, f"the chat template {path_or_name}")


def _tokens(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the tokens that a template may name, such as `bos_token`: as the files of a folder name them. Where none
    does, those that begin and end a text are named by their ids, in these files or of the tokenizer."""
    settings = _table(folder / _SPECIAL_TOKENS) | _table(folder / SETTINGS)
    named = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
    if "bos_token" not in named:  # null says that there is none
        named["bos_token"] = _control(tokenizer, [*_ids(folder, "bos_token_id"), *tokenizer.begin])
    if named.get("eos_token") is None:
        named["eos_token"] = end_of_text(folder, tokenizer)
    return {name: text for name, text in named.items() if text is not None}


def end_of_text(folder: Path, tokenizer: Tokenizer) -> str | None:
    """Return the name of the control token that ends a text: the first whose id is in a folder's files, else the
    separator of documents or another id of the tokenizer that ends what is drawn. None where none is known."""
    own = sorted(tokenizer.stop_token_ids, key=lambda number: (number != tokenizer.separator, number))
    return _control(tokenizer, [*_ids(folder, "eos_token_id"), *own])


def _ids(folder: Path, key: str) -> list[int]:
    """Return the ids under a key of generation_config.json and config.json."""
    tables = [_table(folder / "generation_config.json"), _table(folder / "config.json")]
    values = [value for table in tables if (value := table.get(key)) is not None]
    ids = [number for value in values for number in (value if isinstance(value, list) else [value])]
    return [number for number in ids if isinstance(number, int)]


def _control(tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
    """Return the name of the first of these ids that is a control token's."""
    names = {number: name for name, number in tokenizer.controls.items()}
    return next((names[number] for number in ids if number in names), None)


def _chosen(described: Any, file: Path) -> str | None:
    if isinstance(described, list) and all(isinstance(entry, dict) for entry in described):
        by_name = {entry.get("name"): entry.get("template") for entry in described}
        described = by_name.get(_DEFAULT)
        if described is None and by_name:
            raise InputError(f'{file} has chat templates {", ".join(map(str, by_name))}, and none is "{_DEFAULT}"')
    if described is not None and not isinstance(described, str):
        raise InputError(f"chat_template of {file} is neither a text nor a list of named ones")
    return described


def _content(token: Any) -> str | None:
    """Return the text of a token, which may be described by a table."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _table(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not valid JSON ({error})") from None
    return found if isinstance(found, dict) else {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON with every text in it changed, but for names."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(inner, change) for name, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, Sequence) else value


def _ended_by(messages: Sequence[Message], end: str) -> list[Message]:
    """Return the last message with a mark and a blank behind its content: the blank is gone where a template drops
    blanks at the end of a content. Raises InputError for a message whose content cannot be continued."""
    last = messages[-1] if messages else {}
    if not end or not isinstance(content := last.get("content"), str) or last.get("tool_calls"):
        raise InputError("the last message must have a text, and no calls, to be continued")
    return [{**last, "content": f"{content}{end} "}]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:_SHOWN]


def _environment(now: Callable[[], datetime.datetime]) -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = json_text
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class _Generation(Extension):
    """The tag {% generation %}, which some templates put around what the assistant says; it changes no text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
