"""Compare runs: the keys that differ, and their losses at equal steps and tokens."""

import argparse
import json
from string import ascii_uppercase
from typing import TYPE_CHECKING

from jaxlm import api
from jaxlm.cli.paths import location, path
from jaxlm.cli.tables import TextTable, numbers, print_sentence, texts
from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    from jaxlm.runs.comparison import LossesAt

_VALUE = 14  # cells for the value of a key at least


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
    letters = ascii_uppercase[: len(comparison.runs)]
    keys = TextTable([*texts("key"), *texts(*letters, least=_VALUE)], repeats=True)
    for key, values in comparison.keys.items():
        keys.add(key, *map(_shown, values))
    print()
    if keys.filled:
        keys.print()
    else:
        print("no key differs")
    if comparison.unmeasured:
        has = "has" if len(comparison.unmeasured) == 1 else "have"
        print_sentence(f"no losses are compared: {', '.join(comparison.unmeasured)} {has} none on record")
        return 0
    for name, losses in (("training", comparison.training), ("held-out", comparison.held_out)):
        _show(f"{name} loss at equal steps", "step", losses.steps, letters)
        if [row.losses for row in losses.tokens] != [row.losses for row in losses.steps]:
            _show(f"{name} loss at equal tokens", "tokens", losses.tokens, letters)
    return 0


def _show(title: str, scale: str, rows: "list[LossesAt]", letters: str) -> None:
    print()
    if not rows:
        print(f"{title}: no {scale} has one in every run")
        return
    table = TextTable(numbers(scale, *letters), title, repeats=True)
    for row in rows:
        table.add(f"{row.at:,}", *(f"{loss:.4f}" for loss in row.losses))
    table.print()


def _shown(value: object) -> str:
    return "–" if value is None else json.dumps(value, ensure_ascii=False)
