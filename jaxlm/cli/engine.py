"""The sizes of the engine that continues prompts."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from jaxlm.cli import trained
from jaxlm.core.units import parse_memory
from jaxlm.inference.settings import CacheDtype

if TYPE_CHECKING:
    from jaxlm.api import LoadedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of an engine, the dtype to compute in, and the choice of speed."""
    add_sizes(parser)
    add_speculation(parser)
    add_dtype(parser)
    add_fast(parser)


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Add the source of drafts."""
    parser.add_argument(
        "--speculate",
        type=_speculation,
        metavar="SOURCE[:N]",
        help="read up to N (4) guessed tokens of each sequence in a step, and keep those that are drawn: the text is "
        "the same. SOURCE is ngram, which looks them up in the text, or a smaller model (inference.speculate)",
    )


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the number of sequences that are drawn together, their length and memory, and the prompts of a step."""
    parser.add_argument(
        "--slots", type=_positive, metavar="N", help="the most sequences processed at a time (inference.sequences)"
    )
    parser.add_argument(
        "--max-context",
        type=_positive,
        metavar="N",
        help="the most tokens of a sequence (inference.context)",
    )
    parser.add_argument(
        "--cache-memory",
        type=memory,
        metavar="SIZE",
        help="memory for keys and values on each device, such as 2GiB (inference.cache_memory)",
    )
    add_cache_dtype(parser)
    parser.add_argument(
        "--chunk-tokens",
        type=_positive,
        metavar="N",
        help="the most prompt tokens processed in a step on each device (inference.chunk_tokens)",
    )
    add_steps_per_dispatch(parser)


def add_steps_per_dispatch(parser: argparse.ArgumentParser) -> None:
    """Add the steps that one program runs."""
    parser.add_argument(
        "--steps-per-dispatch",
        type=_positive,
        metavar="N",
        help="decoding steps that one program runs where no request waits (inference.steps_per_dispatch)",
    )


def add_cache_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the dtype of keys and values."""
    parser.add_argument(
        "--cache-dtype",
        choices=get_args(CacheDtype),
        help="keep keys and values in eight bits, each token's with scales of its own (inference.cache_dtype)",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the dtype to compute in."""
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="the dtype of the computation (execution.dtype, or that of published weights); auto: the one measured to "
        "be fastest here",
    )


def add_fast(parser: argparse.ArgumentParser) -> None:
    """Add the choice between speed and equal bits."""
    parser.add_argument(
        "--fast",
        action="store_true",
        help="on a CPU: run few sequences faster; the last bits of a result may then depend on what runs beside it",
    )


def load(arguments: argparse.Namespace, **more: int) -> "LoadedModel":
    """Return the model of the run, with what is given for its engine, and `more` of its settings. Raises InputError
    as `jaxlm.api.load` does."""
    from jaxlm.inference.config import ENGINE_KEYS

    sizes = [f"inference.{key}={value}" for key, (_, value) in _sizes(arguments).items()]
    reads = [f"inference.{key}" for key in ENGINE_KEYS]
    model = trained.load(arguments, reads, arguments.dtype, overrides=sizes)
    model.settings = replace(model.settings, exact=not arguments.fast, **more)
    return model


def option(arguments: argparse.Namespace) -> str | None:
    """Return an option that is given, or None."""
    given = [*(option for option, _ in _sizes(arguments).values()), *["--fast"] * arguments.fast]
    return next(iter(given), "--dtype" if arguments.dtype else None)


def options(arguments: argparse.Namespace) -> list[str]:
    """Return the sizes and the choice of speed that are given, as options of a command."""
    sizes = [word for option, value in _sizes(arguments).values() for word in (option, str(value))]
    return [*sizes, *["--fast"] * arguments.fast]


def _sizes(arguments: argparse.Namespace) -> dict[str, tuple[str, int | str]]:
    """Return the options for keys of [inference] that are given, and their values, by the key."""
    options = {
        "sequences": ("--slots", arguments.slots),
        "context": ("--max-context", arguments.max_context),
        "cache_memory": ("--cache-memory", arguments.cache_memory),
        "cache_dtype": ("--cache-dtype", arguments.cache_dtype),
        "chunk_tokens": ("--chunk-tokens", arguments.chunk_tokens),
        "steps_per_dispatch": ("--steps-per-dispatch", arguments.steps_per_dispatch),
        "speculate": ("--speculate", getattr(arguments, "speculate", None)),
    }
    return {key: (option, value) for key, (option, value) in options.items() if value is not None}


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 on")
    return int(text)


def _speculation(text: str) -> str:
    from jaxlm.inference.settings import Speculation

    try:
        Speculation.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def memory(text: str) -> int:
    """Return the bytes of a size. Raises ArgumentTypeError for what is none."""
    try:
        return parse_memory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
