"""Every option of a model with another value, one at a time."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from jaxlm.models.config import ModelConfig

# Sizes, and what changes no result.
_EXEMPT = {
    *("vocab_size", "context_length", "num_layers", "d_model", "initializer_std", "pattern"),
    *("attention.num_heads", "attention.num_kv_heads", "attention.head_dim", "feed_forward.d_ff"),
    *("attention.kind", "feed_forward.kind", "feed_forward.num_experts", "feed_forward.shared.d_ff"),
    "feed_forward.router.epsilon",  # 1e-20 beside numbers of about 1
}
# Keys that must go with another value of these.
_WITH = {
    "feed_forward.router.normalise": "feed_forward.router.epsilon",
    "feed_forward.router.selection_bias": "feed_forward.balance.bias_rate",
}
_OTHERS = {
    "norm.kind": {"rms": "layer", "layer": "rms"},
    "position.kind": {"rope": "none", "learned": "none", "none": "rope"},
    "feed_forward.activation": {"silu": "gelu", "gelu_tanh": "gelu", "gelu": "gelu_tanh", "relu_squared": "relu"},
    "feed_forward.router.scores": {"softmax": "sigmoid", "sigmoid": "softmax", "softmax_of_chosen": "sigmoid"},
    "feed_forward.router.groups.score": {"top2_sum": "max", "max": "top2_sum"},
    "feed_forward.shared.gate": {"sigmoid": "none", "none": "sigmoid"},
    "attention.gate": {"before_norm": "after_norm", "after_norm": "before_norm"},
    "norm_placement": {"before": "both", "after": "before", "both": "before"},
    "residual": {"sequential": "parallel", "parallel": "sequential", "parallel_shared_norm": "sequential"},
}
# What is enough to move a rounded number of pairs, too.
_FACTORS = {"norm.epsilon": 10.0, "position.theta": 50.0, "position.scaling.beta_slow": 8.0}


def mutations(model: ModelConfig) -> dict[str, ModelConfig]:
    """Return models by the option that each has another value of."""
    values = model.model_dump(exclude_none=True)
    found = dict(_changes(values, values, ""))
    for i, entry in enumerate(values.get("pattern", ())):
        for key in entry.keys() - {"name", "layers"}:
            without = {name: value for name, value in entry.items() if name != key}
            pattern = [without if j == i else each for j, each in enumerate(values["pattern"])]
            found[f"pattern[{i}].{key}"] = {**values, "pattern": pattern}
        found |= _of_entry(model, values, i)
    if not any(layer.attention.rotated for layer in model.layers):
        found = {key: changed for key, changed in found.items() if not key.startswith("position.")}
    models = {}
    for key, changed in found.items():
        try:
            models[key] = ModelConfig.model_validate(changed)
        except ValidationError:
            continue  # no model has this value beside the others
    return models


def _of_entry(model: ModelConfig, values: dict[str, Any], index: int) -> dict[str, dict[str, Any]]:
    """Return the changes of each part of an entry's block that is of another kind than the model's."""
    found, (_, block) = {}, model.entries[index]
    for part in ("attention", "feed_forward"):
        if (own := getattr(block, part)).kind == getattr(model, part).kind:
            continue
        table = {part: own.model_dump(exclude_none=True)}
        for key, changed in _changes(table, table, ""):
            pattern = [{**e, part: changed[part]} if j == index else e for j, e in enumerate(values["pattern"])]
            found[f"pattern[{index}].{key}"] = {**values, "pattern": pattern}
    return found


def _changes(table: dict[str, Any], whole: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if key in _EXEMPT or key.startswith("feed_forward.balance."):  # which training alone reads
            continue
        if isinstance(value, dict):
            if key == "position.scaling":
                yield key, _with(whole, key, None)
            yield from _changes(value, whole, f"{key}.")
        elif key in _OTHERS:
            yield key, _with(whole, key, _OTHERS[key][value])
        elif isinstance(value, tuple):  # limits
            yield key, _with(whole, key, None)
        elif isinstance(value, bool):
            if not value and (name.endswith("bias") or key == "norm.scale"):
                continue  # no file has one, and as it is initialised it changes nothing
            yield key, _with(_with(whole, _WITH[key], None) if key in _WITH else whole, key, not value)
        elif isinstance(value, int):
            yield key, _with(whole, key, value + 1)
        elif isinstance(value, float) and value:
            yield key, _with(whole, key, value * _FACTORS.get(key, 1.5))


def _with(whole: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """Return the values with another at a dotted key; None takes it away, and another kind the keys of the former."""
    name, _, rest = dotted.partition(".")
    if rest == "kind":
        return {**whole, name: {"kind": value}}
    if rest:
        return {**whole, name: _with(whole[name], rest, value)}
    if value is None:
        return {key: old for key, old in whole.items() if key != name}
    return {**whole, name: value}
