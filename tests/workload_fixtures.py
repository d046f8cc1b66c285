"""Workloads of a few settings, in the sections that hold them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import model_fixtures

from jaxlm.costs.workload import Workload
from jaxlm.models.execution_config import ExecutionConfig
from jaxlm.training.config import ParameterGroupConfig, TrainingConfig

_EXECUTION = ExecutionConfig.model_fields.keys()


def workload(kind: str, model: Any, batch: int, sequence: int, dtype: str = "bfloat16", **changes: Any) -> Workload:
    """Return a step on one device with AdamW and no rematerialisation, with `changes` as in `changed`."""
    execution, optimizer = ExecutionConfig(dtype=dtype), model_fixtures.optimization()
    return changed(Workload(kind, model, batch, sequence, execution, optimizer=optimizer), **changes)


def changed(work: Workload, **changes: Any) -> Workload:
    """Return the workload with other fields, keys of [execution], kind of `optimizer`, or paths that are `frozen`."""
    if isinstance(kind := changes.pop("optimizer", None), str):
        work = replace(work, optimizer=model_fixtures.optimization(kind=kind))
    if "frozen" in changes:
        work = replace(work, optimizer=_frozen(work.optimizer, changes.pop("frozen")))
    if execution := {name: changes.pop(name) for name in changes.keys() & _EXECUTION}:
        work = work.with_execution(**execution)
    return replace(work, **changes)


def sections_of(work: Workload) -> tuple[ExecutionConfig, TrainingConfig]:
    """Return how a step is executed and what it trains."""
    training = TrainingConfig(
        batch=work.batch,
        sequence=work.sequence,
        microbatches=work.microbatches,
        steps=work.steps,
        dropout=0.1 * work.dropout,
        ema_decay=0.99 if work.average else None,
    )
    return work.execution, training


def _frozen(optimizer: Any, paths: Iterable[str]) -> Any:
    groups = tuple(ParameterGroupConfig(pattern=path, learning_rate_scale=0.0) for path in sorted(paths))
    return optimizer.model_copy(update={"groups": groups})
