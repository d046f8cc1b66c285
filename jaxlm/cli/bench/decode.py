"""Measure decoding: the time of one token of each of so many sequences, beside what must be read for it.

Prompts are random tokens; blocks of steps are timed after one that is not, and the median is shown. Beside it stands
the time in which the counted least bytes of the step can be read, at the bandwidth of a sum over a large array, which
is measured first.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

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

    from jaxlm.inference.measured import read_bytes_per_s
    from jaxlm.training.environment import environment

    for name in ("blocks", "steps"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name} {getattr(arguments, name)} must be 1 or more")
    out.check(arguments)
    bandwidth, cases = None, []
    for context in arguments.context:
        for rows in arguments.rows:
            model = _loaded(arguments, rows, context)
            bandwidth = bandwidth or read_bytes_per_s()
            cases.append(_measured(arguments, model, rows, context, bandwidth))
    found = {
        "model": arguments.run.name,
        "exact": not arguments.fast,
        "steps": arguments.steps,
        "blocks": arguments.blocks,
        "read_bytes_per_s": bandwidth,
        "cases": cases,
        "environment": environment(jax.devices()),
    }
    out.give(arguments, found, _show)
    return 0


def _loaded(arguments: argparse.Namespace, rows: int, context: int) -> Any:
    """Return the model with an engine for these sequences."""
    longest = context + (arguments.blocks + 1) * arguments.steps + 1
    model = trained.load(arguments, dtype=arguments.dtype)
    model.settings = replace(model.settings, slots=rows, context=longest, exact=not arguments.fast)
    if longest > model.config.context_length:
        raise InputError(
            f"--context {context} and {longest - context} steps exceed model.context_length = "
            f"{model.config.context_length}; lower --context, --blocks or --steps"
        )
    return model


def _measured(arguments: argparse.Namespace, model: Any, rows: int, context: int, bandwidth: float) -> dict[str, Any]:
    """Return the figures of a number of sequences of a length."""
    from jaxlm.cli.progress import working
    from jaxlm.costs.serving import token_cost
    from jaxlm.inference.measured import decode_steps

    running, steps = model.engine(), arguments.steps
    with working(f"{rows} sequences of {context} tokens"):
        run = decode_steps(running, rows, context, (arguments.blocks + 1) * steps)
        times = []
        for _ in range(arguments.blocks + 1):
            begun = time.perf_counter()
            run(steps)
            times.append((time.perf_counter() - begun) / steps)
    work = engine.work_of(model, running, rows, context + len(times) * steps // 2)
    read = token_cost(work, None).read_bytes // work.layout.size  # of one device
    step = statistics.median(times[1:])
    return {
        "rows": rows,
        "context": context,
        "dtype": str(running.runner.programs.dtype),
        "median_step_s": step,
        "step_s": times[1:],
        "tokens_per_s": rows / step,
        "read_bytes": read,
        "read_s": read / bandwidth,
        "share_of_read_bound": read / bandwidth / step,
    }


def _show(found: dict[str, Any]) -> None:
    from jaxlm.cli.tables import TextTable, numbers

    dtypes = ", ".join(dict.fromkeys(case["dtype"] for case in found["cases"]))
    title = f"{found['model']} in {dtypes}, {'exact' if found['exact'] else 'fast'}"
    table = TextTable(numbers("sequences", "tokens", "ms a step", "tokens/s", "read in ms", "share"), title)
    for case in found["cases"]:
        table.add(
            f"{case['rows']}",
            f"{case['context']:,}",
            f"{1e3 * case['median_step_s']:,.3g}",
            f"{case['tokens_per_s']:,.1f}",
            f"{1e3 * case['read_s']:,.3g}",
            f"{case['share_of_read_bound']:.0%}",
        )
    table.print()
    print(f"memory is read at {found['read_bytes_per_s'] / 1e9:.1f} GB/s here")


def _numbers(text: str) -> list[int]:
    found = text.split(",")
    if not all(each.strip().isdecimal() and int(each) for each in found):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers from 1 on, such as 1,8")
    return [int(each) for each in found]
