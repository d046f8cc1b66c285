"""Prompts that a command is given: texts, token ids, files, standard input."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlm.cli.paths import as_utf8, path
from jaxlm.core.errors import InputError

Conversation = list[dict[str, Any]]  # messages, each with its `role`
Prompt = str | list[int] | Conversation  # a text, token ids, or a conversation

_STANDARD_INPUT = "-"


def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--prompt", action="append", type=as_utf8, metavar="TEXT", help="text to continue; may be given several times"
    )
    group.add_argument(
        "--token-ids", action="append", metavar="1,2,3", help="token ids to continue; may be given several times"
    )
    group.add_argument(
        "--prompts",
        type=path,
        metavar="FILE",
        help="a file with a prompt in each line, or a .jsonl file whose records have a prompt or, with --chat, "
        "messages; - is standard input",
    )


def given(arguments: Namespace) -> list[Prompt] | None:
    """Return all prompts of the arguments; None if there are none. Raises InputError for a file that cannot be read or
    has none, and for token ids that are no numbers."""
    if arguments.prompt is not None:
        return arguments.prompt
    if arguments.token_ids is not None:
        return [_token_ids(text) for text in arguments.token_ids]
    if arguments.prompts is None:
        return None
    return _read(arguments.prompts, arguments.chat)


def lines() -> Iterator[str]:
    """Yield the lines of standard input as they come, without their ends; at a terminal after a sign, where Ctrl-C
    leaves a line and Ctrl-D ends them."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield as_utf8(line.rstrip("\r\n"))
        return
    import readline  # noqa: F401  with it `input` lets a line be edited, and earlier ones be taken again

    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        yield as_utf8(line)


def _read(file: Path, chat: bool) -> list[Prompt]:
    named = f"--prompts {file}"
    try:
        content = sys.stdin.buffer.read() if str(file) == _STANDARD_INPUT else file.read_bytes()
        texts = content.decode("utf-8").replace("\r\n", "\n").removesuffix("\n").split("\n")
    except OSError as error:
        raise InputError(f"{named} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{named} is not UTF-8; convert it") from None
    if not content:
        raise InputError(f"{named} is empty; give at least one prompt")
    return _records(texts, named, chat) if file.suffix == ".jsonl" else list(texts)


def _records(lines: list[str], named: str, chat: bool) -> list[Prompt]:
    """Read a record in each line, of a prompt or, for a `chat`, of a message or messages."""
    from pydantic import TypeAdapter

    prompt, messages, records = TypeAdapter(str if chat else str | list[int]), TypeAdapter(Conversation), []
    for number, line in enumerate(lines, 1):
        try:
            # A float may have any number of digits, and no id is one.
            record = json.loads(line, parse_int=lambda digits: int(digits) if len(digits) < 20 else float(digits))
            if chat and "messages" in record:
                records.append(messages.validate_python(record["messages"], strict=True))
                if not records[-1] or not all(isinstance(message["role"], str) for message in records[-1]):
                    raise ValueError
            else:
                records.append(prompt.validate_python(record["prompt"], strict=True))
        except (ValueError, TypeError, LookupError):
            one, other = '{"prompt": "a text"}', '{"prompt": [1, 2, 3]}'
            if chat:
                one, other = '{"messages": [{"role": "user", "content": "a text"}]}', one
            like = f"{one} or {other}"
            raise InputError(f"{named}:{number} is no record such as {like}") from None
    return records


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--token-ids {text!r} is no list of numbers such as 1,2,3") from None
