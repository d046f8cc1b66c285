"""The models of measured runs, from the sizes that their sources print."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jaxlm.core.explain import first_line
from jaxlm.models.config import ModelConfig

# What every run says of its model; latent attention and a mixture have sizes of their own in place of some.
_SIZES = ("L", "d", "H", "Hkv", "Dh", "F", "V", "gated")
_LATENT = re.compile(r"MLA \(q_lora (\d+), kv_lora (\d+), nope (\d+), rope (\d+), v (\d+)\)")


class NotExpressed(Exception):
    """The cost model has no words for a run; the message says what it lacks."""


def run_model(dims: Mapping[str, Any], sequence: int) -> ModelConfig:
    """Return the model of a run's `dims` (`MeasuredRun`) for sequences of this length.

    Raises NotExpressed where sizes are missing, or no model has them.
    """
    instead = {"Hkv": "attention", "Dh": "attention", "F": "experts"}
    needed = [name for name in _SIZES if instead.get(name) not in dims]
    needed += ["top_k", "moe_ff"] if "experts" in dims else []
    needed += ["dense_ff"] if dims.get("dense_layers") else []
    if missing := [name for name in needed if name not in dims]:
        raise NotExpressed(f"dims lack {', '.join(missing)}")
    has_bias, is_gated, is_learned = (dims.get(name, False) for name in ("bias", "gated", "learned_positions"))
    try:
        return ModelConfig.model_validate(
            {
                "vocab_size": dims["V"],
                "context_length": sequence,
                "num_layers": dims["L"],
                "d_model": dims["d"],
                "tied_embeddings": dims.get("tied", False),
                "norm": {"kind": "rms"} if is_gated else {"kind": "layer", "bias": has_bias},
                "position": {"kind": "learned" if is_learned else "rope"},
                "attention": _attention(dims, has_bias),
                "feed_forward": _mixture(dims) if "experts" in dims else _dense(dims["F"], is_gated, has_bias),
                **_pattern(dims),
            }
        )
    except ValidationError as error:
        raise NotExpressed(f"no model has these dims: {first_line(error)}") from None


def _attention(dims: Mapping[str, Any], has_bias: bool) -> dict[str, Any]:
    if "attention" not in dims:
        sizes = {"num_heads": dims["H"], "num_kv_heads": dims["Hkv"], "head_dim": dims["Dh"]}
        return {**sizes, "qkv_bias": has_bias, "output_bias": has_bias}
    said = _LATENT.fullmatch(str(dims["attention"]))
    if said is None:
        raise NotExpressed(f"attention: {dims['attention']}")
    names = ("query_rank", "latent_rank", "nope_dim", "rope_dim", "value_dim")
    return {"kind": "latent", "num_heads": dims["H"], **dict(zip(names, map(int, said.groups()), strict=True))}


def _dense(width: int, is_gated: bool, has_bias: bool) -> dict[str, Any]:
    activation = "silu" if is_gated else "gelu_tanh"
    return {"kind": "dense", "d_ff": width, "activation": activation, "gated": is_gated, "bias": has_bias}


def _mixture(dims: Mapping[str, Any]) -> dict[str, Any]:
    width, shared = dims["moe_ff"], dims.get("shared_experts", 0)
    return {
        "kind": "mixture",
        "num_experts": dims["experts"],
        "experts_per_token": dims["top_k"],
        "d_ff": width,
        "gated": dims["gated"],
        **({"shared": {"d_ff": shared * width}} if shared else {}),
    }


def _pattern(dims: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the pattern of layers of a window "1024 on 5 of 6 layers" or "128 on alternate layers", or of a mixture
    whose first layers are dense."""
    window, dense = dims.get("window", ""), dims.get("dense_layers", 0)
    if window and dense:
        raise NotExpressed("a window beside dense layers of a mixture")
    if dense:
        first = {"name": "dense", "layers": dense, "feed_forward": _dense(dims["dense_ff"], dims["gated"], False)}
        return {"pattern": [first, {"name": "mixture", "layers": "rest"}]}
    if not window:
        return {}
    said = re.fullmatch(r"(\d+) on (?:(\d+) of (\d+)|alternate) layers", str(window))
    if said is None:
        raise NotExpressed(f"a window of {window}")
    tokens, few, all_ = said.groups()
    few, all_ = int(few or 1), int(all_ or 2)
    near = {"name": "local", "layers": few, "attention": {"window": int(tokens)}}
    return {"pattern": [near, {"name": "global", "layers": all_ - few}]}
