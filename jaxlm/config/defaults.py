"""Defaults of one section that follow from another."""

from typing import Any

from pydantic import ValidationError

from jaxlm.config.experiment import Experiment
from jaxlm.config.step_sizes import SIZE_KEYS
from jaxlm.core.moved_keys import with_present_keys
from jaxlm.core.schema import Section, chosen
from jaxlm.training.config import DEFAULT_STEPS, OptimizerConfig

# Tokens per row where nothing says how many, of a model whose context is longer.
DEFAULT_SEQUENCE = 8192


def fill_defaults(values: dict[str, Any]) -> set[str]:
    """Fill in the defaults of one section that come from another, and return their keys."""
    filled = set()
    for section in ("model", "training", "optimizer", "inference"):
        values.setdefault(section, {})
    if _has_preferences(values.get("data")):
        values.setdefault("dpo", {})
    model, training, optimizer = values.get("model"), values["training"], values["optimizer"]
    if isinstance(model, dict) and "context_length" in model:
        length = model["context_length"]
        for _, key in SIZE_KEYS.values():
            section, _, name = key.partition(".")
            if isinstance(values[section], dict) and name not in values[section]:
                longest = length, values[section].get("context")  # of the model; of the engine, in [inference]
                limits = [limit for limit in longest if isinstance(limit, int)]
                values[section][name] = min(*limits, DEFAULT_SEQUENCE) if limits else length
                filled.add(key)
    if isinstance(optimizer, dict):
        schedule = optimizer.setdefault("schedule", {})
        # A constant schedule, or one that is not known, does not decay.
        decays = isinstance(schedule, dict) and all("decay_steps" in s.model_fields for s in _schedules(schedule))
        if decays and isinstance(training, dict):
            steps = training.get("steps", DEFAULT_STEPS if training.get("epochs") is None else None)
            if "decay_steps" not in schedule and steps is not None:
                schedule["decay_steps"] = steps
                filled.add("optimizer.schedule.decay_steps")
    return filled


def resolved(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration that a run recorded, maybe of an earlier version, as one of today's would record it; as
    it is where today's cannot read it."""
    values = with_present_keys(recorded)
    fill_defaults(values)
    try:
        return Experiment.model_validate(values).model_dump(mode="json")
    except ValidationError:
        return recorded


def _has_preferences(data: Any) -> bool:
    sources = data.get("sources") if isinstance(data, dict) else None
    given = [data, *(sources.values() if isinstance(sources, dict) else ())]
    return any(isinstance(table, dict) and table.get("preferences") is not None for table in given)


def _schedules(schedule: dict[str, Any]) -> tuple[type[Section], ...]:
    return chosen(OptimizerConfig.model_fields["schedule"].annotation, schedule)
