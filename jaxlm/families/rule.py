"""One line of a family's table of tensors."""

from dataclasses import dataclass

from jaxlm.families.pattern import Pattern


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
