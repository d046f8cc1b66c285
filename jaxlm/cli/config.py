"""Look up the keys of a configuration file: their types, defaults and meanings; or list jaxlm's configurations."""

import argparse
import difflib
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxlm.cli.tables import TextTable, names, numbers, texts
from jaxlm.core.errors import InputError
from jaxlm.core.moved_keys import RENAMED

if TYPE_CHECKING:
    from jaxlm.core.reference import KeyTable

_MEANING = 32  # cells: a narrower column is hard to read
_HEAD = """# Every key of a configuration file

Made by `jaxlm config --markdown`. A table stands once for each `kind` that selects its keys, the default one first.
Any key can be set from the command line too, as in `jaxlm train CONFIG training.batch=32`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", nargs="?", metavar="KEY", help="a key or a table, such as execution.remat or optimizer")
    parser.add_argument("--markdown", action="store_true", help="print Markdown (docs/reference.md)")
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the configurations that come with jaxlm; train, plan and compile take their names as CONFIG, and "
        "model.base does too",
    )

    parser.add_argument(
        "--example", action="store_true", help="print a whole configuration with comments, to save and train"
    )


def main(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, name) for name in ("list", "example", "markdown", "key")}
    asked = ["KEY" if name == "key" else f"--{name}" for name, value in given.items() if value]
    if (arguments.list or arguments.example) and len(asked) > 1:
        raise InputError(f"{asked[0]} stands alone: leave out {' and '.join(asked[1:])}")
    if arguments.list:
        _list(arguments)
        return 0
    if arguments.example:
        _example(arguments)
        return 0
    from jaxlm.config.experiment import Experiment
    from jaxlm.core import plugins
    from jaxlm.core.reference import tables

    plugins.load_installed()

    key_tables = [table for table in tables(Experiment) if table.keys]
    if arguments.key is not None:
        key_tables = _named(key_tables, arguments.key)
    if arguments.json:
        keys = dict.fromkeys(key for table in key_tables for key in table.keys)
        print(json.dumps({"keys": [key._asdict() for key in keys]}))
    elif arguments.markdown:
        print("\n".join(_markdown(key_tables)))
    else:
        _show(key_tables)
    return 0


def _example(arguments: argparse.Namespace) -> None:
    from jaxlm.core import bundled

    example = bundled.configurations()["example"].read_text(encoding="utf-8")
    print(json.dumps({"example": example}) if arguments.json else example, end="" if not arguments.json else "\n")


def _list(arguments: argparse.Namespace) -> None:
    from jaxlm.config import load
    from jaxlm.core import bundled
    from jaxlm.models.tree import parameter_count

    rows = [
        {
            "name": name,
            "kind": "experiment" if file.parent == bundled.FOLDER else "model",
            "parameters": parameter_count(load(file).model),
            "file": str(file),
        }
        for name, file in bundled.configurations().items()
    ]
    if arguments.json:
        print(json.dumps({"configurations": rows}))
        return
    table = TextTable([*names("name", "kind"), *numbers("parameters")])
    for row in rows:
        table.add(row["name"], row["kind"], f"{row['parameters']:,}")
    table.print()
    print(f"files in {bundled.FOLDER}")


def _named(key_tables: "list[KeyTable]", name: str) -> "list[KeyTable]":
    """Return the tables at and under a dotted name, and those with its key, with that key alone."""
    segments = re.sub(r"\[\d*\]", "", name).split(".")

    def under(key: str) -> bool:
        parts = key.replace("[]", "").split(".")
        return len(parts) >= len(segments) and all(p in (a, "NAME") for p, a in zip(parts, segments, strict=False))

    named = [t if under(t.name) else t._replace(keys=[key for key in t.keys if under(key.key)]) for t in key_tables]
    if named := [table for table in named if table.keys]:
        return named
    known = {key.key for table in key_tables for key in table.keys} | {table.name for table in key_tables}
    last = [key for key in known if key.rpartition(".")[2] == segments[-1]]
    near = difflib.get_close_matches(name, known, 1, 0.8) or sorted(last) or difflib.get_close_matches(name, known, 1)
    if name in RENAMED:
        raise InputError(f"{name} is now {RENAMED[name]}")
    hint = f"did you mean {' or '.join(near)}?" if near else "jaxlm config lists them"
    raise InputError(f"there is no key {name}; {hint}")


def _title(table: "KeyTable") -> str:
    if not table.name:
        return "At the top of the file"
    listed = table.name.endswith("[]")
    name = f"[[{table.name.removesuffix('[]')}]]" if listed else f"[{table.name}]"
    if table.kind is None and table.within is not None:
        return f'{name} within kind = "{table.within}"'
    return f'{name} kind = "{table.kind}"' if table.kind else name


def _show(key_tables: "list[KeyTable]") -> None:
    for i, table in enumerate(key_tables):
        about, rows = (
            TextTable(texts(""), _title(table)),
            TextTable([*names("key"), *texts("type", "default"), *texts("meaning", least=_MEANING, under="key")]),
        )
        about.add(table.about)
        for key in table.keys:
            rows.add(key.key.rpartition(".")[2], key.type, key.default, key.meaning)
        print("\n" * (i > 0), end="")
        about.print()
        rows.print()


def _markdown(key_tables: "list[KeyTable]") -> Iterator[str]:
    yield _HEAD
    for table in key_tables:
        yield f"## {_title(table)}\n\n{table.about}\n\n| key | type | default | meaning |\n| --- | --- | --- | --- |"
        for key in table.keys:
            if key.key.endswith(".kind") and "kind =" in _title(table):  # which the title has
                continue
            cells = (f"`{key.key.rpartition('.')[2]}`", key.type, key.default, key.meaning)
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        yield ""
