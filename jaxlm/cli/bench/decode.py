"""Measure decoding: the time of one token of each of so many sequences, beside what must be read for it.

Prompts are random tokens; blocks of steps are timed after one that is not, and the median is shown. Beside it stands
the time in which the counted least bytes of the step can be read, at the bandwidth of a sum over a large array, which
is measured first.
"""

import argparse
from dataclasses import replace
from typing import Any

from jaxlm import api
from jaxlm.cli import engine, trained
from jaxlm.cli.bench import out
from jaxlm.core.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained.add_arguments(parser)
    parser.add_argument("--rows", type=_numbers, default=[1, 8], metavar="N,…", help="sequences (1,8)")
    parser.add_argument("--context", type=_numbers, default=[500], metavar="N,…", help="tokens of each prompt (500)")
    parser.add_argument("--blocks", type=int, default=12, metavar="N", help="of steps (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="of a block (%(default)s)")
    engine.add_dtype(parser)
    engine.add_fast(parser)
    out.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    import jax

    from jaxlm.cli.progress import working
    from jaxlm.inference.measured import read_bytes_per_s
    from jaxlm.training.environment import environment

    for name in ("blocks", "steps"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name} {getattr(arguments, name)} must be 1 or more")
    out.check(arguments)
    reads = [f"inference.{key}" for key in ("page", "chunk_tokens", "cache_memory")]
    model = trained.load(arguments, reads, arguments.dtype)
    model.set_engine(replace(model.settings, exact=not arguments.fast))
    bandwidth = read_bytes_per_s()
    options = {"steps": arguments.steps, "blocks": arguments.blocks, "bytes_per_s": bandwidth, "progress": working}
    lengths = [(rows, context) for context in arguments.context for rows in arguments.rows]
    cases = [api.bench_decode(model, *each, **options)._asdict() for each in lengths]
    figures = {
        "model": arguments.run.name,
        "exact": not arguments.fast,
        "steps": arguments.steps,
        "blocks": arguments.blocks,
        "read_bytes_per_s": bandwidth,
        "cases": cases,
        "environment": environment(jax.devices()),
    }
    out.give(arguments, figures, _show)
    return 0


def _show(figures: dict[str, Any]) -> None:
    from jaxlm.cli.tables import TextTable, numbers

    dtypes = ", ".join(dict.fromkeys(case["dtype"] for case in figures["cases"]))
    title = f"{figures['model']} in {dtypes}, {'exact' if figures['exact'] else 'fast'}"
    table = TextTable(numbers("sequences", "tokens", "ms a step", "tokens/s", "read in ms", "share"), title)
    for case in figures["cases"]:
        table.add(
            f"{case['rows']}",
            f"{case['context']:,}",
            f"{1e3 * case['median_step_s']:,.3g}",
            f"{case['tokens_per_s']:,.1f}",
            f"{1e3 * case['read_s']:,.3g}",
            f"{case['share_of_read_bound']:.0%}",
        )
    table.print()
    print(f"memory is read at {figures['read_bytes_per_s'] / 1e9:.1f} GB/s here")


def _numbers(text: str) -> list[int]:
    found = text.split(",")
    if not all(each.strip().isdecimal() and int(each) for each in found):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers from 1 on, such as 1,8")
    return [int(each) for each in found]
