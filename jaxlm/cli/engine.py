"""The sizes of the engine that continues prompts."""

import argparse
import re
from typing import TYPE_CHECKING

from jaxlm.cli import trained

if TYPE_CHECKING:
    from jaxlm.api import LoadedModel
    from jaxlm.costs.workload import Workload
    from jaxlm.inference.engine import Engine

_UNITS = {
    **{"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
    **{"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of an engine, the dtype to compute in, and the choice of speed."""
    add_sizes(parser)
    add_dtype(parser)
    add_fast(parser)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the number of sequences that are drawn together, their length and memory, and the prompts of a step."""
    parser.add_argument("--slots", type=_positive, metavar="N", help="sequences that are under way at most (64)")
    parser.add_argument(
        "--max-context",
        type=_positive,
        metavar="N",
        help="tokens of a sequence at most (the model's, or what the cache holds)",
    )
    parser.add_argument(
        "--cache-memory",
        type=memory,
        metavar="SIZE",
        help="memory of keys and values on each device, such as 2GiB (1GiB on a CPU, 80 %% of what is free elsewhere)",
    )
    parser.add_argument(
        "--chunk-tokens", type=_positive, metavar="N", help="at most so many tokens of prompts in a step (512)"
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the dtype to compute in."""
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="what to compute in (training.dtype); auto: what is fastest here, as measured",
    )


def add_fast(parser: argparse.ArgumentParser) -> None:
    """Add the choice between speed and equal bits."""
    parser.add_argument(
        "--fast",
        action="store_true",
        help="on a CPU: let a token's last bits depend on what is drawn beside it, for speed of few sequences",
    )


def load(arguments: argparse.Namespace, **more: int) -> "LoadedModel":
    """Return the model of the run, with what is asked for of its engine, and `more` of its settings. Raises InputError
    as `jaxlm.api.load` does."""
    from jaxlm.inference.settings import EngineSettings

    settings = {field: value for field, (_, value) in _given(arguments).items()} | more
    return trained.load(arguments, dtype=arguments.dtype, engine=EngineSettings(**settings) if settings else None)


def work_of(model: "LoadedModel", running: "Engine", batch: int | None, sequence: int) -> "Workload":
    """Return the decoding step of an engine for costs, of `batch` sequences (one on each shard of a batch) that hold so
    many tokens."""
    from jaxlm.costs.workload import Workload
    from jaxlm.parallel.layout import Layout

    work = Workload.of(model.experiment, Layout(**model.mesh.shape), "decode")
    dtype = str(running.runner.programs.dtype)
    return work.with_training(batch=batch or work.batch_shards, sequence=sequence, dtype=dtype)


def option(arguments: argparse.Namespace) -> str | None:
    """Return an option that is given, or None."""
    return next((option for option, _ in _given(arguments).values()), "--dtype" if arguments.dtype else None)


def options(arguments: argparse.Namespace) -> list[str]:
    """Return the sizes and the choice of speed that are given, as options of a command."""
    given = _given(arguments).values()
    return [word for option, value in given for word in ([option] if value is False else [option, str(value)])]


def _given(arguments: argparse.Namespace) -> dict[str, tuple[str, int | bool]]:
    """Return the options that are given, and their values, by the setting."""
    asked = {
        "slots": ("--slots", arguments.slots),
        "context": ("--max-context", arguments.max_context),
        "cache_bytes": ("--cache-memory", arguments.cache_memory),
        "chunk_tokens": ("--chunk-tokens", arguments.chunk_tokens),
        "exact": ("--fast", False if arguments.fast else None),
    }
    return {field: (option, value) for field, (option, value) in asked.items() if value is not None}


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 on")
    return int(text)


def memory(text: str) -> int:
    """Return the bytes of a size. Raises ArgumentTypeError for what is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} must be a size such as 512MiB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2]])
