"""The catalog of chips. Imports no JAX.

`vendors/` holds the figures with their sources, a file per vendor and in it a table per chip as it is sold;
`chips.Chip` says what every key means. Peaks are dense, never those of structured sparsity, and rates of links are
one-way. What nobody publishes is left out. `[CHIP.sources]` names the figures that each source backs:
`github:OWNER/NAME:PATH` is a file of a public repository, `derived: …` follows from other figures. Where sources
disagree, `notes` says which was taken and why. "host" is this machine, as `calibration.measure` found it.
"""

import difflib
import functools
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from pydantic import ValidationError

from jaxlm.core import plugins
from jaxlm.core.errors import InputError
from jaxlm.core.explain import message_of
from jaxlm.costs.hardware import calibration
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.hardware.sustained import sustained_rates

HOST = calibration.HOST


_registered: dict[str, Chip] = {}


def catalog() -> dict[str, Chip]:
    """Return every chip with published figures by id, in the order of the files, and those that were registered. Raises
    InputError for a missing or wrong figure."""
    plugins.load_installed()
    return {**_published(), **_registered}


@functools.cache
def _published() -> dict[str, Chip]:
    files = (resources.files("jaxlm.costs.hardware") / "vendors").iterdir()
    return {
        id: _chip(id, {"sustained": sustained_rates().get(id, {}), **figures}, f"vendors/{file.name}")
        for file in sorted(files, key=lambda file: file.name)
        for id, figures in tomllib.loads(file.read_text(encoding="utf-8")).items()
    }


def register(id: str, figures: Mapping[str, Any]) -> None:
    """Add a chip to the catalog.

    Args:
      id: as `--on` names it.
      figures: a table as in vendors/*.toml (`chips.Chip`), with the `sources` of its figures.

    Raises InputError for a missing or wrong figure, and ValueError where another chip has the id.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", id):
        raise ValueError(f"{id!r} is no id of a chip; write small letters, digits, '-', '_' and '.'")
    if id == HOST or any(id in (chip.id, *chip.aliases) for chip in _published().values()):
        raise ValueError(f"{id!r} is another chip of the catalog; give this one another id")
    _registered[id] = _chip(id, figures, "a registered chip")


def unregister(id: str) -> None:
    """Take a chip out that was registered."""
    del _registered[id]


def _chip(id: str, figures: Mapping[str, Any], file: str) -> Chip:
    try:
        return Chip(id=id, **figures)
    except ValidationError as error:
        unknown = [each for each in error.errors() if each["type"] == "extra_forbidden"]
        first = (unknown or error.errors())[0]
        key = ".".join(map(str, first["loc"]))
        near = difflib.get_close_matches(key, Chip.model_fields, 1) if unknown else []
        line = f"unknown key{f'; did you mean {near[0]}?' if near else ''}" if unknown else message_of(first)
        raise InputError(f"{file}, [{id}]{key and f' {key}'}: {line}") from None


def find(id: str) -> Chip:
    """Return the chip with an id or an alias, in letters of any case; "host" is this machine. Raises InputError, which
    names the nearest or says how to calibrate."""
    name = id.lower()
    if name == HOST:
        return calibration.load()
    names = {alias: chip for chip in catalog().values() for alias in (chip.id, *chip.aliases)}
    if name not in names:
        known = [*catalog(), HOST]
        near = [other for other in names if other[:1] == name[:1]]  # of the same letter before others
        near = difflib.get_close_matches(name, near, 1, 0.4) or difflib.get_close_matches(name, known, 1, 0.5)
        near = near or [other for other in names if id and name in other][:1]
        meant = [names[other].id if other in names else other for other in near]
        raise InputError(
            f"there is no chip {id!r}; " + (f"did you mean {meant[0]}?" if meant else "jaxlm hardware lists them")
        )
    return names[name]


def of_kind(kind: str) -> Chip | None:
    """Return the chip of the catalog whose JAX device kind is `kind`, or None."""
    return next((chip for chip in catalog().values() if kind in chip.device_kinds), None)
