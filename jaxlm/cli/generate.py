"""Continue a prompt with a trained model."""

import argparse
import json

from jaxlm import api
from jaxlm.cli import trained
from jaxlm.cli.paths import as_utf8
from jaxlm.core.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained.add_arguments(parser)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", type=as_utf8, metavar="TEXT", help="text to continue")
    given.add_argument("--token-ids", metavar="1,2,3", help="token ids to continue")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"at most this many ({api.MAX_TOKENS}, or fewer where the context ends before)",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="0 takes the likeliest (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K likeliest")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw among the fewest that hold P of the probability")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="another seed draws another text (%(default)s)"
    )


def main(arguments: argparse.Namespace) -> int:
    from jaxlm.inference.completion import completions
    from jaxlm.inference.requests import Sampling, check_prompts, check_seed, default_max_tokens

    model = trained.load(arguments)
    check_seed(arguments.seed, _option)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p).check(_option)
    text = arguments.prompt
    prompt = model.encode(_token_ids(arguments.token_ids) if text is None else text)
    max_tokens = arguments.max_tokens
    if max_tokens is None:
        max_tokens = default_max_tokens(model.config, len(prompt), api.MAX_TOKENS)
    check_prompts(model.config, [prompt], max_tokens, named=_option)
    drawn = model.stream([prompt], max_tokens, **sampling._asdict(), seed=arguments.seed)
    if arguments.json:
        (completion,) = completions(drawn, 1)
        print(json.dumps(completion._asdict()))
        return 0
    print(text or "", end="", flush=True)
    for number, piece in enumerate(drawn):
        print(piece.text if piece.text is not None else f"{',' if number else ''}{piece.token_id}", end="", flush=True)
    print()
    return 0


def _option(field: str) -> str:
    """The option that sets it, as a message names it."""
    return f"--{field.replace('_', '-')}"


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--token-ids {text!r} is no list of numbers such as 1,2,3") from None
