"""The base class of configuration sections, sections chosen by `kind`, merging and comparison. Imports no JAX."""

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple, Optional, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

_SMALLEST, _LARGEST = 2.0**-126, 2.0**128 - 2.0**104  # normal numbers of float32


def _in_float32(value: float) -> float:
    if value and not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"{value!r} is not a number that float32 holds; give one from 1.2e-38 to 3.4e38")
    return value


def _below_one(value: float) -> float:
    if value >= 1 - 2.0**-25:
        raise ValueError(f"{value!r} is 1 in float32; give at most 0.9999999")
    return value


NONE = "none"  # the value, in a file or on a command line, of a key that is not set
COUNT = "[1-9][0-9]{0,5}"  # a pattern for numbers of chips or devices in an option of a command
Count = Annotated[int, Field(gt=0, lt=2**31)]  # fits in int32, in which JAX counts
CountFromZero = Annotated[int, Field(ge=0, lt=2**31)]
# Numbers that JAX computes with, in float32.
Positive = Annotated[float, Field(gt=0.0), AfterValidator(_in_float32)]
NonNegative = Annotated[float, Field(ge=0.0), AfterValidator(_in_float32)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0), AfterValidator(_below_one)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0), AfterValidator(_in_float32)]


@dataclass(frozen=True)
class InWords:
    """In the annotation of a key: its default, which follows from other keys, or its type, for `jaxlm config`."""

    default: str | None = None
    type: str | None = None


class Section(BaseModel):
    """A table of an experiment's TOML file. It is immutable; unknown keys are errors.

    The docstring below a key is its meaning, which `jaxlm config` reads (`jaxlm.core.reference`).
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, values: Any) -> Any:
        """Turn booleans in number fields into words, which are refused; pydantic would accept True as 1."""
        if not isinstance(values, dict):
            return values
        booleans = [name for name, value in values.items() if isinstance(value, bool)]
        kinds = {name: types_in(cls.model_fields[name].annotation) for name in booleans if name in cls.model_fields}
        numbers = {name for name, types in kinds.items() if types & {int, float} and bool not in types}
        return {**values, **{name: str(values[name]).lower() for name in numbers}}

    def __hash__(self) -> int:
        return self.hash_of_values

    @cached_property
    def hash_of_values(self) -> int:
        """The hash of all values, tables among them, computed once: counting looks up many results by a section."""
        values = self.__dict__
        return hash(tuple(_hashable(values[name]) for name in type(self).model_fields))

    def __copy__(self) -> Self:
        """Leave out what cached properties hold: a copy is made to have other values."""
        copied = super().__copy__()
        object.__setattr__(copied, "__dict__", self._values())
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        """Leave out what cached properties hold: hashes of texts differ between processes."""
        return {**super().__getstate__(), "__dict__": self._values()}

    def _values(self) -> dict[str, Any]:
        """Return the values by their keys."""
        return {name: value for name, value in self.__dict__.items() if name in type(self).model_fields}


def _hashable(value: Any) -> Any:
    return frozenset(value.items()) if isinstance(value, dict) else value


class Kinds:
    """The type of a key whose table is one of these sections, selected by `kind`; the first is the default.

    Others may be added after a section has a key of this type.
    """

    def __init__(self, *sections: type[Section]):
        self._sections = {kind_of(section): section for section in sections}

    def __iter__(self) -> Iterator[type[Section]]:
        return iter(tuple(self._sections.values()))

    def __or__(self, other: Any) -> Any:
        return Optional[self] if other is None else NotImplemented  # noqa: UP045, `|` is this method

    def add(self, section: type[Section]) -> None:
        """Add a section, in place of an earlier one of the same file and name, as where a module is imported again.

        Raises ValueError where it has no kind, or where another has its kind.
        """
        kind = kind_of(section)
        if not isinstance(kind, str):
            raise ValueError(f'{section.__name__} needs a kind: Literal["NAME"] = "NAME"')
        before = self._sections.get(kind, section)
        if _written_at(before) != _written_at(section):
            raise ValueError(f"kind = {kind!r} is {before.__name__}; {section.__name__} needs another")
        self._sections[kind] = section

    def remove(self, section: type[Section]) -> None:
        """Remove a section that was added."""
        del self._sections[kind_of(section)]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validated)

    def _validated(self, value: Any) -> Section:
        default = next(iter(self._sections))
        given = value.get("kind", default) if isinstance(value, dict) else getattr(value, "kind", default)
        section = self._sections.get(given) if isinstance(given, str) else None
        if section is None:
            tag, known = given if isinstance(given, str) else repr(given), ", ".join(map(repr, self._sections))
            raise PydanticKnownError("union_tag_invalid", {"discriminator": "kind", "tag": tag, "expected_tags": known})
        return section.model_validate(value)


def types_in(annotation: Any) -> set[Any]:
    """Return an annotation and all its type arguments, recursively."""
    return {annotation}.union(*map(types_in, get_args(annotation)))


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested tables."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with changes merged in, nested tables key by key.

    A nested table with another `kind` has other keys, and replaces the old one.
    """
    result = dict(base)
    for key, value in changes.items():
        before = base.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            other_kind = "kind" in before and value.get("kind", before["kind"]) != before["kind"]
            result[key] = value if other_kind else merged(before, value)
        else:
            result[key] = value
    return result


