"""The base of every section of a configuration, how one key may hold one of several, and where two of them differ.
Imports no JAX."""

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

_SMALLEST, _LARGEST = 2.0**-126, 2.0**128 - 2.0**104  # normal numbers of float32


def _held(value: float) -> float:
    if value and not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"{value!r} is no number that float32 holds; give one from 1.2e-38 to 3.4e38")
    return value


def _below_one(value: float) -> float:
    if value >= 1 - 2.0**-25:
        raise ValueError(f"{value!r} is 1 in float32; give at most 0.9999999")
    return value


Count = Annotated[int, Field(gt=0, lt=2**31)]  # up to what int32 holds, in which JAX counts
CountFromZero = Annotated[int, Field(ge=0, lt=2**31)]
# What JAX computes with, in float32.
Positive = Annotated[float, Field(gt=0.0), AfterValidator(_held)]
NonNegative = Annotated[float, Field(ge=0.0), AfterValidator(_held)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0), AfterValidator(_below_one)]


class Section(BaseModel):
    """A table of an experiment's TOML file: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, values: Any) -> Any:
        """Python counts with True as 1, and pydantic lets it: as a word it is refused."""
        if not isinstance(values, dict):
            return values
        kinds = {name: _types_in(field.annotation) for name, field in cls.model_fields.items()}
        numbers = {name for name, types in kinds.items() if types & {int, float} and bool not in types}
        return {
            name: str(value).lower() if isinstance(value, bool) and name in numbers else value
            for name, value in values.items()
        }


def one_of(*sections: type[Section]) -> Any:
    """The type of a key whose table is one of these sections, as its `kind` says; the first where it says nothing."""
    default = kind_of(sections[0])

    def choose(value: Any) -> str:
        given = value.get("kind", default) if isinstance(value, dict) else getattr(value, "kind", default)
        return given if isinstance(given, str) else repr(given)

    tagged = [Annotated[section, Tag(kind_of(section))] for section in sections]
    return Annotated[functools.reduce(operator.or_, tagged), Discriminator(choose)]


def _types_in(annotation: Any) -> set[Any]:
    """All that an annotation is made of."""
    return {annotation}.union(*map(_types_in, get_args(annotation)))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A table with changes: those of a table inside it key by key, but for one that names another `kind`, which has
    other keys and takes its place."""
    result = dict(base)
    for key, value in changes.items():
        before = base.get(key)
        both = isinstance(value, dict) and isinstance(before, dict)
        other_kind = both and "kind" in before and value.get("kind", before["kind"]) != before["kind"]
        result[key] = merged(before, value) if both and not other_kind else value
    return result


def kind_of(section: type[Section]) -> str | None:
    """The `kind` by which a section is chosen; None where it is no choice."""
    field = section.model_fields.get("kind")
    return field.default if field else None


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """The sections that a key of this type may hold, in the order in which they are written."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from sections_in(get_args(annotation)[0])
    else:
        for inner in get_args(annotation):
            yield from sections_in(inner)


def sections_at(key: str, whole: type[Section]) -> list[type[Section]]:
    """Every section that a dotted key of a whole one may hold, of whatever kind."""
    sections: list[type[Section]] = [whole]
    for part in key.split(".") if key else ():
        fields = [s.model_fields[part] for s in sections if part in s.model_fields]
        sections = [inner for field in fields for inner in sections_in(field.annotation)]
    return list(dict.fromkeys(sections))


def chosen(annotation: Any, values: Any) -> tuple[type[Section], ...]:
    """Those of `sections_in` that the `kind` of a table chooses; all of them where it is none of theirs."""
    sections = tuple(sections_in(annotation))
    given = values.get("kind", kind_of(sections[0])) if sections and isinstance(values, dict) else None
    return tuple(section for section in sections if given is not None and kind_of(section) == given) or sections


def changed(key: str, before: Any, now: Any) -> str | None:
    """The first value under a key that is another now, such as "model.num_layers = 2, not 3"; None where none is."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(before.keys() | now.keys(), key=lambda name: (name != "kind", name))  # it decides the others
        under = ((f"{key}.{name}".removeprefix("."), before.get(name), now.get(name)) for name in names)
        return next(filter(None, (changed(*each) for each in under)), None)
    return None if before == now else f"{key} = {before}, not {now}"
