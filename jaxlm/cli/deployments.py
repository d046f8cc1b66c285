"""Deployments that serve requests, for `jaxlm plan --workload serve`."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from jaxlm import api
from jaxlm.cli import rankings, steps
from jaxlm.cli.paths import duration
from jaxlm.cli.tables import TextTable, facts, names, numbers, print_sentence
from jaxlm.core import units
from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    from jaxlm.config.experiment import Experiment
    from jaxlm.costs.deployment import Deployment
    from jaxlm.costs.stack import Stack
    from jaxlm.costs.workload import Workload

_OPTIONS = ("prompt", "output", "ttft", "tpot", "rate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the requests and the limits of a deployment."""
    group = parser.add_argument_group("requests of --workload serve")
    group.add_argument("--prompt", type=int, metavar="N", help="tokens of each prompt")
    group.add_argument("--output", type=int, metavar="N", help="tokens that follow each prompt")
    group.add_argument(
        "--ttft",
        type=duration,
        metavar="TIME",
        help="such as 0.5 or 500ms: the longest wait for the first token, for nine of ten requests",
    )
    group.add_argument(
        "--tpot", type=duration, metavar="TIME", help="such as 0.03 or 30ms: the longest mean time of a later token"
    )
    group.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="requests a second, at random times (as many clients as sequences, one request after the other)",
    )


def check(arguments: argparse.Namespace) -> None:
    """Raise InputError where options of --workload serve are missing, or go with another workload, or options of other
    workloads with it."""
    if arguments.workload != "serve":
        if alone := [f"--{name}" for name in _OPTIONS if getattr(arguments, name) is not None]:
            raise InputError(f"leave out {', '.join(alone)}, or give --workload serve, which alone plans requests")
        return
    if missing := [f"--{name}" for name in ("prompt", "output") if getattr(arguments, name) is None]:
        raise InputError(f"--workload serve needs the tokens of a request: give {' and '.join(missing)}")
    if arguments.mesh not in (None, "auto"):
        raise InputError("--workload serve chooses tensor and replicas itself: leave out --mesh")
    limits = [f"--{name}" for name in ("budget", "deadline") if getattr(arguments, name) is not None]
    if refused := [*limits, *(["--plot"] if arguments.plot else [])]:
        raise InputError(f"leave out {', '.join(refused)}, which --workload serve does not take")


def show(experiment: "Experiment", arguments: argparse.Namespace, stack: "Stack") -> int:
    """Search for deployments and print them as a table, or as one JSON object."""
    options = {name: getattr(arguments, name) for name in _OPTIONS}
    goal, chip, searched = arguments.objective or "cost", steps.chip(arguments), steps.searched(arguments)
    ranked, refused = api.plan_serving(
        experiment, arguments.on, objective=goal, chip=chip, stack=stack, searched=searched, **options
    )
    for line in filter(None, (_say_limits(options), rankings.say_left_out(refused), rankings.say_stack(stack))):
        print_sentence(f"jaxlm: {line}", sys.stderr)
    if arguments.json:
        left_out = [{"target": target, "why": why} for target, why in refused.items()]
        print(json.dumps({**ranked[0].row(), "rows": [each.row() for each in ranked], "refused": left_out}))
        return 0
    if len({each.chip_id for each in ranked}) > 1 or refused:
        _of_chips(ranked, searched).print()
    else:
        _of_sizes(ranked, f"{ranked[0].demand}, on {arguments.on}", searched).print()
    print()
    _best(ranked[0]).print()
    return 0


def _say_limits(options: dict[str, Any]) -> str | None:
    """Return what may be asked of the times of requests, where nothing is."""
    if options["ttft"] is not None or options["tpot"] is not None:
        return None
    return (
        "requests may wait for any time: --ttft 0.5 limits the first token of nine of ten, --tpot 0.03 each later one, "
        "and --rate 5 says how many come in a second"
    )


def _of_sizes(ranked: list["Deployment"], title: str, searched: tuple[str, ...]) -> TextTable:
    """Return the table of the best deployment of each size of a replica, with what was chosen of an engine."""
    chosen = [*names(*["weights"] * ("quantize" in searched)), *numbers(*["drafts"] * ("drafts" in searched))]
    layout = [*numbers("replicas × tensor", "batch"), *chosen, *numbers("memory")]
    table = TextTable([*layout, *numbers("TTFT", "p90", "TPOT", "tokens/s per chip", "$/Mtok out")], title)
    for each in ranked:
        service, capacity = each.service, each.target.chip.device_capacity()
        table.add(
            f"{each.replicas} × {each.devices}",
            str(each.slots),
            *[_width(each)] * ("quantize" in searched),
            *[str(each.work.drafts)] * ("drafts" in searched),
            f"{each.memory.total / capacity:.0%}",
            units.seconds(service.ttft),
            *_rates(each),
        )
    return table


