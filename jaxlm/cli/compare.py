"""Compare runs: the keys that differ, and their losses at equal steps and tokens."""

import argparse
import json
from string import ascii_uppercase
from typing import TYPE_CHECKING

from jaxlm import api
from jaxlm.cli.paths import location, path
from jaxlm.cli.tables import TextTable, numbers
from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    from jaxlm.runs.comparison import LossesAt

_COLUMNS = 6  # of losses in a table, which 80 characters hold


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=location, metavar="RUN", help="folders of two or more runs")
    parser.add_argument("--png", type=path, metavar="PATH", help="draw the losses of all runs into one picture")


def main(arguments: argparse.Namespace) -> int:
    if not 2 <= len(arguments.runs) <= len(ascii_uppercase):
        raise InputError(f"compare takes 2 to {len(ascii_uppercase)} runs, not {len(arguments.runs)}")
    comparison = api.compare(arguments.runs, arguments.png)
    if arguments.json:
        losses = {
            name: {scale: [row._asdict() for row in rows] for scale, rows in each._asdict().items()}
            for name, each in (("training", comparison.training), ("held_out", comparison.held_out))
        }
        print(json.dumps({**comparison._asdict(), **losses}))
        return 0
    for letter, run in zip(ascii_uppercase, comparison.runs, strict=False):
        print(letter, run)
    for key, values in comparison.keys.items():
        print(f"{key}: {', '.join(f'{a} {_shown(value)}' for a, value in zip(ascii_uppercase, values, strict=False))}")
    if not comparison.keys:
        print("no key differs")
    if comparison.unmeasured:
        has = "has" if len(comparison.unmeasured) == 1 else "have"
        print(f"no losses are compared: {', '.join(comparison.unmeasured)} {has} none on record")
        return 0
    for name, losses in (("training", comparison.training), ("held-out", comparison.held_out)):
        _show(f"{name} loss at equal steps", "step", losses.steps, len(comparison.runs))
        if [row.losses for row in losses.tokens] != [row.losses for row in losses.steps]:
            _show(f"{name} loss at equal tokens", "tokens", losses.tokens, len(comparison.runs))
    return 0


def _show(title: str, scale: str, rows: "list[LossesAt]", runs: int) -> None:
    print(f"{title}:" if rows else f"{title}: no {scale} has one in every run")
    for first in range(0, runs if rows else 0, _COLUMNS):
        shown = slice(first, first + _COLUMNS)
        table = TextTable(numbers(scale, *ascii_uppercase[:runs][shown]))
        for row in rows:
            table.add(f"{row.at:,}", *(f"{loss:.4f}" for loss in row.losses[shown]))
        table.print()


def _shown(value: object) -> str:
    return "–" if value is None else json.dumps(value, ensure_ascii=False)
