"""Keys of a published config.json that describe Mamba-2 together, both ways."""

import math
from collections.abc import Mapping
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.families.family import Family
from jaxlm.models.config import ModelConfig
from jaxlm.models.recurrent_config import Mamba2Config

_UNLIMITED = (0.0, math.inf)
_LIMITS = "time_step_limit"


class StateSpaceHeads:
    """Mamba-2 gives the channels of all heads as a multiple of the stream's too, which is a whole number."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        width, attention = values["d_model"], values["attention"]
        channels = attention["num_heads"] * attention["head_dim"]
        for key, value in (("expand", channels / width), ("intermediate_size", channels)):
            if (found := entries.pop(key, None)) not in (None, value):
                raise InputError(
                    f"{where}: {key} = {found!r}, and with the file's other keys it can be {value:g} alone"
                )
        return {}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        channels = model.attention.num_heads * model.attention.head_dim
        if channels % model.d_model:
            raise InputError(f"{family.name} has heads whose channels are together a multiple of d_model")
        return {"expand": channels // model.d_model}


class TimeLimits:
    """Mamba-2 limits its time steps between two numbers, from 0 to infinity where it has no limits."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {"attention": {"time_limits": time_limits(entries.pop(_LIMITS, None), where)}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        return {_LIMITS: written_limits(model.attention)}


def time_limits(found: Any, where: str) -> tuple[float, float] | None:
    """Return the limits of time steps that a config.json gives, None for none. Raises InputError for what is no pair of
    numbers."""
    limits = _UNLIMITED if found is None else tuple(map(_number, found)) if isinstance(found, list | tuple) else ()
    if len(limits) != 2 or None in limits:
        raise InputError(f"{where}: {_LIMITS} = {found!r}; it must be a list of the least and the greatest time step")
    return None if limits == _UNLIMITED else limits


def written_limits(settings: Mamba2Config) -> list[float]:
    """Return the limits of time steps as config.json has them."""
    return list(settings.time_limits or _UNLIMITED)


def _number(value: Any) -> float | None:
    """Return a number, which transformers 5 writes as a table if JSON has no name for it; None for what is none."""
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:
        value = {"Infinity": math.inf}.get(value["__float__"])
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
