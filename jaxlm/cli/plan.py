"""Predict what a step costs on chips that need not be present: FLOPs, memory, time, money and energy.

Time has a lower bound, with everything overlapped and fused, and an upper one, with nothing; the expected time, which
gives rates and prices, is that of one operation after the other at measured rates, or else their geometric mean.
"""

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

from jaxlm import api
from jaxlm.cli import steps
from jaxlm.cli.paths import path
from jaxlm.cli.tables import TextTable, against_capacity, facts, names, numbers
from jaxlm.core import units
from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    from jaxlm.costs.plan import Plan

_SHOWN = 10  # of the plans that a search finds
# What the napkin takes a step's memory and its time for.
_NAPKIN = {
    "train": ("float32 parameters, gradients and Adam's moments", "its FLOPs at the peak"),
    "prefill": ("parameters", "its FLOPs at the peak"),
    "decode": ("parameters", "parameters read once"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser)
    parser.add_argument(
        "--on",
        metavar="CHIPS",
        help="such as h200-sxm:8, tpu-v5e:4x4 or host (jaxlm hardware lists them); all:8 ranks 8 chips of each kind",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,…",
        help="such as fsdp=8,tensor=2 (in training: all devices on fsdp); auto ranks the meshes that fit, with their "
        "best microbatches and rematerialisation unless key=value sets these",
    )
    parser.add_argument(
        "--plot", type=path, metavar="FILE", help="draw roofline and memory of the (best) plan into FILE"
    )
    parser.add_argument("--check", action="store_true", help="compare the cost model with published figures instead")


def main(arguments: argparse.Namespace) -> int:
    if arguments.check:
        return _check(arguments)
    steps.require("plan", arguments)
    experiment, fixed = steps.load(arguments), steps.fixed(arguments)
    from jaxlm.costs.ladder import say_replicated
    from jaxlm.costs.placement import say_batch

    plans, refused = api.plan(experiment, arguments.on, mesh=arguments.mesh, workload=arguments.workload, fixed=fixed)
    if arguments.plot:
        from jaxlm.costs.pictures import draw

        draw(plans[0], arguments.plot)
    shown = _shown(plans)
    remarks = _say_left_out(refused), say_batch(experiment, shown[0].work), say_replicated(*(p.work for p in shown))
    for line in filter(None, remarks):
        print(f"jaxlm: {line}", file=sys.stderr)
    if len(plans) > 1 or refused:
        _show_many(plans, refused, arguments.json)
    elif arguments.json:
        print(json.dumps(_row(plans[0])))
    else:
        _show(plans[0])
    return 0


def _shown(plans: list["Plan"]) -> list["Plan"]:
    """Return the plans that a table shows: all of several chips, and the best meshes of one."""
    return plans[: _SHOWN if len({str(plan.target) for plan in plans}) == 1 else None]


def _say_left_out(refused: dict[str, str]) -> str | None:
    """Return a line about the chips of the catalog that have no plan."""
    if not refused:
        return None
    targets, (first, *others) = ", ".join(refused), refused.values()
    if not others:
        return f"{targets} is left out: {first}"
    return f"{len(refused)} kinds of chips are left out ({targets}): {first}; --json says why of each"


def _check(arguments: argparse.Namespace) -> int:
    from jaxlm.cli import published

    given = {"CONFIG": arguments.config, "--on": arguments.on, "--mesh": arguments.mesh, "--plot": arguments.plot}
    given["--workload"] = None if arguments.workload == "train" else arguments.workload
    if refused := [name for name, value in given.items() if value is not None]:
        raise InputError(f"--check counts published figures with settings of their own: leave out {', '.join(refused)}")
    published.show(arguments.json)
    return 0


def _row(plan: "Plan") -> dict[str, Any]:
    from jaxlm.costs.serving import critical_batch

    row = plan.row()
    if plan.work.kind == "decode":
        row["critical_batch"] = critical_batch(plan.work, plan.target)
    return row


def _show_many(plans: list["Plan"], refused: dict[str, str], as_json: bool) -> None:
    if as_json:
        left_out = [{"target": target, "why": why} for target, why in refused.items()]
        print(json.dumps({**_row(plans[0]), "rows": [plan.row() for plan in plans], "refused": left_out}))
        return
    figures = numbers("memory", "step", "tokens/s", "MFU", "$/Mtok", "J/tok")
    table = TextTable([*names("chips", "mesh", "microbatches", "remat"), *figures], str(plans[0].work))
    shown = _shown(plans)
    for plan in shown:
        remat = plan.work.remat if isinstance(plan.work.remat, str) else "named"
        table.add(
            str(plan.target),
            str(plan.work.layout),
            str(plan.work.microbatches),
            remat,
            f"{plan.memory.total / plan.capacity:.0%}",
            units.seconds(plan.time.expected),
            f"{plan.tokens_per_s:,.0f}",
            f"{plan.mfu:.0%}",
            units.or_dash(plan.usd_per_million_tokens, "{:.3g}".format),
            units.or_dash(plan.joules_per_token, "{:.3g}".format),
        )
    table.print()
    if named := [plan.work.remat_shown for plan in shown if not isinstance(plan.work.remat, str)]:
        print(f"named: execution.remat={shlex.quote(named[0])}")


def _engine(engine: dict[str, Any]) -> str:
    """Describe the steps that an engine runs for a workload, on each shard of its sequences."""
    steps = (f"{of['times']:,} step{'s' * (of['times'] > 1)} of {of['rows']:,} rows" for of in engine["steps"])
    sequences = engine["sequences_per_shard"]
    return (
        f"{', '.join(steps)}, each with a draw; {sequences:,} sequence{'s' * (sequences > 1)} a shard in pages of "
        f"{engine['page']} tokens"
    )


def _show(plan: "Plan") -> None:
    work, time, memory = plan.work, plan.time, plan.memory
    row = _row(plan)
    table = facts()
    table.add("step", f"{work} on {plan.target}")
    microbatches = f", {work.microbatches} microbatches" if work.microbatches > 1 else ""
    trained = f"{microbatches}, remat {work.remat_shown}" if work.kind == "train" else ""
    table.add("mesh", f"{work.layout}{trained}")
    if plan.layers is not None:
        table.add("layers", str(plan.layers).partition(" ")[2])
    if work.kind != "train":
        table.add("engine", _engine(row["engine"]))
    counts = row["parameters"]
    trained = counts.get("trainable", counts["total"])
    table.add("parameters", f"{counts['total']:,}" + (f", of which {trained:,} train" * (trained < counts["total"])))
    for name, value in plan.flops._asdict().items():
        share = f"  {value / plan.flops.model:.3f} of model" if name != "model" else ""
        table.add(f"FLOPs, {name}", f"{value:.4g}{share}")
    napkin, (held, took) = row["napkin"], _NAPKIN[work.kind]
    table.add("memory, napkin", f"{units.memory(napkin['memory_bytes'])}: {held}")
    parts = {name: size for name, size in memory._asdict().items() if size}
    for name, size in parts.items():
        table.add(f"memory, {name}", units.memory(size))
    table.add("memory", against_capacity(memory.total, plan.capacity))
    table.add(
        "time, napkin",
        f"{units.seconds(napkin['step_s'])}, {napkin['tokens_per_s']:,.0f} tokens/s: {took}",
    )
    bounds = f"{units.seconds(time.lower_bound)} to {units.seconds(time.upper_bound)}"
    table.add(
        "time",
        f"{units.seconds(time.expected)} a step, within {bounds}: compute {units.seconds(time.compute)}, "
        f"memory {units.seconds(time.memory)}, collectives {units.seconds(time.collectives)}; bound by {time.bound_by}",
    )
    each = plan.tokens_per_s / plan.target.devices
    # More than the peak is nothing wrong: kernels skip scores that nobody sees, and attention counts whole.
    of = "model FLOPs" if plan.mfu <= 1 else "model FLOPs, with scores that kernels skip"
    table.add("rate", f"{plan.tokens_per_s:,.0f} tokens/s, {each:,.0f} per device, {plan.mfu:.1%} MFU ({of})")
    unknown = f"{plan.target.chip.id} has no published"
    usd, joules = plan.usd_per_million_tokens, plan.joules_per_token
    table.add("price", f"{unknown} price" if usd is None else f"${usd:.3g} per million tokens")
    table.add("energy", f"{unknown} power" if joules is None else f"{joules:.3g} J per token")
    if work.steps is None or plan.run_s is None:
        table.add("run", "the steps of training.epochs follow from the text; give training.steps=N for its time")
    elif work.kind == "train" and work.steps > 1:
        paid = "" if plan.usd_per_run is None else f", ${plan.usd_per_run:,.2f}"
        table.add("run", f"{work.steps:,} steps in {units.seconds(plan.run_s)}{paid}")
    elif work.kind == "prefill":
        table.add("first token", f"after {units.seconds(time.expected)}")
    elif work.kind == "decode":
        table.add("each token", f"{units.seconds(time.expected)}, {row['kv_bytes_per_token']:,} bytes of cache")
    if "critical_batch" in row:
        batch = row["critical_batch"]
        never = "at no batch size: reading the caches always takes longer than computing"
        table.add("compute-bound", never if batch is None else f"from a batch of {batch:,}")
    table.print()
