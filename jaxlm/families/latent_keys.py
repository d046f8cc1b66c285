"""Keys of a published config.json that describe latent attention together, both ways."""

import math
from collections.abc import Mapping
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.families.family import Family
from jaxlm.models.config import ModelConfig


class LatentHeads:
    """DeepSeek gives as many key/value heads as heads, and the channels of a head in several ways."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        heads, nope_dim, rope_dim = _sizes(values, where)
        expected = {"num_key_value_heads": heads, "head_dim": rope_dim, "qk_head_dim": nope_dim + rope_dim}
        for key, value in expected.items():
            if (found := entries.pop(key, None)) not in (None, value):
                raise InputError(f"{where}: {key} = {found!r}, and with the file's other keys it can be {value} alone")
        return {}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        return {"num_key_value_heads": model.attention.num_heads}


class LatentScores:
    """DeepSeek multiplies scores by the square of YaRN's attention factor for the slope `mscale_all_dim`, by which it
    divides the factor of cos and sin."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        scaling = entries.get("rope_scaling") or entries.get("rope_parameters") or {}
        if not isinstance(scaling, Mapping):
            return {}  # refused where positions are read
        slope, factor = (scaling.get(key) for key in ("mscale_all_dim", "factor"))
        _, nope_dim, rope_dim = _sizes(values, where)
        scale = _scale(nope_dim + rope_dim, slope, factor)
        return {} if scale is None else {"attention": {"scale": scale}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        scaling, attention = getattr(model.position, "scaling", None), model.attention
        slope, factor = (getattr(scaling, key, None) for key in ("mscale_all_dim", "factor"))
        if attention.scale != _scale(attention.nope_dim + attention.rope_dim, slope, factor):
            raise InputError(f"{family.name} has the scale of scores that follows from its rotary positions")
        return {}


_SIZES = {"num_heads": "num_attention_heads", "nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim"}


def _sizes(values: Mapping[str, Any], where: str) -> list[int]:
    """Return the heads, and the channels of a head without and with rotary positions. Raises InputError where a file
    lacks one, or has none that is a whole number."""
    for name, key in _SIZES.items():
        if type(value := values["attention"].get(name)) is not int:
            raise InputError(f"{where}: {key} = {value!r}; it must be a whole number above 0")
    return [values["attention"][name] for name in _SIZES]


def _scale(channels: int, slope: float | None, factor: float | None) -> float | None:
    """Return the scale of scores; None is the root of the number of channels."""
    if not slope or factor is None or factor <= 1:
        return None
    return channels**-0.5 * (1.0 + 0.1 * slope * math.log(factor)) ** 2
