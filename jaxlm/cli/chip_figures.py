"""Figures of chips for a person: with their units, side by side, and beside the rates that programs sustain."""

from typing import TYPE_CHECKING, Any

from jaxlm.cli.tables import Column, TextTable, names, numbers, texts
from jaxlm.core import units
from jaxlm.core.units import number, or_dash, with_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxlm.costs.hardware.chips import Chip
    from jaxlm.costs.hardware.sustained import AttentionRates, ProductRates, Sustained

# The unit of a figure, by how its name begins or ends.
_UNITS = {
    "peak_flops": "FLOP/s",
    "bytes_per_s": "B/s",
    "bytes": "B",
    "_s": "s",
    "_hz": "Hz",
    "watts": "W",
}
# Sides of products, and sequences of attention, at which a table has a column.
_SIDES = (128, 512, 2048, 8192)
_SEQUENCES = (2048, 8192)


def shown(figure: str, value: Any) -> str:
    """Format a figure with its unit, such as "3.35 TB/s"."""
    if figure == "usd_per_hour":
        return "–".join(f"{price:.2f}" for price in dict.fromkeys(value))
    if isinstance(value, tuple):
        return (", " if isinstance(value[0], str) else " × ").join(map(str, value))
    for part, unit in _UNITS.items():
        if figure.startswith(part) or figure.endswith(part):
            return with_prefix(value, unit)
    return f"{value:,}" if isinstance(value, int) else str(value)


def changes(chip: "Chip") -> str:
    """Describe the figures of a chip that are not its catalog's; "" where all are."""
    from jaxlm.costs.hardware.catalog import find
    from jaxlm.costs.hardware.chip_changes import given_figures

    if not (given := given_figures(chip)):
        return ""
    before = find(chip.id).figures()
    each = (
        f"{name} {shown(name, value)} (catalog: {or_dash(before.get(name), lambda old, name=name: shown(name, old))})"
        for name, value in given.items()
    )
    return f"{chip.id} with {', '.join(each)}"


def compared(chips: "list[Chip]") -> TextTable:
    """Return a table of the figures of several chips, a column each."""
    from jaxlm.costs.hardware.chip_changes import figure_names

    table = TextTable([*names("figure"), *numbers(*(chip.id for chip in chips))], repeats=True)
    figures = [chip.figures() for chip in chips]
    for name in figure_names():
        if name != "slices" and any(name in each for each in figures):
            table.add(
                name, *(or_dash(each.get(name), lambda value, name=name: _brief(name, value)) for each in figures)
            )
    return table


def _brief(figure: str, value: Any) -> str:
    """Format a figure for a column beside others: a link's kind without what stands in brackets or behind a comma."""
    text = shown(figure, value)
    return text.partition(" (")[0].partition(",")[0] if figure == "link.kind" else text


class Sources:
    """Addresses, each of which a table names by a number."""

    def __init__(self) -> None:
        self.addresses: dict[str, int] = {}

    def number(self, address: str) -> str:
        return f"[{self.addresses.setdefault(address, len(self.addresses) + 1)}]"

    def table(self) -> TextTable:
        """Return a table of the numbers and their addresses."""
        table = TextTable([*numbers("source"), *texts("address")])
        for address, place in self.addresses.items():
            table.add(f"[{place}]", address)
        return table


def sustained(rates: "Sustained", sources: Sources) -> "list[TextTable]":
    """Return tables of the rates that programs sustain on a chip."""
    tables = [
        _products(rates, sources),
        _attention(rates, sources),
        _passes(rates, sources),
        _collectives(rates, sources),
        _launches(rates, sources),
    ]
    return [table for table in tables if table.filled]


def _table(title: str, *columns: "Sequence[Column]") -> TextTable:
    return TextTable([*(column for group in columns for column in group), *numbers("±", "source")], title)


def _measured(usual: "Sequence[int]", curves: "Sequence[ProductRates | AttentionRates]") -> list[int]:
    """Return the usual sizes that some curve reaches; where none does, the ends of the curves."""
    ends = {round(size) for each in curves for size, _ in (each.rates[0], each.rates[-1])}
    return [size for size in usual if size <= max(ends, default=0)] or sorted(ends)


def _products(rates: "Sustained", sources: Sources) -> TextTable:
    from jaxlm.costs.hardware.sustained import at

    sides = _measured(_SIDES, rates.products)
    columns = numbers(*(f"{side:,}" for side in sides))
    table = _table("products, TFLOP/s by the smallest side", names("dtype"), columns)
    for each in rates.products:
        name = each.dtype + ", batched" * each.batched
        table.add(name, *(number(at(each.rates, side) / 1e12) for side in sides), *_end(each, sources))
    return table


def _attention(rates: "Sustained", sources: Sources) -> TextTable:
    from jaxlm.costs.hardware.sustained import at

    lengths = _measured(_SEQUENCES, rates.attention)
    columns = numbers("head dim", *(f"{length:,}" for length in lengths))
    title = "attention, TFLOP/s by the length of the sequence"
    table = _table(title, names("kernel", "direction", "mask"), columns)
    for each in rates.attention:
        speeds = (number(at(each.rates, length) / 1e12) for length in lengths)
        table.add(each.kernel, each.direction, each.mask, str(each.head_dim), *speeds, *_end(each, sources))
    return table


def _passes(rates: "Sustained", sources: Sources) -> TextTable:
    table = _table("passes over memory", names("kind"), numbers("from", "", "to", ""))
    for each in rates.passes:
        (least, slow), (most, fast) = each.rates[0], each.rates[-1]
        ends = units.size(least), with_prefix(slow, "B/s"), units.size(most), with_prefix(fast, "B/s")
        table.add(each.kind, *(ends if least < most else ("", "", "any size", ends[1])), *_end(each, sources))
    return table


def _collectives(rates: "Sustained", sources: Sources) -> TextTable:
    figures = numbers("devices", "at least", "half at", "at most")
    table = _table("collectives", names("kind", "link"), figures)
    for each in rates.collectives:
        floor, half, bus = units.seconds(each.floor_s), units.size(each.half_bytes), each.bus_bytes_per_s
        table.add(each.kind, each.link, str(each.devices), floor, half, with_prefix(bus, "B/s"), *_end(each, sources))
    for each in rates.links:
        half, share = units.size(each.half_bytes), f"{each.share:.0%} of the link"
        table.add("any", each.link, "any", "", half, share, *_end(each, sources))
    return table


def _launches(rates: "Sustained", sources: Sources) -> TextTable:
    table = _table("launches", names("of"), numbers("time"))
    words = {
        "kernel_s": "a kernel of a program or graph",
        "eager_s": "an operation started by itself",
        "step_s": "a program",
        "token_s": "a step of decoding, on the host",
    }
    for each in rates.launches:
        for name, what in words.items():
            if (value := getattr(each, name)) is not None:
                table.add(what, units.seconds(value), *_end(each, sources))
    return table


def _end(rate: Any, sources: Sources) -> tuple[str, str]:
    """Return the last cells of a row: the spread and the source."""
    derived = "*" if rate.derived else ""
    return f"{rate.spread:.0%}", sources.number(rate.source) + derived
