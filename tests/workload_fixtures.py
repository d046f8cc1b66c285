"""Workloads of a few settings, in the sections that hold them."""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import model_fixtures

from jaxlm.costs.workload import Workload
from jaxlm.training.config import ParameterGroupConfig, TrainingConfig

_OF_A_WORKLOAD = {field.name for field in fields(Workload)}


def workload(kind: str, model: Any, batch: int, sequence: int, dtype: str = "bfloat16", **changes: Any) -> Workload:
    """Return a step on one device with AdamW and no rematerialisation, with `changes` as in `changed`."""
    training = TrainingConfig(batch=batch, sequence=sequence, dtype=dtype, steps=1)
    return changed(Workload(kind, model, training, model_fixtures.optimization()), **changes)


def changed(work: Workload, **changes: Any) -> Workload:
    """Return the workload with other fields, keys of [training], kind of `optimizer`, or paths that are `frozen`."""
    if isinstance(kind := changes.pop("optimizer", None), str):
        work = replace(work, optimizer=model_fixtures.optimization(kind=kind))
    if "frozen" in changes:
        work = replace(work, optimizer=_frozen(work.optimizer, changes.pop("frozen")))
    whole = {name: changes.pop(name) for name in changes.keys() & _OF_A_WORKLOAD}
    assert changes.keys() <= TrainingConfig.model_fields.keys()
    return replace(work.with_training(**changes), **whole)


def _frozen(optimizer: Any, paths: Iterable[str]) -> Any:
    groups = tuple(ParameterGroupConfig(pattern=path, learning_rate_scale=0.0) for path in sorted(paths))
    return optimizer.model_copy(update={"groups": groups})
