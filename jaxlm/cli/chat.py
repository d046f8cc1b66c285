"""Conversations with a model that has a chat template: turns at a terminal or from standard input, or given whole."""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxlm.cli import prompts
from jaxlm.cli.paths import as_utf8
from jaxlm.core.errors import InputError, in_one_line

if TYPE_CHECKING:
    from jaxlm.api import LoadedModel
    from jaxlm.cli.prompts import Conversation, Prompt
    from jaxlm.inference.completion import TextChunk

# Lines that are no message, by what they begin with.
COMMANDS = {
    "/help": "list these commands",
    "/reset": "begin another conversation",
    "/system": "begin another one after the system message that follows; without any, show the present one",
    "/exit": "end, as Ctrl-D does",
}
_COMMAND = re.compile(r"(/[A-Za-z]+)(?:\s+(.*))?", re.DOTALL)  # "/tmp/a" is a message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a conversation."""
    parser.add_argument(
        "--chat",
        action="store_true",
        help="treat prompts as messages in the model's chat template; without a prompt, converse: each line is a "
        "message, and /help lists commands",
    )
    add_template_arguments(parser)
    parser.add_argument("--system", type=as_utf8, metavar="TEXT", help="system message of each conversation")


def add_template_arguments(parser: argparse.ArgumentParser) -> None:
    """The chat template, and its variables."""
    add_template(parser)
    parser.add_argument(
        "--chat-template-kwargs",
        type=_kwargs,
        default={},
        metavar="JSON",
        help="""variables of the chat template, such as '{"enable_thinking": false}'""",
    )


def add_template(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a chat template."""
    parser.add_argument(
        "--chat-template",
        type=as_utf8,
        metavar="NAME|FILE",
        help="in place of the model's own: a Jinja file, or chatml, gemma, llama3, mistral or qwen3",
    )


def _kwargs(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"""{text!r} is no JSON object, such as '{{"enable_thinking": false}}'""")
    return value


def check(arguments: argparse.Namespace) -> None:
    """Raise InputError for options that do not go together."""
    if not arguments.chat and arguments.chat_template_kwargs:
        raise InputError("--chat-template-kwargs are of a conversation: add --chat")
    if not arguments.chat and arguments.chat_template is not None:
        raise InputError("--chat-template is of a conversation: add --chat")
    if not arguments.chat and arguments.system is not None:
        raise InputError("--system is of a conversation: add --chat")
    if arguments.chat and arguments.token_ids is not None:
        raise InputError("--token-ids are no message: leave out --chat, or give --prompt or --prompts")


def conversations(given: "list[Prompt]", system: str | None) -> "list[Prompt]":
    """Return prompts as conversations, after the system message. Raises InputError for one that has another."""
    chats: list[Prompt] = []
    for number, prompt in enumerate(given, 1):
        messages = [_message("user", prompt)] if isinstance(prompt, str) else prompt
        if system is not None and any(message["role"] == "system" for message in messages):
            raise InputError(f"conversation {number} has a system message of its own; leave out --system")
        chats.append([*_beginning(system), *messages])
    return chats


def prepare(model: "LoadedModel", given: "list[Prompt]", arguments: argparse.Namespace) -> None:
    """Set the variables of the template. Raises InputError, with its line, for a conversation of a file that the
    template refuses."""
    model.chat_template = model.chat_template.with_kwargs(arguments.chat_template_kwargs)
    for number, conversation in enumerate(given if arguments.prompts is not None else [], 1):
        try:
            model.encode(conversation)
        except InputError as error:
            raise InputError(f"--prompts {arguments.prompts}:{number}: {error}") from None


def converse(
    model: "LoadedModel",
    answers: "Callable[[Conversation, int], Iterator[TextChunk]]",
    show: "Callable[[Iterator[TextChunk]], None]",
    system: str | None,
    max_tokens: int | None,
) -> None:
    """Answer each line of standard input, after those before it.

    Ctrl-C ends an answer, which stays as far as it came. A message that cannot be answered is left out. A line that is
    one of COMMANDS is done, and another that looks like one is refused.

    Args:
      answers: returns the pieces of the answer to a conversation, whose random numbers are those of a number.
      show: prints them.
    """
    messages = _beginning(system)
    for turn, line in enumerate(prompts.lines()):
        if command := _COMMAND.fullmatch(line.rstrip()):
            name, text = command[1], command[2]
            if name == "/exit":
                return
            if name == "/reset" or (name == "/system" and text):
                system = text if name == "/system" else system
                messages = _beginning(system)
            else:
                print(_said_of(name, system), file=sys.stderr)
            continue
        answer_texts: list[str] = []

        def heard(pieces: "Iterator[TextChunk]", answer_texts: list[str] = answer_texts) -> "Iterator[TextChunk]":
            for piece in pieces:
                answer_texts.append(piece.text or "")
                yield piece
                if piece.finish_reason == "length":
                    print("jaxlm: the answer is cut off; --max-tokens N lets it be longer", file=sys.stderr)

        conversation = [*messages, _message("user", line)]
        try:
            _check_room(model, conversation, max_tokens)
            show(heard(answers(conversation, turn)))
        except KeyboardInterrupt:
            print()
            if not any(answer_texts):
                continue
        except InputError as error:
            print(f"jaxlm: {in_one_line(error)}", file=sys.stderr)
            continue
        messages = [*conversation, _message("assistant", "".join(answer_texts))]


def _said_of(command: str, system: str | None) -> str:
    """Return what is said of a command that changes nothing: the others, the system message, or that it is unknown."""
    match command:
        case "/help":
            return "\n".join(f"{name:10}{meaning}" for name, meaning in COMMANDS.items())
        case "/system":
            return "there is no system message; /system TEXT sets one" if system is None else system
    near = difflib.get_close_matches(command, COMMANDS, 1)
    hint = f"did you mean {near[0]}?" if near else "/help lists them"
    return f"jaxlm: there is no command {command}; {hint} (a space before it makes it a message)"


def _check_room(model: "LoadedModel", messages: "Conversation", max_tokens: int | None) -> None:
    """Raise InputError where no answer fits into the context."""
    from jaxlm.inference.requests import max_new_tokens

    tokens, context = len(model.encode(messages)), model.config.context_length
    if max_new_tokens(model.config, tokens) < (max_tokens or 1):
        asked = "" if max_tokens is None else f" of --max-tokens {max_tokens}"
        raise InputError(
            f"with this message the conversation has {tokens} tokens, and model.context_length = {context} leaves no "
            f"room for an answer{asked}; /reset begins another, and a shorter message may fit"
        )


def _beginning(system: str | None) -> "Conversation":
    return [] if system is None else [_message("system", system)]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
