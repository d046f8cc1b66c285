"""Matrices of test cases, of which a sample always runs.

A sample has every kernel, chip family, kind of mask, model family, optimizer and mesh axis at least once, in some test.
`pytest -m exhaustive` runs the other cases.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

_Param = type(pytest.param())


def sampled(cases: Iterable[Any], keep: Collection[str] | Callable[..., bool]) -> list[Any]:
    """Return all cases as `pytest.param`s; those outside the sample carry the marker `exhaustive`.

    `pytest` runs the sample and `pytest -m exhaustive` the other cases, so both together run the whole matrix.

    Args:
      cases: values of one argument, or `pytest.param`s of several.
      keep: the sample: either the ids of its cases (for a value without an id, its string; for several, joined by "-"),
        or a predicate of a case's values.

    Raises ValueError if the sample is empty or no case has an id in it, as after a case is renamed.
    """
    params = [case if isinstance(case, _Param) else pytest.param(case) for case in cases]
    names = [param.id or "-".join(map(str, param.values)) for param in params]
    if callable(keep):
        kept = {name for name, param in zip(names, params, strict=True) if keep(*param.values)}
    else:
        kept = set(keep)
    if not kept:
        raise ValueError("the sample is empty")
    if missing := kept - set(names):
        raise ValueError(f"the sample names cases that do not exist: {sorted(missing)}")
    return [
        param
        if name in kept
        else pytest.param(*param.values, id=param.id, marks=[*param.marks, pytest.mark.exhaustive])
        for name, param in zip(names, params, strict=True)
    ]
