"""The pattern of [model] for layers that differ, of what several keys of a config.json say of each layer."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from jaxlm.core.schema import merged

# The key under which a composite returns what it says of each layer, in place of a key of [model].
LAYERS = "layers"
NamedPatch = tuple[str, Mapping[str, Any]]  # a name for such layers, and the keys of a block that they change


def pattern(lists: Sequence[Sequence[NamedPatch]]) -> dict[str, Any]:
    """Return the keys of [model] for layers with these patches, the shortest pattern; none where no layer has one.

    Args:
      lists: a patch for each layer in each, which change different keys. The names of those that change any are joined.
    """
    changing = [each for each in lists if any(patch for _, patch in each)]
    if not changing:
        return {}
    whole = [_together(each) for each in zip(*changing, strict=True)]
    period = next(n for n in range(1, len(whole) + 1) if all(whole[i] == whole[i % n] for i in range(len(whole))))
    entries, seen = [], Counter[str]()
    for (name, patch), run in groupby(whole[:period]):
        seen[name] += 1
        number = str(seen[name]) if seen[name] > 1 else ""
        entries.append({"name": name + number, LAYERS: len(list(run)), **patch})
    return {"pattern": entries}


def _together(patches: Sequence[NamedPatch]) -> NamedPatch:
    whole: dict[str, Any] = {}
    for _, patch in patches:
        whole = merged(whole, patch)
    return "_".join(name for name, _ in patches), whole
