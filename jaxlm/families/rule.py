"""One line of a family's table of tensors."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from jaxlm.core.schema import kind_of
from jaxlm.families.pattern import Pattern
from jaxlm.models.block_config import ATTENTIONS


@dataclass(frozen=True)
class TensorRule:
    """One line of a family: the name of a tensor, with {l} for the number of a layer and {e} for that of an expert, the
    paths of the arrays that the tensor holds, and the pattern between tensor and arrays; None if the tensor is the
    array."""

    name: str
    paths: tuple[str, ...]
    pattern: Pattern | None

    @classmethod
    def parse(cls, name: str, line: str) -> "TensorRule":
        """Read `"path, path : pattern"`. Raises ValueError for any other line."""
        paths, _, pattern = line.partition(":")
        rule = cls(name, tuple(path.strip() for path in paths.split(",")), Pattern(pattern) if pattern else None)
        if len(rule.paths) != (1 if rule.pattern is None else len(rule.pattern.outputs)):
            raise ValueError(f"{name}: {len(rule.paths)} paths and another number of outputs")
        return rule

    def replaces(self, other: "TensorRule") -> bool:
        """Return whether this rule, of no expert by itself, is of an array that another rule is of too: a rule of one
        expert, or one that has the array's axes. A dense layer's array may have the path of an array of experts."""
        if set(self.paths).isdisjoint(other.paths):
            return False
        ranks = [rule.pattern and rule.pattern.rank for rule in (self, other)]
        return "{e}" in other.name or ranks[0] == ranks[1]


def part_of(path: str) -> str | None:
    """Return the part of a layer that a path names; None for an array of no layer."""
    stack, _, rest = path.partition("/")
    return rest.partition("/")[0] if stack == "layers" else None


def named_kinds(rules: Iterable[TensorRule]) -> set[str]:
    """Return the kinds of attention that paths name in place of `attention`."""
    return {part_of(path) for rule in rules for path in rule.paths} & {kind_of(section) for section in ATTENTIONS}


def matching(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    """Return the names that match a pattern, in which {l} and {e} stand for numbers."""
    known = [re.compile(re.sub(r"\\\{[le]\\\}", r"\\d+", re.escape(pattern)) + "$") for pattern in patterns]
    return [name for name in names if any(pattern.match(name) for pattern in known)]
