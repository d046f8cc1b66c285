"""Predict what a step costs on chips that need not be present: FLOPs, memory, time, money and energy.

The expected time, which gives rates and prices, is that of a well-tuned program at sustained rates, within a bracket;
no program is faster than the lower bound, at published rates with everything overlapped and fused.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm import api
from jaxlm.cli import chip_figures, deployments, rankings, steps
from jaxlm.cli.paths import duration, path
from jaxlm.cli.tables import against_capacity, facts, print_sentence
from jaxlm.core import collector, units
from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    from jaxlm.costs.plan import Plan
    from jaxlm.costs.stack import Stack

_OWN = Path()  # --check without a file
_REASONS = 3  # why the expected time is above that at the peak
# Parts of a step's time, in words.
_SAID = {"passes": "element-wise passes over memory", "passes below peak": "element-wise passes below peak"}
# What the napkin takes a step's memory and its time for.
_NAPKIN = {
    "train": ("float32 parameters, gradients and Adam's moments", "its FLOPs at the peak"),
    "prefill": ("parameters", "its FLOPs at the peak"),
    "decode": ("parameters", "parameters read once"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, {"serve": "requests, for the cheapest deployment that serves them"})
    parser.add_argument(
        "--on",
        metavar="CHIPS",
        help="such as h200-sxm:8, tpu-v5e:4x4 or host (jaxlm hardware lists them); all:8 ranks 8 chips of each kind",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,…",
        help="such as fsdp=8,tensor=2 (in training: all devices on fsdp); auto ranks the meshes that leave a "
        "tenth of memory free, with their best microbatches and rematerialisation unless key=value sets these",
    )
    parser.add_argument(
        "--objective",
        choices=("throughput", "latency", "cost"),
        help="what is best: the most tokens a second (the default), the least time of a step of inference or of a "
        "served request, or the least USD per token (the default for serve)",
    )
    parser.add_argument("--budget", type=float, metavar="USD", help="the most that a training run may cost")
    parser.add_argument(
        "--deadline",
        type=duration,
        metavar="TIME",
        help="such as 12h or 30d: the longest that a training run may take; the cheapest within it is best",
    )
    deployments.add_arguments(parser)
    parser.add_argument(
        "--stack",
        action="append",
        metavar="NAME|KEY=VALUE",
        help="other software than jaxlm's own programs: a name, such as torch-fsdp or megatron, and keys of it, such "
        "as attention=flash-2, overlap=none or pipeline.stages=8; several times",
    )
    parser.add_argument(
        "--plot",
        type=path,
        metavar="FILE",
        help="draw the (best) plan into FILE: roofline, time as a waterfall from the peak, and memory",
    )
    parser.add_argument(
        "--check",
        nargs="?",
        type=path,
        const=_OWN,
        metavar="FILE",
        help="compare the cost model with published figures instead: those that come with jaxlm, or those of a TOML "
        "file of cases or a JSON file of measured runs",
    )


@collector.paused()
def main(arguments: argparse.Namespace) -> int:
    if arguments.check is not None:
        return _check(arguments)
    steps.require("plan", arguments)
    deployments.check(arguments)
    if arguments.workload == "serve":
        return deployments.show(steps.load(arguments), arguments, _stack(arguments))
    steps.searched(arguments)
    experiment, fixed = steps.load(arguments), steps.fixed(arguments)
    from jaxlm.costs.ladder import say_replicated
    from jaxlm.costs.placement import on_mesh, say_batch, say_mesh, say_slices

    several = arguments.mesh == "auto" or arguments.on.partition(":")[0] == "all"
    if arguments.objective is not None and not several:
        raise InputError("--objective chooses among plans: give --mesh auto or --on all:N as well")
    plans, refused = api.plan(
        experiment,
        arguments.on,
        mesh=arguments.mesh,
        workload=arguments.workload,
        fixed=fixed,
        objective=arguments.objective,
        budget=arguments.budget,
        deadline=arguments.deadline,
        chip=steps.chip(arguments),
        stack=_stack(arguments),
    )
    if arguments.plot:
        from jaxlm.costs.pictures import draw

        draw(plans[0], arguments.plot)
    shown = rankings.shown(plans)
    remarks = (
        rankings.say_stack(plans[0].stack),
        rankings.say_left_out(refused),
        None if arguments.mesh == "auto" else say_mesh(on_mesh(experiment, arguments.mesh), shown[0].work),
        say_batch(experiment, shown[0].work),
        say_replicated(*(p.work for p in shown)),
        say_slices(shown[0].target, shown[0].work.layout),
    )
    for line in filter(None, remarks):
        print_sentence(f"jaxlm: {line}", sys.stderr)
    if len(plans) > 1 or refused:
        limited = arguments.budget is not None or arguments.deadline is not None
        rankings.show(plans, refused, _row(plans[0]) if arguments.json else None, limited)
    elif arguments.json:
        print(json.dumps(_row(plans[0])))
    else:
        _show(plans[0])
    return 0


def _stack(arguments: argparse.Namespace) -> "Stack":
    """Return the software that --stack names. Raises InputError for what is no name and no KEY=VALUE."""
    from jaxlm.config.overrides import assigned
    from jaxlm.costs.stack import stack_of

    given = arguments.stack or ()
    named, changes = [each for each in given if "=" not in each], [each for each in given if "=" in each]
    if len(named) > 1:
        raise InputError(f"--stack takes one name, and not both {named[0]} and {named[1]}")
    return stack_of(next(iter(named), None), assigned(changes, "attention=flash-2"))


def _check(arguments: argparse.Namespace) -> int:
    from jaxlm.cli import published

    given = {"CONFIG": arguments.config, "--on": arguments.on, "--mesh": arguments.mesh, "--plot": arguments.plot}
    given |= {f"--{name}": getattr(arguments, name) for name in ("chip", "stack", "objective", "budget", "deadline")}
    given["--workload"] = None if arguments.workload == "train" else arguments.workload
    if refused := [name for name, value in given.items() if value is not None]:
        raise InputError(f"--check counts published figures with settings of their own: leave out {', '.join(refused)}")
    published.show(None if arguments.check == _OWN else arguments.check, arguments.json)
    return 0


def _row(plan: "Plan") -> dict[str, Any]:
    from jaxlm.costs.serving import critical_batch

    row = plan.row()
    if plan.work.kind == "decode":
        row["critical_batch"] = critical_batch(plan.work, plan.target)
    return row


def _engine(engine: dict[str, Any]) -> str:
    """Describe the steps that an engine runs for a workload, on each shard of its sequences."""
    steps = (f"{of['times']:,} step{'s' * (of['times'] > 1)} of {of['rows']:,} rows" for of in engine["steps"])
    sequences = engine["sequences_per_shard"]
    return (
        f"{', '.join(steps)}, each with a draw; {sequences:,} sequence{'s' * (sequences > 1)} a shard in pages of "
        f"{engine['page']} tokens"
    )


def _cache(row: dict[str, Any]) -> str:
    """Return what the pages of an engine hold: keys and values, states of recurrent layers, or both."""
    if "state_bytes_per_sequence" not in row:
        return "kv_cache"
    return "kv_cache and states" if row["kv_bytes_per_token"] else "states"


def _show(plan: "Plan") -> None:
    work, time, memory = plan.work, plan.time, plan.memory
    row = _row(plan)
    table = facts()
    table.add("step", f"{work} on {plan.target}")
    if changes := chip_figures.changes(plan.target.chip):
        table.add("chip", changes)
    microbatches = f", {work.microbatches} microbatches" if work.microbatches > 1 else ""
    trained = f"{microbatches}, remat {work.remat_shown}" if work.kind == "train" else ""
    table.add("mesh", f"{work.layout}{trained}")
    if stages := row.get("stages"):
        slots = stages["count"] * stages["rounds"] * stages["slots"]
        idle = (
            f"{stages['idle_slots']} of {slots} slots without a layer"
            if stages["idle_slots"]
            else "as many layers on each"
        )
        chunks = f", each with {stages['rounds']} chunks of layers" if stages["rounds"] > 1 else ""
        chunks += ", which gather matrices once a step" if stages["gather"] == "step" else ""
        table.add("stages", f"{stages['count']}{chunks}, {idle}; idle in {stages['bubble']:.1%} of their time (bubble)")
    if other := plan.stack.changes():
        table.add("stack", ", ".join(f"{key}={value}" for key, value in other.items()))
    if plan.layers is not None:
        table.add("layers", str(plan.layers).partition(" ")[2])
    if work.kind != "train":
        table.add("engine", _engine(row["engine"]))
    counts = row["parameters"]
    trained = counts.get("trainable", counts["total"])
    parts = [f"{counts['active']:,} are active for each token"] if counts["active"] < counts["total"] else []
    parts += [f"{trained:,} train"] if trained < counts["total"] else []
    table.add("parameters", f"{counts['total']:,}" + (f", of which {' and '.join(parts)}" if parts else ""))
    for name, value in plan.flops._asdict().items():
        share = f"  {value / plan.flops.model:.3f} of model" if name != "model" else ""
        table.add(f"FLOPs, {name}", f"{value:.4g}{share}")
    if rows := row.get("expert_rows"):
        tiles = f"tiles of {rows['tile']} compute {rows['expected']:,.0f}, at most {rows['most']:,}"
        table.add("rows of experts", f"{rows['rows']:,} in a product on a device; {tiles}")
    napkin, (held, took) = row["napkin"], _NAPKIN[work.kind]
    table.add("memory, napkin", f"{units.memory(napkin['memory_bytes'])}: {held}")
    parts = {name: size for name, size in memory._asdict().items() if size}
    for name, size in parts.items():
        table.add(f"memory, {_cache(row) if name == 'kv_cache' else name}", units.memory(size))
    table.add("memory", against_capacity(memory.total, plan.capacity))
    if not plan.fits:
        from jaxlm.lowering.suggestions import suggest

        helps = suggest(plan, memory.total)
        table.add("try", "; or ".join(helps) or "more chips: no counted setting lowers this enough")
    table.add(
        "time, napkin",
        f"{units.seconds(napkin['step_s'])}, {napkin['tokens_per_s']:,.0f} tokens/s: {took}",
    )
    table.add(
        "time, lower bound",
        f"{units.seconds(time.lower_bound)}: compute {units.seconds(time.compute)}, memory "
        f"{units.seconds(time.memory)}, collectives {units.seconds(time.collectives)}; bound by {time.bound_by}",
    )
    bracket = f"{units.seconds(time.low)} to {units.seconds(time.upper_bound)}"
    table.add("time, expected", f"{units.seconds(time.expected)} a step, within {bracket}")
    if sent := row.get("sent"):
        exposed, hidden = units.seconds(sent["exposed_s"]), units.seconds(sent["hidden_s"])
        waits = f"{units.size(sent['exposed_bytes'])} waited for ({exposed}), the rest behind computation ({hidden})"
        table.add("sent", f"{units.size(sent['bytes'])} on each device: {waits}")
    if outer := row.get("outer_step"):
        sent, took = units.size(outer["bytes"]), units.seconds(outer["time_s"])
        every = f"every {outer['period']:,} steps {outer['replicas']} replicas sum {sent} each"
        table.add("outer step", f"{every}, {took} at published rates")
    shown = (reason for reason in time.reasons[:_REASONS] if reason.share >= 0.005)
    reasons = [f"{_SAID.get(reason.name, reason.name)} {reason.share:.0%}" for reason in shown]
    table.add("gap to the peak", f"{', '.join(reasons)} of the expected time" if reasons else "none")
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
        if work.drafts:
            table.add("drafts", deployments.describe_drafts(work))
        each = units.seconds(row["time_per_token_s"])
        cached = row["kv_bytes_per_token"]
        table.add("each token", f"{each}, {cached:,} bytes of cache" if cached else each)
        if state := row.get("state_bytes_per_sequence"):
            table.add("each sequence", f"a state of {units.size(state)}, in up to three pages")
    if "critical_batch" in row:
        batch = row["critical_batch"]
        never = "at no batch size: reading caches or states always takes longer than computing"
        table.add("compute-bound", never if batch is None else f"from a batch of {batch:,}")
    table.print()
