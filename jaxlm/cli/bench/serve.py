"""Measure a server under load, beside the best that its chips allow.

A server for MODEL is started on this machine, or --url names a running one, of any kind that has OpenAI's API. Requests
are random tokens, --concurrency at a time or at random times with a mean --rate; nothing is downloaded. The bounds are
the lower bounds of `jaxlm plan` for the chips of --on.
"""

import argparse
import asyncio
import importlib.util
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm.cli import engine, steps
from jaxlm.cli.bench import out
from jaxlm.cli.paths import location, path
from jaxlm.core.errors import InputError
from jaxlm.core.extras import install

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxlm.config.experiment import Experiment
    from jaxlm.server.load.bounds import LoadBounds
    from jaxlm.server.load.client import Answered
    from jaxlm.server.load.workload import Load

_LOADS = ("random", "shared-prefix")
_PREFIX = 0.75  # of a prompt, where its prefix is shared and no length is given
_CONCURRENCY = 8
_INPUT, _OUTPUT = 128, 32  # mean tokens of a prompt and of what follows
_SHOWN = 8  # errors in the figures
_LABELS = {"ttft": "to the first token", "tpot": "per later token", "itl": "between parts", "e2el": "whole text"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=location, metavar="MODEL", help="the model to serve, as for jaxlm serve")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as execution.dtype=float32")
    parser.add_argument("--url", help="the address of a running server of MODEL (default: start one here)")
    parser.add_argument("--name", help="the model's name on that server (the first in /v1/models)")
    parser.add_argument("--api-key-file", type=path, metavar="FILE", help="a file with the API key to send")
    parser.add_argument(
        "--load",
        choices=_LOADS,
        default="random",
        help="random prompts, or prompts that share a beginning (%(default)s)",
    )
    for name, default, explanation in (
        ("requests", 100, "requests to measure"),
        ("seed", 0, "seed of the random requests"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{explanation} (%(default)s)")
    for name, explanation in (
        ("input-tokens", f"mean tokens of a prompt ({_INPUT}, or half of a shorter context)"),
        ("output-tokens", f"mean tokens to generate ({_OUTPUT}, or an eighth of a shorter context)"),
        ("prefix-tokens", f"tokens of a shared beginning ({_PREFIX:g} of --input-tokens)"),
        ("prefixes", "number of different beginnings (4)"),
        ("concurrency", f"the most requests at a time ({_CONCURRENCY}; with --rate, any number)"),
        ("warm-up", "unmeasured requests before (as many as --concurrency)"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=explanation)
    parser.add_argument(
        "--spread", type=float, default=0.0, metavar="X", help="lengths vary from 1 - X to 1 + X times their means (0)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="mean requests per second, at random times")
    parser.add_argument(
        "--burstiness",
        type=float,
        metavar="G",
        help="spacing of the random times: 1 is a Poisson process, less comes in bursts (1)",
    )
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="limits of a good request, such as ttft:500 tpot:50",
    )
    engine.add_sizes(parser)
    engine.add_speculation(parser)
    engine.add_fast(parser)
    parser.add_argument("--on", metavar="CHIPS", help="the chips of the server, for the bounds (host)")
    steps.add_chip(parser)
    out.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("httpx") is None:
        raise InputError(f"jaxlm bench serve needs the packages of a server: {install('serve')}")
    from jaxlm import config

    goodput, key = _goodput(arguments.goodput), _key(arguments.api_key_file)
    if arguments.url is None and (arguments.name or key):
        raise InputError("--name and --api-key-file are of a server that runs: add --url")
    if arguments.url is not None and (given := engine.options(arguments)):
        raise InputError(f"{given[0]} is of a server that is started: leave out --url")
    out.check(arguments)
    experiment = config.load(arguments.run, arguments.overrides, "decode")
    load = _load(arguments, experiment.model.context_length)
    if load.longest > experiment.model.context_length + 1:
        raise InputError(
            f"texts of up to {load.longest} tokens exceed model.context_length = {experiment.model.context_length}; "
            "lower --input-tokens or --output-tokens"
        )
    _bounds(arguments.on, steps.chip(arguments), experiment, load, 1.0)  # refused before anything is measured
    found, is_whole = _measured(arguments, experiment, load, goodput, key)
    out.give(arguments, found, _show)
    return 0 if is_whole else 130


def _measured(
    arguments: argparse.Namespace, experiment: "Experiment", load: "Load", goodput: dict[str, float], key: str | None
) -> tuple[dict[str, Any], bool]:
    """Return the figures, and whether no Ctrl-C ended the load before its end."""
    from jaxlm.cli.progress import counting, working
    from jaxlm.server.load.client import checked
    from jaxlm.server.load.local_server import local_server

    answered: list[Answered] = []
    is_whole = True
    with ExitStack() as until_the_end:
        url = arguments.url
        if url is None:
            with working("starting a server"):
                server = local_server(arguments.run, arguments.overrides, engine.options(arguments))
                url, dtype = until_the_end.enter_context(server)
            execution = experiment.execution.model_copy(update={"dtype": dtype})
            experiment = experiment.model_copy(update={"execution": execution})
        count = until_the_end.enter_context(counting("requests", load.requests))

        def ended(one: "Answered") -> None:
            answered.append(one)
            count()

        try:
            asyncio.run(_send(url, key, arguments.name, load, experiment.model.vocab_size, ended))
        except KeyboardInterrupt:
            is_whole = False
    good = checked(answered)
    if not good:
        raise KeyboardInterrupt
    return _figures(arguments, experiment, load, good, answered, goodput), is_whole


async def _send(
    url: str, key: str | None, name: str | None, load: "Load", vocabulary: int, ended: "Callable[[Answered], None]"
) -> None:
    """Send the warm-up, and then what is measured."""
    from jaxlm.server.load.client import ServerClient, run

    texts = load.texts(vocabulary)
    async with ServerClient(url, key) as client:
        model = name or await client.model()
        await run(client, model, texts[: load.warm_up], [0.0] * load.warm_up, load.concurrency, lambda _: None)
        await run(client, model, texts[load.warm_up :], load.times(), load.concurrency, ended)


def _figures(
    arguments: argparse.Namespace,
    experiment: "Experiment",
    load: "Load",
    good: "list[Answered]",
    answered: "list[Answered]",
    goodput: dict[str, float],
) -> dict[str, Any]:
    """Return the figures with what was asked, the bounds beside them, and where they were measured."""
    from jaxlm.server.load.figures import figures
    from jaxlm.training.environment import environment

    duration = max(each.ended for each in answered) - min(each.sent for each in answered)
    failed = [each.error for each in answered if each.error]
    measurements = figures(good, len(failed), duration, goodput)
    least = _bounds(arguments.on, steps.chip(arguments), experiment, load, measurements["mean_concurrency"])
    return {
        "model": arguments.run.name,
        "dtype": experiment.execution.dtype,
        "load": asdict(load),
        "goodput": goodput,
        **measurements,
        "errors": failed[:_SHOWN],
        "bounds": least and {"chips": arguments.on or "host", **least._asdict()},
        "environment": environment([]),
    }


def _bounds(
    on: str | None, chip: dict[str, Any], experiment: "Experiment", load: "Load", concurrency: float
) -> "LoadBounds | None":
    """Return the bounds; None on a machine that is not calibrated. Raises InputError for chips that are not known."""
    from jaxlm.costs.hardware.target import Target
    from jaxlm.server.load.bounds import bounds

    try:
        target = Target.parse(on or "host", chip)
        # A prefix that is shared may be found in the cache.
        return bounds(experiment, target, load.input_tokens - load.prefix_tokens, load.output_tokens, concurrency)
    except InputError:
        if on is not None or chip:
            raise
        return None


def _load(arguments: argparse.Namespace, context: int) -> "Load":
    """Return the load, for a model of this context length. Raises InputError for options that do not go together, or
    mean nothing."""
    from jaxlm.server.load.workload import Load

    shared = arguments.load == "shared-prefix"
    if not shared and (arguments.prefix_tokens is not None or arguments.prefixes is not None):
        raise InputError("--prefix-tokens and --prefixes are of --load shared-prefix")
    if arguments.rate is None and arguments.burstiness is not None:
        raise InputError("--burstiness is of random times: add --rate")
    concurrency = arguments.concurrency
    if concurrency is None and arguments.rate is None:
        concurrency = _CONCURRENCY
    warm_up = (concurrency or _CONCURRENCY) if arguments.warm_up is None else arguments.warm_up
    input_tokens, output_tokens = arguments.input_tokens, arguments.output_tokens
    if input_tokens is None:
        input_tokens = max(1, min(_INPUT, context // 2))
    if output_tokens is None:
        output_tokens = max(1, min(_OUTPUT, context // 8))
    prefix = round(_PREFIX * input_tokens) if arguments.prefix_tokens is None else arguments.prefix_tokens
    return Load(
        kind=arguments.load,
        requests=arguments.requests,
        warm_up=warm_up,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        spread=arguments.spread,
        prefix_tokens=prefix if shared else 0,
        prefixes=(arguments.prefixes if arguments.prefixes is not None else 4) if shared else 1,
        rate=arguments.rate,
        burstiness=1.0 if arguments.burstiness is None else arguments.burstiness,
        concurrency=concurrency,
        seed=arguments.seed,
    ).check()


def _goodput(entries: list[str]) -> dict[str, float]:
    """Return the most milliseconds by metric. Raises InputError for what names none."""
    from jaxlm.server.load.figures import METRICS

    limits = {}
    for each in entries:
        name, _, most = each.partition(":")
        if name not in METRICS or not most.replace(".", "", 1).isdecimal():
            raise InputError(f"--goodput {each!r} must be one of {', '.join(METRICS)} with milliseconds: ttft:500")
        limits[name] = float(most)
    return limits


def _key(file: Path | None) -> str | None:
    """Return the first key in a file. Raises InputError where there is none."""
    if file is None:
        return None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise InputError(f"--api-key-file {file} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise InputError(f"--api-key-file {file} holds no key")
    return keys[0]


def _show(report: dict[str, Any]) -> None:
    from jaxlm.cli.tables import TextTable, names, numbers, print_sentence
    from jaxlm.server.load.figures import METRICS

    load, least = report["load"], report["bounds"]
    at = f"{load['rate']:g} requests/s" if load["rate"] else f"{load['concurrency']} at a time"
    title = f"{report['model']}: {load['input_tokens']} + {load['output_tokens']} tokens, {load['kind']}, {at}"
    table = TextTable([*names("milliseconds"), *numbers("mean", "p50", "p90", "p99", "bound")], title)
    for name in METRICS:
        values = [report[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p90", "p99")]
        bound = least and least.get(name) and 1e3 * least[name]
        table.add(_LABELS[name], *("–" if ms is None else f"{ms:,.3g}" for ms in (*values, bound)))
    table.print()
    of_bound = f", at most {least['output_throughput']:,.0f} on {least['chips']}" if least else ""
    print(
        f"{report['completed']} requests in {report['duration']:.1f} s: {report['request_throughput']:.2f} requests/s"
    )
    print(f"{report['output_throughput']:,.0f} output tokens/s{of_bound}")
    if "request_goodput" in report:
        print(f"goodput: {report['request_goodput']:.2f} requests/s")
    if report["failed"]:
        print(f"{report['failed']} requests failed: {report['errors'][0]}")
    if not least:
        print_sentence(
            "no bounds: this machine is not calibrated (jaxlm hardware host --measure), and --on names no chips"
        )