def table_at(key: str, values: Any) -> dict[str, Any]:
    """Return the table at a dotted key of nested tables; an empty one where there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def _written_at(section: type[Section]) -> tuple[str, str]:
    """Return the file of a section, or the name of its module where there is none, and its name there."""
    module = section.__module__
    return getattr(sys.modules.get(module), "__file__", None) or module, section.__qualname__


def kind_of(section: type[Section]) -> str | None:
    """Return the `kind` that selects a section; None if it has none."""
    field = section.model_fields.get("kind")
    return field.default if field else None


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """Yield the sections that a key of this type may hold, in the order of the annotation."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif isinstance(annotation, Kinds):
        yield from annotation
    elif get_origin(annotation) is Annotated:
        yield from sections_in(get_args(annotation)[0])
    else:
        for inner in get_args(annotation):
            yield from sections_in(inner)


def sections_at(key: str, whole: type[Section]) -> list[type[Section]]:
    """Return every section, of any kind, that a dotted key of the whole file may hold."""
    sections: list[type[Section]] = [whole]
    for part in key.split(".") if key else ():
        fields = [s.model_fields[part] for s in sections if part in s.model_fields]
        sections = [inner for field in fields for inner in sections_in(field.annotation)]
    return list(dict.fromkeys(sections))


def chosen(annotation: Any, values: Any) -> tuple[type[Section], ...]:
    """Return the `sections_in` an annotation that the `kind` of a table selects; all of them for an unknown kind."""
    sections = tuple(sections_in(annotation))
    given = values.get("kind", kind_of(sections[0])) if sections and isinstance(values, dict) else None
    return tuple(section for section in sections if given is not None and kind_of(section) == given) or sections


def without_none(table: Mapping[str, Any], sections: Iterable[type[Section]]) -> dict[str, Any]:
    """Return a table, of one of these sections, without keys that are "none", of those that may be left unset: TOML has
    no null. These are the keys whose default is no value, or follows from other keys. Tables inside too."""
    kept, sections = {}, tuple(sections)
    for key, value in table.items():
        fields = [section.model_fields[key] for section in sections if key in section.model_fields]
        if isinstance(value, str) and value == NONE and any(map(_may_be_unset, fields)):
            continue
        inner = dict.fromkeys(each for field in fields for each in chosen(field.annotation, value))
        if isinstance(value, dict) and any(get_origin(field.annotation) is dict for field in fields):
            value = {name: _inside(each, inner) for name, each in value.items()}
        elif isinstance(value, list):
            value = [_inside(each, inner) for each in value]
        kept[key] = _inside(value, inner)
    return kept


def _inside(value: Any, sections: Iterable[type[Section]]) -> Any:
    return without_none(value, sections) if isinstance(value, dict) else value


def _may_be_unset(field: FieldInfo) -> bool:
    types = types_in(field.annotation)
    follows = any(isinstance(each, InWords) and each.default for each in field.metadata)
    return NONE not in types and (type(None) in types or follows)


class Change(NamedTuple):
    """A key whose value changed. It reads "model.num_layers = 2, not 3"."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        before = f"no {self.key}" if self.before is None else f"{self.key} = {shown(self.before)}"
        return f"{before}, not {shown(self.now)}"


def shown(value: Any) -> str:
    """Return a value for a message as a configuration has it, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else textwrap.shorten(str(value), 80, placeholder=" …")


def changes(before: Any, now: Any, key: str = "") -> Iterator[Change]:
    """Yield the changed values of two tables. Of a table with another `kind`, which has other keys, only the kind."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        if before != now:
            yield Change(key, before, now)
        return
    names = ("kind",) if before.get("kind") != now.get("kind") else sorted(before.keys() | now.keys())
    for name in names:
        yield from changes(before.get(name), now.get(name), f"{key}.{name}".removeprefix("."))