def _of_chips(ranked: list["Deployment"], searched: tuple[str, ...]) -> TextTable:
    """Return the table of the best deployment of each kind of chips, whose rows fit a terminal of 80 columns: without
    memory and mean TTFT."""
    title = f"{ranked[0].demand}; layout: replicas × tensor"
    title += "; engine: weights + drafts" if len(searched) > 1 else ""
    heads = {("quantize",): "weights", ("drafts",): "drafts"}
    chosen = names(*[heads.get(searched, "engine")] * bool(searched))
    figures = numbers("p90 TTFT", "TPOT", "tok/s/chip", "$/Mtok")
    table = TextTable([*names("chips"), *numbers("layout", "batch"), *chosen, *figures], title)
    for each in ranked:
        engine = [_width(each)] * ("quantize" in searched) + [str(each.work.drafts)] * ("drafts" in searched)
        layout = f"{each.replicas} × {each.devices}", str(each.slots)
        table.add(f"{each.chip_id}:{each.chips}", *layout, *["+".join(engine)] * bool(searched), *_rates(each))
    return table


def _rates(deployment: "Deployment") -> tuple[str, str, str, str]:
    """Return the latencies that are limited, the rate of a chip and the price, as tables show them."""
    return (
        units.seconds(deployment.service.ttft_p90),
        units.seconds(deployment.service.tpot),
        f"{deployment.output_tokens_per_s / deployment.chips:,.0f}",
        units.or_dash(deployment.usd_per_million_output_tokens, "{:.3g}".format),
    )


def _width(deployment: "Deployment") -> str:
    execution = deployment.work.execution
    return execution.dtype if execution.quantize == "none" else execution.quantize


def describe_drafts(work: "Workload") -> str:
    """Describe the drafts of a decoding step, and the tokens that are expected of it."""
    from jaxlm.costs.plan import speculation_row

    row = speculation_row(work)["speculation"]
    drawn = f", drawn by a model of {row['model']['parameters']:,} parameters" if "model" in row else ""
    return (
        f"{work.drafts} of each sequence{drawn}, right with probability {work.acceptance:g}: "
        f"{work.tokens_per_sequence:.3g} tokens a step"
    )


def _best(best: "Deployment") -> TextTable:
    """Return the figures of the best deployment, with their brackets."""
    table, service, fast, slow = facts(), best.service, best.fast, best.slow

    def bracketed(name: str) -> str:
        end = "no end: requests would queue" if slow is None else units.seconds(getattr(slow, name))
        return f"{units.seconds(getattr(service, name))}, within {units.seconds(getattr(fast, name))} to {end}"

    devices = f"tensor {best.devices}" if best.devices > 1 else "one device"
    replicas = f"{best.replicas} replica{'s' * (best.replicas > 1)}"
    table.add("best", f"{replicas} of {devices}, {best.slots} sequences each, on {best.chip_id}:{best.chips}")
    if best.work.quantized is not None:
        remark = f"rounding changes what the model says: see jaxlm eval MODEL --quantize {_width(best)} --data FILE"
        table.add("weights", f"{best.work.quantized}; {remark}")
    if best.work.drafts:
        table.add("drafts", describe_drafts(best.work))
    table.add("first token", f"{bracketed('ttft')}; nine of ten within {units.seconds(service.ttft_p90)}")
    table.add("each token", bracketed("tpot"))
    table.add("steps", f"{service.decoding:,.1f} sequences decode in each; {service.mixed:.0%} read prompts as well")
    rate = best.replicas * service.rate
    requests = f"{rate:.3g}" if rate < 100 else f"{rate:,.0f}"
    table.add(
        "rate",
        f"{requests} requests/s; {best.output_tokens_per_s:,.0f} tokens/s out, "
        f"{rate * (best.demand.prompt + best.demand.output):,.0f} in and out",
    )
    usd, each = best.usd_per_million_output_tokens, best.usd_per_million_tokens
    unknown = f"{best.chip_id} has no published price"
    paid = unknown if usd is None else f"${usd:.3g} per million tokens out, ${each:.3g} per million in and out"
    table.add("price", paid)
    return table
