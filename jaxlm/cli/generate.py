"""Continue prompts with a trained model, or converse with it.

Without --prompt each line of standard input is a prompt, continued as it is read; at a terminal Ctrl-D ends this.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlm.api.model import MAX_ANSWER_TOKENS, MAX_TOKENS
from jaxlm.cli import chat, engine, prompts, trained
from jaxlm.cli.paths import as_utf8, location
from jaxlm.core.errors import InputError, in_one_line

if TYPE_CHECKING:
    from jaxlm.api import LoadedModel
    from jaxlm.cli.prompts import Conversation, Prompt
    from jaxlm.inference.completion import TextChunk
    from jaxlm.inference.grammar import Grammar
    from jaxlm.inference.requests import Sampling


# Type, metavar and explanation of each option that says how a token is drawn: fields of Sampling.
_SAMPLING = {
    "temperature": (float, "X", "randomness; 0 always takes the likeliest token (1)"),
    "top_k": (int, "K", "draw from the K likeliest tokens"),
    "top_p": (float, "P", "draw from the fewest tokens whose probabilities add up to P"),
    "min_p": (float, "P", "draw from the tokens at least P times as likely as the likeliest"),
    "repetition_penalty": (
        float,
        "R",
        "for tokens that occurred: divide positive logits by R, multiply negative ones (1)",
    ),
    "presence_penalty": (float, "X", "subtract X from the logits of tokens drawn before (0)"),
    "frequency_penalty": (float, "X", "subtract X from a token's logit for each time it was drawn (0)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained.add_arguments(parser)
    parser.add_argument(
        "--adapter",
        type=location,
        metavar="ADAPTER",
        help="draw texts with this adapter of the model, a run with [lora] or a PEFT directory",
    )
    prompts.add_arguments(parser)
    chat.add_arguments(parser)
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"the most tokens to generate for each prompt ({MAX_TOKENS}, for an answer {MAX_ANSWER_TOKENS}; fewer "
        "where the context ends)",
    )
    parser.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="continuations to draw for each prompt (%(default)s)"
    )
    parser.add_argument(
        "--stop",
        action="append",
        type=as_utf8,
        default=[],
        metavar="TEXT",
        help="stop before this text; may be given several times",
    )
    for name, (kind, metavar, explanation) in _SAMPLING.items():
        parser.add_argument(_option(name), type=kind, metavar=metavar, help=explanation)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json-schema",
        type=as_utf8,
        metavar="FILE|JSON",
        help="continue with a value of this JSON schema, as JSON; a conversation: answer so, behind what is thought",
    )
    form.add_argument("--regex", type=as_utf8, metavar="PATTERN", help="continue with a text that matches this whole")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the random draws (%(default)s)")
    engine.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    from jaxlm.inference.requests import Sampling, check_seed

    chat.check(arguments)
    inputs = prompts.given(arguments)
    if inputs is None and arguments.json:
        raise InputError("--json is of prompts that are given: add --prompt, --prompts or --token-ids")
    if inputs is None and arguments.chat and arguments.num_samples != 1:
        raise InputError("--num-samples is of prompts that are given: add --prompt or --prompts")
    if inputs is not None and arguments.chat:
        inputs = chat.conversations(inputs, arguments.system)
    if "" in arguments.stop:
        raise InputError("--stop '' would end every text; give at least one character")
    check_seed(arguments.seed, _option)
    grammar = _grammar(arguments)
    chosen = {name: getattr(arguments, name) for name in _SAMPLING if getattr(arguments, name) is not None}
    Sampling(**chosen).check(_option)
    model = engine.load(arguments)
    if grammar is not None:
        model.check_grammar(grammar)
    if arguments.chat:
        chat.prepare(model, inputs or [], arguments)
    sampling = model.sampling(**chosen)
    if inputs is None and arguments.chat:
        _converse(model, sampling, arguments, grammar)
        return 0
    if inputs is None:
        _interact(model, sampling, arguments, grammar)
        return 0
    pieces = _drawn(model, inputs, sampling, arguments, grammar)
    if arguments.json:
        from jaxlm.inference.completion import completions

        drawn = completions(pieces, len(inputs) * arguments.num_samples)
        rows = [
            {"messages" if arguments.chat else "prompt": inputs[row // arguments.num_samples], **completion._asdict()}
            for row, completion in enumerate(drawn)
        ]
        print(json.dumps({**(rows[0] if len(rows) == 1 else {"completions": rows}), "dtype": model.dtype}))
    else:
        _show(pieces, inputs, arguments.num_samples)
    return 0


def _grammar(arguments: argparse.Namespace) -> "Grammar | None":
    """Return the grammar that is given, if one is. Raises InputError for a file that cannot be read, and for a schema
    that is no JSON object."""
    from jaxlm.inference.grammar import Grammar
    from jaxlm.inference.grammar_errors import no_schema

    if arguments.regex is not None:
        return Grammar("regex", arguments.regex)
    if (schema := arguments.json_schema) is None:
        return None
    named, text = "--json-schema", schema
    if not schema.lstrip().startswith("{"):
        named = f"--json-schema {schema}"
        try:
            text = Path(schema).read_text(encoding="utf-8")
        except FileNotFoundError:
            like = '{"type": "object"}'
            raise InputError(f"{named}: there is no such file, and it is no schema such as '{like}'") from None
        except UnicodeError:
            raise InputError(f"{named} is not UTF-8; convert it") from None
        except OSError as error:
            raise InputError(f"{named} cannot be read: {error.strerror}") from None
    if why := no_schema(text):
        raise InputError(f"{named} {why}")
    return Grammar("json_schema", text)


def _drawn(
    model: "LoadedModel",
    inputs: "list[Prompt]",
    sampling: "Sampling",
    arguments: argparse.Namespace,
    grammar: "Grammar | None",
    stream: int = 0,
) -> "Iterator[TextChunk]":
    asked = model.requests(
        inputs, arguments.max_tokens, arguments.num_samples, sampling, arguments.stop, grammar, named=_option
    )
    requests = [request._replace(stream=request.stream + stream) for request in asked]
    return model.complete(requests, arguments.seed)


def _interact(
    model: "LoadedModel", sampling: "Sampling", arguments: argparse.Namespace, grammar: "Grammar | None"
) -> None:
    """Continue each line of standard input. A prompt that cannot be continued, and Ctrl-C, end that prompt alone."""
    for line, prompt in enumerate(prompts.lines()):
        try:
            _show(_drawn(model, [prompt], sampling, arguments, grammar, line), [prompt], arguments.num_samples)
        except KeyboardInterrupt:
            print()
        except InputError as error:
            print(f"jaxlm: {in_one_line(error)}", file=sys.stderr)


def _converse(
    model: "LoadedModel", sampling: "Sampling", arguments: argparse.Namespace, grammar: "Grammar | None"
) -> None:
    def answers(messages: "Conversation", turn: int) -> "Iterator[TextChunk]":
        return _drawn(model, [messages], sampling, arguments, grammar, turn)

    def show(pieces: "Iterator[TextChunk]") -> None:
        _show(pieces, [[]], 1)

    chat.converse(model, answers, show, arguments.system, arguments.max_tokens)


def _show(pieces: "Iterable[TextChunk]", inputs: "list[Prompt]", num_samples: int) -> None:
    """Print texts, as they are drawn, after their prompts. Each of several has a line before it."""
    from jaxlm.inference.completion import in_order

    shown, separator = -1, ""
    for row, token, text, finish_reason in in_order(pieces):
        if row != shown:
            shown, separator = row, ""
            print(_heading(row, inputs, num_samples), end="")
        if text is not None:
            print(text, end="", flush=True)
        elif token is not None:
            print(f"{separator}{token}", end="", flush=True)
            separator = ","
        if finish_reason is not None:
            print()


def _heading(row: int, inputs: "list[Prompt]", num_samples: int) -> str:
    """Return the line that names a continuation, where there are several, and its prompt."""
    prompt, sample = divmod(row, num_samples)
    names = [f"prompt {prompt + 1}"] * (len(inputs) > 1) + [f"sample {sample + 1}"] * (num_samples > 1)
    line = f"--- {', '.join(names)} ---\n" if names else ""
    return line + (inputs[prompt] if isinstance(inputs[prompt], str) else "")


def _option(field: str) -> str:
    """Return the option that sets a field, as a message names it."""
    return f"--{field.replace('_', '-')}"
