"""Measure decoding: the time of a step, in which each sequence gets one token, beside the time to read its bytes.

Prompts are random tokens. A dispatch has as many steps as in a server (inference.steps_per_dispatch). Blocks of steps
are timed after a warm-up block, and the median is shown. The bytes are the least that a step must read, as counted; the
bandwidth is that of summing a large array, measured first.
"""

import argparse
from dataclasses import replace
from typing import Any

from jaxlm import api
from jaxlm.cli import engine, trained
from jaxlm.cli.bench import out
from jaxlm.cli.paths import path
from jaxlm.core.errors import InputError

# Sizes where none is given and the model's context is long enough for them.
_SIZES = {"context": 500, "blocks": 12, "steps": 10}
_GIVEN = ("cache_dtype", "speculate", "steps_per_dispatch")  # keys of [inference] that are options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained.add_arguments(parser)
    parser.add_argument("--rows", type=_numbers, default=[1, 8], metavar="N,…", help="sequences decoded together (1,8)")
    parser.add_argument(
        "--context",
        type=_numbers,
        metavar="N,…",
        help=f"tokens of each prompt ({_SIZES['context']}, or what a shorter context leaves)",
    )
    parser.add_argument("--blocks", type=int, metavar="N", help=f"blocks to time ({_SIZES['blocks']}, or fewer)")
    parser.add_argument("--steps", type=int, metavar="N", help=f"steps of a block ({_SIZES['steps']}, or fewer)")
    parser.add_argument(
        "--data", type=path, metavar="FILE", help="a text to take the prompts from (default: random tokens)"
    )
    engine.add_cache_dtype(parser)
    engine.add_speculation(parser)
    engine.add_steps_per_dispatch(parser)
    engine.add_dtype(parser)
    engine.add_fast(parser)
    out.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    import jax

    from jaxlm.cli.progress import working
    from jaxlm.inference.measured import read_bytes_per_s
    from jaxlm.training.environment import environment

    for name in ("blocks", "steps"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            raise InputError(f"--{name} {number} must be 1 or more")
    out.check(arguments)
    reads = [f"inference.{key}" for key in ("page", "chunk_tokens", "cache_memory", *_GIVEN)]
    given = {key: getattr(arguments, key) for key in _GIVEN}
    overrides = [f"inference.{key}={value}" for key, value in given.items() if value is not None]
    model = trained.load(arguments, reads, arguments.dtype, overrides=overrides)
    model.set_engine(replace(model.settings, exact=not arguments.fast))
    bandwidth = read_bytes_per_s()
    contexts, blocks, steps = _fitting(arguments, model.config.context_length, 1 + model.settings.drafts)
    text = None
    if arguments.data is not None:
        if model.tokenizer is None:
            raise InputError(f"{arguments.run} has no tokenizer for the text of --data")
        text = model.tokenizer.encode(arguments.data.read_text(encoding="utf-8"))
        if not text:
            raise InputError(f"--data {arguments.data} has no text")
    options = {"steps": steps, "blocks": blocks, "bytes_per_s": bandwidth, "text": text, "progress": working}
    lengths = [(rows, context) for context in contexts for rows in arguments.rows]
    cases = [api.bench_decode(model, *each, **options)._asdict() for each in lengths]
    figures = {
        "model": arguments.run.name,
        "exact": not arguments.fast,
        "speculate": arguments.speculate,
        "cache_dtype": model.settings.cache_dtype,
        "quantize": model.experiment.execution.quantize,
        "steps": steps,
        "blocks": blocks,
        "read_bytes_per_s": bandwidth,
        "cases": cases,
        "environment": environment(jax.devices()),
    }
    out.give(arguments, figures, _show)
    return 0


def _fitting(arguments: argparse.Namespace, longest: int, rows: int) -> tuple[list[int], int, int]:
    """Return the lengths of prompts, the blocks and the steps of a block: as they are given, and otherwise as many as
    fit into a model's context of `longest` tokens, if a step draws `rows` tokens of a sequence."""
    contexts, blocks, steps = arguments.context, arguments.blocks, arguments.steps
    room = (longest - 1 - (max(contexts) if contexts else min(_SIZES["context"], longest // 2))) // rows
    if blocks is None:
        blocks = max(1, min(_SIZES["blocks"], room // (steps or 1) - 1))
    if steps is None:
        steps = max(1, min(_SIZES["steps"], room // (blocks + 1)))
    return contexts or [max(1, min(_SIZES["context"], longest - 1 - (blocks + 1) * steps * rows))], blocks, steps


def _show(figures: dict[str, Any]) -> None:
    from jaxlm.cli.tables import TextTable, numbers

    dtypes = ", ".join(dict.fromkeys(case["dtype"] for case in figures["cases"]))
    title = f"{figures['model']} in {dtypes}, {'exact' if figures['exact'] else 'fast'}"
    table = TextTable(
        numbers("sequences", "tokens", "ms a step", "a dispatch", "tokens/s", "read in ms", "share"), title
    )
    for case in figures["cases"]:
        table.add(
            f"{case['rows']}",
            f"{case['context']:,}",
            f"{1e3 * case['median_step_s']:,.3g}",
            f"{case['steps_per_dispatch']}",
            f"{case['tokens_per_s']:,.1f}",
            f"{1e3 * case['read_s']:,.3g}",
            f"{case['share_of_read_bound']:.0%}",
        )
    table.print()
    if figures["speculate"]:
        for case in figures["cases"]:
            print(
                f"{case['rows']} sequences, {figures['speculate']}: {case['tokens_per_step']:.2f} tokens of "
                f"{case['rows_per_step']:.2f} rows, counted as {case['counted_speed_up']:.2f} × the tokens/s without"
            )
    print(f"memory is read at {figures['read_bytes_per_s'] / 1e9:.1f} GB/s here")


def _numbers(text: str) -> list[int]:
    found = text.split(",")
    if not all(each.strip().isdecimal() and int(each) for each in found):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers from 1 on, such as 1,8")
    return [int(each) for each in found]
