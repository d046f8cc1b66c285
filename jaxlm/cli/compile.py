"""Compile a step for chips that need not be present: its memory, its collectives and its kernels.

XLA's compilers for TPUs and NVIDIA GPUs run on this machine without the chip. Exit status 1: the step does not fit.
"""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm import api
from jaxlm.cli import steps
from jaxlm.cli.paths import path
from jaxlm.cli.tables import add_numbers, against_capacity, facts, headed, print_table
from jaxlm.core.errors import InputError
from jaxlm.core.files import unwritable
from jaxlm.core.units import gib, or_dash, seconds

if TYPE_CHECKING:
    from jaxlm.lowering.report import CompiledStep, DoesNotFit, FitTrial, Report

_SHOWN = 10  # rows of buffers, and of fusions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser)
    parser.add_argument("--on", metavar="CHIPS", help="such as h200-sxm:8, tpu-v5e:16x16 or host (see jaxlm hardware)")
    parser.add_argument(
        "--mesh", metavar="AXIS=N,…", help="such as fsdp=8,tensor=2 (all devices on fsdp, which is for training)"
    )
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
    from rich.console import Console

    from jaxlm.lowering.report import DoesNotFit

    steps.require("compile", arguments)
    if arguments.dump and (why := unwritable(arguments.dump)):
        raise InputError(f"--dump {arguments.dump} cannot be written to ({why}); give a directory that can")
    experiment, console = steps.load(arguments), Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    try:
        with console.status(f"compiling for {arguments.on}"):
            compiled = api.compile(
                experiment,
                arguments.on,
                mesh=arguments.mesh,
                workload=arguments.workload,
                fit=arguments.fit,
                quick=arguments.quick,
                held=steps.held(arguments),
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
    _keep(arguments.dump, row, {"stablehlo.mlir": compiled.stablehlo, "optimised.hlo": compiled.optimised})
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
    table.add_row("step", str(work))
    quickly = " quickly" if report.quick else ""
    table.add_row("on", f"{report.plan.target}: {work.layout}, compiled{quickly} in {seconds(report.compile_s)}")
    if work.kind == "train":
        table.add_row("with", work.overrides())
    for name in ("arguments", "outputs", "temporaries"):
        table.add_row(f"memory, {name}", f"{gib(getattr(memory, name))} GiB")
    table.add_row(
        "memory",
        f"{against_capacity(memory.peak, memory.capacity)} (counted {gib(total)}, {total / memory.peak - 1:+.0%})",
    )
    if memory.gaps:
        table.add_row("", f"and {gib(memory.gaps)} GiB of gaps, which close where memory is short")
    if not report.fits:
        table.add_row("try", "; or ".join(suggest(report.plan, memory.peak)))
    counted = report.counted_flops
    same = "as counted" if report.flops == counted else f"counted {counted:.5g}, {counted / report.flops - 1:+.1%}"
    table.add_row("FLOPs", f"{report.flops:.5g} per device: {same}" if report.flops else "no matrix products")
    if report.kernel_flops:
        counted = report.counted_kernel_flops
        same = "as counted" if math.isclose(report.kernel_flops, counted) else f"counted {counted:.5g}"
        table.add_row("FLOPs, kernels", f"{report.kernel_flops:.5g} declared per device: {same}")
    kernels = sum(map(report.kernel_seconds, report.kernels))
    sent = [report.seconds(collective) for collective in report.collectives]
    table.add_row(
        "time",
        f"{seconds(kernels)} of kernels on the roofline, {seconds(sum(s for s in sent if s))} of collectives "
        f"(counted {seconds(report.plan.time.lower_bound)} to {seconds(report.plan.time.upper_bound)})",
    )
    print_table(table)


def _print_held(report: "Report") -> None:
    table = _table("held at the peak", ("GiB", "of"), ("array", "what", "source"))
    for held in report.held[:_SHOWN]:
        what = held.name if held.array else f"argument {held.name}"
        table.add_row(gib(held.bytes, 3), str(held.count), held.array, what, held.source)
    if rest := report.held[_SHOWN:]:
        table.add_row(gib(sum(h.bytes for h in rest), 3), str(sum(h.count for h in rest)), "", "the rest", "")
    print_table(table)


def _print_collectives(report: "Report") -> None:
    if not report.collectives:
        return
    table = _table("collectives", ("count", "MB each", "counted"), ("kind", "axes", "scope"))
    for collective in report.collectives:
        axes = " × ".join(collective.axes) + ("" if collective.spans_axes else " (partly)")
        took = or_dash(report.seconds(collective), seconds)
        size = f"{collective.bytes / 1e6:,.3f}"
        table.add_row(str(collective.count), size, took, collective.kind, axes, collective.scope)
    print_table(table)


def _print_kernels(report: "Report") -> None:
    if report.calls:
        table = _table("kernels", ("count",), ("Pallas or library",))
        for name, count in report.calls:
            table.add_row(str(count), name)
        print_table(table)
    table = _table("longest", ("time", "count", "GFLOP", "MB", "FLOP/B"), ("what", "source"))
    longest = sorted(report.kernels, key=report.kernel_seconds, reverse=True)
    for kernel in longest[:_SHOWN]:
        table.add_row(
            seconds(report.kernel_seconds(kernel)),
            str(kernel.count),
            f"{kernel.flops / 1e9:,.1f}",
            f"{kernel.bytes / 1e6:,.1f}",
            f"{kernel.intensity:,.0f}",
            f"{kernel.name} ({kernel.kind})",
            kernel.source,
        )
    print_table(table)
    bandwidth = report.plan.target.chip.memory_bytes_per_s / report.plan.target.chip.devices_per_chip
    table = _table("not fused", ("GB", "time"), ("memory-bound kernels that pass arrays to one another",))
    for chain in report.chains[:3]:
        names = list(dict.fromkeys(kernel.name for kernel in chain.kernels))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        table.add_row(f"{chain.bytes / 1e9:,.2f}", seconds(chain.bytes / bandwidth), ", ".join(names[:4]) + more)
    if report.chains:
        print_table(table)


def _print_tried(tried: "tuple[FitTrial, ...] | None") -> None:
    if not tried:
        return
    table = _table("compiled", ("GiB",), ("microbatches", "remat"))
    for work, size in tried:
        table.add_row(gib(size), str(work.microbatches), work.remat_shown)
    print_table(table)


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
    _keep(arguments.dump, row, {"stablehlo.mlir": refused.stablehlo})
    if arguments.json:
        print(json.dumps(row))
        return
    _print_tried(refused.tried)
    table = _table("does not fit", ("GiB",), ("per device",))
    table.add_row(gib(plan.capacity), f"capacity of {plan.target.chip.name}")
    table.add_row(gib(refused.arguments), "arguments")
    table.add_row(gib(refused.temporaries), "temporaries, from the compiler")
    for name, size in sorted(memory._asdict().items(), key=lambda part: -part[1]):
        if size:
            table.add_row(gib(size), f"{name.replace('_', ' ')}, counted")
    print_table(table)
    print("try " + ("; or ".join(suggestions) or "more chips: no counted setting lowers this enough"))


def _table(title: str, numbers: tuple[str, ...], texts: tuple[str, ...]) -> Any:
    table = headed(title, pad_edge=False)
    add_numbers(table, numbers)
    for column in texts:
        table.add_column(column, overflow="fold")
    return table
