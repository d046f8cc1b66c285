"""Keys of a published config.json that describe Mamba-2 together, both ways."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.families.family import Family
from jaxlm.families.layer_kinds import LayerKinds
from jaxlm.families.mixer_kinds import RecurrentLayers
from jaxlm.families.rope_keys import TABLES
from jaxlm.models.config import ModelConfig
from jaxlm.models.recurrent_config import Mamba2Config

_UNLIMITED = (0.0, math.inf)
_LIMITS = "time_step_limit"
_POSITIONS = "position_embedding_type"
_EXPERTS = "num_local_experts", "num_experts_per_tok", "intermediate_size", "shared_intermediate_size"


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


@dataclass(frozen=True)
class StateSpaceLayers(RecurrentLayers):
    """The layers of Mamba-2 of a family whose other layers have attention.

    Attributes:
      heads, head_dim, expand: the keys of the heads, of the channels of one, which may be "auto", and of the channels
        of all as a multiple of the stream's.
    """

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    expand: str = "mamba_expand"

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Take the keys of these layers out of `entries`, and return what each layer changes of [model]. Raises
        InputError as `RecurrentLayers.read` does, and for sizes that disagree."""
        heads, expand, width = entries[self.heads], entries.pop(self.expand), values["d_model"]
        if entries[self.head_dim] == "auto":
            entries[self.head_dim] = expand * width // heads
        size = entries[self.head_dim]
        if type(size) is not int or heads * size != expand * width:
            raise InputError(
                f"{where}: {self.heads} = {heads} times {self.head_dim} = {size!r} is not {self.expand} = {expand} "
                f"times hidden_size = {width}"
            )
        entries[_LIMITS] = time_limits(entries.get(_LIMITS), where)
        return super().read(entries, values, where)

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        """Return the keys of these layers. Raises InputError if the family has no keys for the model's layers."""
        written = super().write(model, family)
        channels = written[self.heads] * written[self.head_dim]
        if any(isinstance(block.attention, self.section) for block in model.layers):
            if channels % model.d_model:
                raise InputError(f"{family.name} has heads whose channels are together a multiple of d_model")
        else:  # as many as the class asks for
            written[self.heads], written[self.head_dim], channels = 1, model.d_model, model.d_model
        return written | {_LIMITS: list(written[_LIMITS] or _UNLIMITED), self.expand: channels // model.d_model}


GRANITE_LAYERS = StateSpaceLayers(
    Mamba2Config,
    {
        "mamba_n_heads": "num_heads",
        "mamba_d_head": "head_dim",
        "mamba_d_state": "state_dim",
        "mamba_n_groups": "num_groups",
        "mamba_d_conv": "taps",
        "mamba_conv_bias": "convolution_bias",
        _LIMITS: "time_limits",
    },
    types=("mamba", "linear_attention"),
    name="state_space",
    older=None,
    attention="attention",
)


class RopeOrNone:
    """Granite 4 has rotary positions where `position_embedding_type` is "rope", and otherwise none."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        kind = entries.pop(_POSITIONS, None)
        if kind not in ("rope", "nope", None):
            raise InputError(f"{where}: {_POSITIONS} = {kind!r}, and jaxlm has 'rope' and 'nope' alone")
        if kind == "rope":
            return LayerKinds().read(entries, values, where)
        for key in ("rope_theta", *TABLES):  # which nothing reads
            entries.pop(key, None)
        return {"position": {"kind": "none"}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        rotated = {block.position.kind for block in model.layers if block.attention.rotated is not None}
        if rotated == {"rope"}:
            return {_POSITIONS: "rope", **LayerKinds().write(model, family)}
        if rotated - {"none"}:
            raise InputError(f"{family.name} has rotary positions in all layers of attention, or no positions")
        return {_POSITIONS: "nope"}


class ExpertsOrNone:
    """Granite 4 adds a dense layer to a mixture of experts, or has that layer alone for 0 experts."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        count, chosen, width, shared = (entries.pop(key) for key in _EXPERTS)
        if not count:
            return {"feed_forward": {"kind": "dense", "d_ff": shared, "activation": "silu", "gated": True}}
        return {
            "feed_forward": {
                "kind": "mixture",
                "num_experts": count,
                "experts_per_token": chosen,
                "d_ff": width,
                "shared": {"d_ff": shared},
                "router": {"scores": "softmax_of_chosen"},
                "balance": {"auxiliary_loss": 0.0},
            }
        }

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        settings = model.feed_forward
        if settings.kind == "dense":
            return dict(zip(_EXPERTS, (0, 0, settings.d_ff, settings.d_ff), strict=True))
        if settings.shared is None:
            raise InputError(f"{family.name} has shared experts")
        sizes = settings.num_experts, settings.experts_per_token, settings.d_ff, settings.shared.d_ff
        return dict(zip(_EXPERTS, sizes, strict=True))
