"""A chip with other figures than the catalog's: as a user gives them, or as a published case has them."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from jaxlm.core.errors import InputError
from jaxlm.core.explain import message_of
from jaxlm.core.schema import leaves, merged, sections_in
from jaxlm.costs.hardware.chips import DTYPES, NO_FIGURES, Chip

# The source of changed figures.
GIVEN = "given"

# Figures that follow from another one unless they are given too.
_FOLLOWING = {
    "memory_bytes": ("device_memory_bytes",),
    "link.links": ("link.bytes_per_s",),
    "link.link_bytes_per_s": ("link.bytes_per_s",),
}


def with_figures(chip: Chip, changes: Mapping[str, Any]) -> Chip:
    """Return a chip with changed figures, whose source is "given".

    Args:
      changes: figures by their names in the catalog, nested or with dots, such as {"memory_bytes_per_s": 2.4e12,
        "link.domain": 4}; `usd_per_hour` may be one price.

    Raises InputError for a key that is no figure, naming the nearest, and for a value that is none.
    """
    flat = dict(leaves(changes))
    known = list(figure_names())
    for name in flat:
        if name not in known:
            raise InputError(f"{name!r} is no figure of a chip; {_nearest(name, known)}")
    follows = {name: None for changed in flat for name in _FOLLOWING.get(changed, ()) if name not in flat}
    if isinstance(price := flat.get("usd_per_hour"), int | float):
        flat["usd_per_hour"] = (price, price)
    sources = {source: tuple(each for each in backed if each not in flat) for source, backed in chip.sources.items()}
    sources[GIVEN] = tuple(dict.fromkeys((*sources.get(GIVEN, ()), *flat)))
    values = merged(chip.model_dump(exclude_none=True), _nested({**follows, **flat}))
    values["sources"] = {source: backed for source, backed in sources.items() if backed}
    if link := values.get("link"):
        values["link"] = {key: value for key, value in link.items() if value is not None}
    try:
        return Chip.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
        raise InputError(f"{name} of {chip.id}: {message_of(first)}, not {flat.get(name, 'absent')!r}") from None


def _nearest(name: str, known: list[str]) -> str:
    """Return the figure whose name, or whose name within its table, is the nearest, as a question."""
    endings = {each.rpartition(".")[2]: each for each in reversed(known)}
    if near := difflib.get_close_matches(name, known, 1):
        return f"did you mean {near[0]}?"
    if near := difflib.get_close_matches(name, endings, 1):
        return f"did you mean {endings[near[0]]}?"
    return "there are memory_bytes_per_s, scale_out_bytes_per_s, link.bytes_per_s, watts, usd_per_hour and others"


def given_figures(chip: Chip) -> dict[str, Any]:
    """Return the figures of a chip that are not its catalog's, by their names with dots."""
    figures = chip.figures()
    return {name: figures[name] for name in chip.sources.get(GIVEN, ())}


def figure_names() -> Iterator[str]:
    """Yield the names of all figures that a chip may have."""
    for name, field in Chip.model_fields.items():
        if name in NO_FIGURES:
            continue
        inner = [key for section in sections_in(field.annotation) for key in section.model_fields]
        keys = DTYPES if name == "peak_flops" else inner
        yield from (f"{name}.{key}" for key in keys) if keys else (name,)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in flat.items():
        *tables, key = name.split(".")
        table = values
        for each in tables:
            table = table.setdefault(each, {})
        table[key] = value
    return values
