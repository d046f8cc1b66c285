"""Show the catalog of chips, every figure of one chip, or several side by side; measure this machine.

Rates in the table are per chip: TFLOP/s of dense bfloat16 products; FLOP/byte is the arithmetic intensity above which
these are bound by compute; link is the one-way rate to the other chips of a node or pod.
"""

import argparse
import json
from typing import TYPE_CHECKING, Any

from jaxlm.cli import chip_figures
from jaxlm.cli.tables import TextTable, names, numbers, print_sentence
from jaxlm.core.units import number, or_dash

if TYPE_CHECKING:
    from jaxlm.costs.hardware.chips import Chip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ids", nargs="*", metavar="ID", help="a chip, such as h200-sxm; host is this machine; several are compared"
    )
    parser.add_argument(
        "--measure", action="store_true", help="calibrate this machine (host), replacing earlier measurements"
    )


def main(arguments: argparse.Namespace) -> int:
    from jaxlm.core.errors import InputError
    from jaxlm.costs.hardware.catalog import HOST, catalog, find

    if arguments.measure:
        if others := [id for id in arguments.ids if id != HOST]:
            raise InputError(f"--measure calibrates this machine, not {others[0]}; write host in its place")
        chips = [_measure()]
    elif arguments.ids:
        chips = [find(id) for id in dict.fromkeys(arguments.ids)]
    else:
        chips = [*catalog().values(), *_host()]
    if arguments.json:
        print(json.dumps({"rows": [_row(chip) for chip in chips]}))
    elif not arguments.ids and not arguments.measure:
        _print_table(chips)
    elif len(chips) > 1:
        chip_figures.compared(chips).print()
    else:
        _print_chip(chips[0])
    return 0


def _host() -> list["Chip"]:
    from jaxlm.core.errors import InputError
    from jaxlm.costs.hardware.catalog import HOST, find

    try:
        return [find(HOST)]
    except InputError:  # not calibrated
        return []


def _measure() -> "Chip":
    from jaxlm.cli.progress import working
    from jaxlm.core import accelerators
    from jaxlm.core.allocator import keep_freed_memory
    from jaxlm.costs.hardware import calibration

    if accelerators.platforms() == "cpu":
        keep_freed_memory()  # as in a run
    with working("measuring this machine") as say:
        return calibration.measure(say)


def _row(chip: "Chip") -> dict[str, Any]:
    """Return every published figure, in SI units, and the intensity of bfloat16 products."""
    return {**chip.model_dump(mode="json", exclude_none=True), "intensity": _intensity(chip)}


def _intensity(chip: "Chip") -> float | None:
    return chip.intensity("bfloat16") if "bfloat16" in chip.peak_flops and chip.memory_bytes_per_s else None


def _print_table(chips: list["Chip"]) -> None:
    figures = ("TFLOP/s", "GB", "TB/s", "FLOP/byte", "link GB/s", "W", "$/h")
    table = TextTable([*names("chip"), *numbers(*figures)])
    for chip in chips:
        peak, link = chip.peak_flops.get("bfloat16"), chip.link and chip.link.bytes_per_s
        table.add(
            chip.id,
            _scaled(peak, 1e12),
            _scaled(chip.memory_bytes, 1e9),
            _scaled(chip.memory_bytes_per_s, 1e12),
            _scaled(_intensity(chip), 1.0),
            _scaled(link, 1e9),
            _scaled(chip.watts, 1.0),
            or_dash(chip.usd_per_hour, lambda prices: chip_figures.shown("usd_per_hour", prices)),
        )
    table.print()


def _print_chip(chip: "Chip") -> None:
    sources = chip_figures.Sources()
    table = TextTable([*names("figure", "value"), *numbers("source")])
    for figure, value in chip.figures().items():
        source = chip.source(figure)
        table.add(figure, chip_figures.shown(figure, value), sources.number(source) if source else "")
    also = f" (also {', '.join(chip.aliases)})" if chip.aliases else ""
    print_sentence(f"{chip.id}{also}: {chip.name}, {chip.vendor}")
    table.print()
    if chip.notes:
        print_sentence(chip.notes)
    _print_sustained(chip, sources)
    print()
    sources.table().print()


def _print_sustained(chip: "Chip", sources: "chip_figures.Sources") -> None:
    rates = chip.sustained
    tables = chip_figures.sustained(rates, sources)
    inherited = f"the share of its peak that {rates.like} sustains" if rates.like else "the median share of all chips"
    print()
    print_sentence(
        f"Sustained rates, as measured{'; * is derived' * bool(tables)}. Others are {inherited}, with a wider spread."
    )
    for table in tables:
        print()
        table.print()


def _scaled(value: float | None, unit: float) -> str:
    return or_dash(value, lambda value: number(value / unit))
