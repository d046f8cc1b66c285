"""Compile a step for chips that need not be present: its memory, its collectives and its kernels.

XLA's compilers for TPUs and NVIDIA GPUs run on this machine without the chip. Exit status 1: the step does not fit.
"""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm import api
from jaxlm.cli import chip_figures, steps
from jaxlm.cli.paths import path
from jaxlm.cli.tables import TextTable, against_capacity, facts, names, numbers, print_sentence, texts
from jaxlm.core import units
from jaxlm.core.errors import InputError
from jaxlm.core.files import unwritable
from jaxlm.core.units import or_dash, seconds

if TYPE_CHECKING:
    from jaxlm.lowering.report import CompiledStep, DoesNotFit, FitTrial, ProgramReport, Report

_SHOWN = 10  # rows of buffers, and of fusions
# What a buffer or kernel computes, and the line of Python; the axes of a collective, and where it is in the model.
_WHAT = [*texts("what", least=32), *texts("source", under="what")]
_WHERE = [*texts("axes", least=14), *texts("scope")]
_UNFUSED = "memory-bound kernels that pass arrays to one another"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser)
    parser.add_argument("--on", metavar="CHIPS", help="such as h200-sxm:8, tpu-v5e:16x16 or host (see jaxlm hardware)")
    parser.add_argument("--mesh", metavar="AXIS=N,…", help="such as fsdp=8,tensor=2 (in training: all devices on fsdp)")
    parser.add_argument(
        "--fit",
        action="store_true",
        help="find the largest microbatch and the cheapest rematerialisation that fit; key=value fixes either",
    )
    parser.add_argument(
        "--quick", action="store_true", help="compile sooner by a shorter search for a fast program (TPUs only)"
    )
    parser.add_argument("--dump", type=path, metavar="DIR", help="keep the programs and the report in DIR")


def main(arguments: argparse.Namespace) -> int:
    from jaxlm.cli.progress import working
    from jaxlm.lowering.report import DoesNotFit

    steps.require("compile", arguments)
    if arguments.dump and (why := unwritable(arguments.dump)):
        raise InputError(f"--dump {arguments.dump} cannot be written to ({why}); give a directory that can")
    steps.searched(arguments)
    experiment = steps.load(arguments)
    try:
        with working("compiling") as say:
            compiled = api.compile(
                experiment,
                arguments.on,
                mesh=arguments.mesh,
                workload=arguments.workload,
                fit=arguments.fit,
                quick=arguments.quick,
                fixed=steps.fixed(arguments),
                chip=steps.chip(arguments),
                say=say,
                warn=lambda line: say(f"jaxlm: {line}"),
            )
    except DoesNotFit as refused:
        _refuse(refused, arguments)
        return 1
    _show(compiled, arguments)
    return 0 if compiled.report.fits else 1


def _show(compiled: "CompiledStep", arguments: argparse.Namespace) -> None:
    row = {**compiled.report.row(), **_tried_row(compiled.tried)}
    _keep(arguments.dump, row, compiled.texts)
    if arguments.json:
        print(json.dumps(row))
        return
    _print_step(compiled.report)
    _print_tried(compiled.tried)
    _print_held(compiled.report)
    _print_collectives(compiled.report)
    _print_kernels(compiled.report)


def _keep(folder: Path | None, row: dict[str, Any], programs: dict[str, str]) -> None:
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**programs, "report.json": json.dumps(row, indent=1) + "\n"}.items():
            (folder / name).write_text(text, encoding="utf-8")


def _print_step(report: "Report") -> None:
    from jaxlm.lowering.suggestions import suggest

    work, memory, total = report.plan.work, report.memory, report.plan.memory.total
    table = facts()
    table.add("step", str(work))
    quickly = " quickly" if report.quick else ""
    table.add("on", f"{report.plan.target}: {work.layout}, compiled{quickly} in {seconds(report.compile_s)}")
    if changes := chip_figures.changes(report.plan.target.chip):
        table.add("chip", changes)
    if work.kind == "train":
        table.add("with", work.overrides())
        table.add("layers", str(report.plan.layers).partition(" ")[2])
    else:
        step = report.row()["engine_step"]
        table.add("engine", f"its largest step: {step['rows']:,} rows and {step['draws']:,} draws a shard")
    for name in ("arguments", "outputs", "temporaries"):
        table.add(f"memory, {name}", units.memory(getattr(memory, name)))
    counted = f"counted {units.memory(total)}, {total / memory.peak - 1:+.0%}"
    table.add("memory", f"{against_capacity(memory.peak, memory.capacity)} ({counted})")
    if memory.gaps:
        table.add("", f"and {units.memory(memory.gaps)} of gaps, which close where memory is short")
    if not report.fits:
        table.add("try", "; or ".join(suggest(report.plan, memory.peak)))
    counted = report.counted_flops
    same = "as counted" if report.flops == counted else f"counted {counted:.5g}, {counted / report.flops - 1:+.1%}"
    table.add("FLOPs", f"{report.flops:.5g} per device: {same}" if report.flops else "no matrix products")
    if report.kernel_flops:
        counted = report.counted_kernel_flops
        same = "as counted" if math.isclose(report.kernel_flops, counted) else f"counted {counted:.5g}"
        table.add("FLOPs, kernels", f"{report.kernel_flops:.5g} declared per device: {same}")
    sent = [report.seconds(collective) for collective in report.collectives]
    table.add(
        "time",
        f"{seconds(report.roofline_s)} of kernels on the roofline, {seconds(sum(s for s in sent if s))} of collectives "
        f"(counted {seconds(report.plan.time.lower_bound)} to {seconds(report.plan.time.upper_bound)})",
    )
    if report.draw is not None:
        table.add("draw", f"a program of its own, {_beside(report, report.draw)}")
    if report.draft is not None:
        table.add("draft model", f"reads these rows by a program of its own, {_beside(report, report.draft.read)}")
        table.add("", f"and proposes {report.draft.drafts} tokens by another, {_beside(report, report.draft.propose)}")
    table.print()


