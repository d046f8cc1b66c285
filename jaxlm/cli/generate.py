"""Continue a prompt with a trained model."""

import argparse
import json

from jaxlm.cli import trained
from jaxlm.core.errors import InputError

_MAX_TOKENS = 100  # where nobody says how many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained.add_arguments(parser)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", help="text to continue")
    given.add_argument("--token-ids", metavar="1,2,3", help="token ids to continue")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"at most this many ({_MAX_TOKENS}, or fewer where the context ends before)",
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
    from jaxlm.inference.requests import Sampling, check_prompts, max_new_tokens
    from jaxlm.run import Run

    run = Run(arguments.run)
    experiment = trained.experiment(arguments, run)
    if not 0 <= arguments.seed < 2**32:
        raise InputError(f"--seed {arguments.seed} must be from 0 to {2**32 - 1}")
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p).check(_option)
    tokenizer = run.load_tokenizer() if run.paths.tokenizer.is_file() or arguments.prompt is not None else None
    if arguments.prompt is not None:
        prompt = tokenizer.encode_prompt(arguments.prompt)
    else:
        prompt = _token_ids(arguments.token_ids)
    max_tokens = arguments.max_tokens
    if max_tokens is None:
        max_tokens = min(_MAX_TOKENS, max(max_new_tokens(experiment.model, len(prompt)), 1))
    check_prompts(experiment.model, [prompt], max_tokens, named=_option)
    model = trained.restore(arguments, run, experiment, dtype=experiment.training.dtype)

    from jaxlm.inference.detokenizer import Detokenizer
    from jaxlm.inference.generate import generate

    drawn = generate(
        experiment.model,
        model.parameters,
        [prompt],
        max_tokens,
        model.mesh,
        sampling=sampling,
        seed=arguments.seed,
        vocab_size=tokenizer and tokenizer.vocab_size,
        kernels=experiment.training.kernels,
    )
    detokenizer = tokenizer and Detokenizer(tokenizer, prompt)
    ids: list[int] = []
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if not arguments.json:
            print(piece, end="", flush=True)

    if not arguments.json and arguments.prompt is not None:
        print(arguments.prompt, end="", flush=True)
    for token in (int(tokens[0]) for tokens in drawn):
        if tokenizer and token == tokenizer.separator:
            break
        ids.append(token)
        show(detokenizer.add(token) if detokenizer else f"{',' if pieces else ''}{token}")
    if detokenizer:
        show(detokenizer.rest())
    print(json.dumps({"text": "".join(pieces) if tokenizer else None, "token_ids": ids}) if arguments.json else "")
    return 0


def _option(field: str) -> str:
    """The option that sets it, as a message names it."""
    return f"--{field.replace('_', '-')}"


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--token-ids {text!r} is no list of numbers such as 1,2,3") from None