def _beside(report: "Report", program: "ProgramReport") -> str:
    sent = [report.seconds(collective) for collective in program.collectives]
    exchanged = f", {seconds(sum(s for s in sent if s))} of collectives" if sent else ""
    temporaries, kernels = units.memory(program.memory.temporaries), f"{seconds(program.roofline_s)} of kernels"
    return f"compiled in {seconds(program.compile_s)}: {temporaries} of temporaries, {kernels}{exchanged}"


def _print_held(report: "Report") -> None:
    table = TextTable([*numbers("memory", "of"), *names("array"), *_WHAT], "held at the peak")
    for held in report.held_buffers[:_SHOWN]:
        what = held.name if held.array else f"argument {held.name}"
        table.add(units.memory(held.bytes), str(held.count), held.array, what, held.source)
    if rest := report.held_buffers[_SHOWN:]:
        table.add(units.memory(sum(h.bytes for h in rest)), str(sum(h.count for h in rest)), "", "the rest", "")
    _print_table(table)


def _print_collectives(report: "Report") -> None:
    if not report.collectives:
        return
    table = TextTable([*numbers("count", "each", "counted"), *names("kind"), *_WHERE], "collectives")
    for collective in report.collectives:
        axes = " × ".join(collective.axes) + ("" if collective.spans_axes else " (partly)")
        axes += ", across slices" if collective.crosses_slices else ""
        took = or_dash(report.seconds(collective), seconds)
        size = units.size(collective.bytes)
        table.add(str(collective.count), size, took, collective.kind, axes, collective.scope)
    _print_table(table)


def _print_kernels(report: "Report") -> None:
    if report.calls:
        table = TextTable([*numbers("count"), *texts("Pallas or library")], "kernels")
        for name, count in report.calls:
            table.add(str(count), name)
        _print_table(table)
    table = TextTable([*numbers("time", "count", "FLOP", "bytes", "FLOP/B"), *_WHAT], "longest")
    for kernel in report.longest_kernels(merged=True)[:_SHOWN]:
        table.add(
            seconds(report.kernel_seconds(kernel)),
            str(kernel.count),
            units.with_prefix(kernel.flops, "FLOP"),
            units.size(kernel.bytes),
            f"{kernel.intensity:,.0f}",
            f"{kernel.name} ({kernel.kind})",
            kernel.source,
        )
    _print_table(table)
    bandwidth = report.plan.target.chip.memory_bytes_per_s / report.plan.target.chip.devices_per_chip
    table = TextTable([*numbers("bytes", "time"), *texts(_UNFUSED)], "not fused")
    for chain in report.chains[:3]:
        names = list(dict.fromkeys(kernel.name for kernel in chain.kernels))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        table.add(units.size(chain.bytes), seconds(chain.bytes / bandwidth), ", ".join(names[:4]) + more)
    if report.chains:
        _print_table(table)


def _print_tried(tried: "tuple[FitTrial, ...] | None") -> None:
    if not tried:
        return
    table = TextTable([*numbers("memory"), *texts("microbatches", "remat")], "compiled")
    for work, size in tried:
        table.add(units.memory(size), str(work.microbatches), work.remat_shown)
    _print_table(table)


def _tried_row(tried: "tuple[FitTrial, ...] | None") -> dict[str, Any]:
    if tried is None:
        return {}
    keys = ("microbatches", "remat")
    return {"tried": [{**{key: getattr(t.work, key) for key in keys}, "peak": t.needed} for t in tried]}


def _refuse(refused: "DoesNotFit", arguments: argparse.Namespace) -> None:
    """Report a step that the compiler rejected: its counted memory, and suggestions that make it fit."""
    from jaxlm.lowering.suggestions import suggest

    plan, memory = refused.plan, refused.plan.memory
    suggestions = suggest(plan, refused.needed)
    row = {**refused.row(), "suggestions": suggestions, **_tried_row(refused.tried)}
    _keep(arguments.dump, row, refused.texts)
    if arguments.json:
        print(json.dumps(row))
        return
    _print_tried(refused.tried)
    table = TextTable([*numbers("memory"), *texts("per device")], "does not fit")
    table.add(units.memory(plan.capacity), f"capacity of {plan.target.chip.name}")
    table.add(units.memory(refused.arguments), "arguments")
    table.add(units.memory(refused.temporaries), "temporaries, from the compiler")
    for name, size in sorted(memory._asdict().items(), key=lambda part: -part[1]):
        if size:
            table.add(units.memory(size), f"{name.replace('_', ' ')}, counted")
    _print_table(table)
    print_sentence("try " + ("; or ".join(suggestions) or "more chips: no counted setting lowers this enough"))


def _print_table(table: TextTable) -> None:
    print()
    table.print()
