"""Translation between the keys of a published config.json and the keys of [model], both ways."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ValidationError

from jaxlm.core.errors import InputError
from jaxlm.core.schema import merged
from jaxlm.families import quantized
from jaxlm.families.family import Family, families, named
from jaxlm.families.files import text_of
from jaxlm.families.layer_kinds import LayerKinds
from jaxlm.models.config import BlockConfig, ModelConfig


def model_of(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the architecture that a config.json describes.

    For a model of text and pictures it is the architecture of the text part, and for a quantized model that of the
    dequantized one. Raises InputError for a family that jaxlm does not have, and for a key that jaxlm does not know or
    a value that [model] cannot express: nothing that changes a result is ignored.
    """
    quantized.check_method(config, where)
    config = {key: value for key, value in text_of(config).items() if key != quantized.CONFIG_KEY}
    family = named(config.get("model_type"), where)
    known = {family.aliases.get(key, key): value for key, value in config.items()}
    entries = {key: value for key, value in {**family.defaults, **known}.items() if key not in family.inert}
    values: dict[str, Any] = dict(family.model)
    for key, allowed in family.equal.items():
        value = entries.pop(key, allowed[0])
        if value is not None and value not in allowed:
            raise InputError(f"{where}: {key} = {value!r}, and jaxlm has {family.name} with {_either(allowed)} alone")
    for key, targets in family.config.items():
        if (value := entries.pop(key, None)) is not None:
            for target in targets:
                values = merged(values, _nested(target, value))
    for composite in family.composites:
        values = merged(values, _COMPOSITES[composite].read(entries, values, where))
    if left := [key for key, value in entries.items() if value not in (None, {})]:
        raise InputError(f"{where}: {', '.join(sorted(left))}: jaxlm knows no such key of {family.name}")
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        why = error.errors()[0]
        raise InputError(f"{where} describes no model: {'.'.join(map(str, why['loc']))}: {why['msg']}") from None


def config_of(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the config.json of a model in a family, with both spellings of keys that have two."""
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "transformers_version": "4.40.0",
        "initializer_range": model.initializer_std,
    }
    config |= {key: allowed[0] for key, allowed in family.equal.items()}
    config |= {key: _value(model, targets[0]) for key, targets in family.config.items()}
    for composite in family.composites:
        config |= _COMPOSITES[composite].write(model, family)
    return config | {old: config[new] for old, new in family.aliases.items() if new in config}


def family_of(model: ModelConfig) -> Family:
    """Return the family that a model can be published in, the plainest of several. Raises InputError for none."""
    for family in families().values():
        try:
            if _alike(model_of(config_of(model, family), family.name), model):
                return family
        except (InputError, AttributeError):
            continue
    raise InputError(f"this [model] is none of {', '.join(families())}, and cannot be exported")


def _alike(one: ModelConfig, other: ModelConfig) -> bool:
    """Return whether two models compute the same, whatever the entries of their patterns are called."""
    of_blocks = {*BlockConfig.model_fields, "pattern", "initializer_std"}
    return one.layers == other.layers and one.model_dump(exclude=of_blocks) == other.model_dump(exclude=of_blocks)


def _either(allowed: tuple[Any, ...]) -> str:
    return " or ".join(map(repr, allowed))


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value


def _value(model: ModelConfig, dotted: str) -> Any:
    value: Any = model
    for key in dotted.split("."):
        value = getattr(value, key)
    return value


class _QueryScale:
    """Gemma divides queries by the root of a number that config.json gives, not of the head dim."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        scalar = entries.pop("query_pre_attn_scalar")
        same = scalar == values["attention"].get("head_dim")
        return {} if same else {"attention": {"scale": scalar**-0.5}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        attention = model.attention
        scalar = attention.head_dim if attention.scale is None else attention.scale**-2
        whole = round(scalar)
        return {"query_pre_attn_scalar": whole if abs(scalar - whole) < 1e-6 * whole else scalar}


class _WholeHeads:
    """Some classes of transformers refuse a d_model that num_heads does not divide, although they need no such rule."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        if model.d_model % model.attention.num_heads:
            raise InputError(f"{family.name} has a d_model that num_heads divides")
        return {}


class _ScoreMultiplier:
    """Granite's config.json always has the scale of attention's scores."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {"attention": {"scale": entries.pop("attention_multiplier")}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        attention = model.attention
        return {"attention_multiplier": attention.head_dim**-0.5 if attention.scale is None else attention.scale}


class _Activation:
    """GPT-NeoX gives its activation by transformers' name."""

    _NAMES: ClassVar = {
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "relu": "relu",
        "relu2": "relu_squared",
        "silu": "silu",
    }

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        name = entries.pop("hidden_act")
        if name not in self._NAMES:
            raise InputError(f"{where}: hidden_act = {name!r}, and jaxlm has {_either(tuple(self._NAMES))} alone")
        return {"feed_forward": {"activation": self._NAMES[name]}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        names = {ours: theirs for theirs, ours in reversed(self._NAMES.items())}
        return {"hidden_act": names[model.feed_forward.activation]}


class _InnerWidth:
    """GPT-2 leaves out d_ff, which is four times d_model."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {} if "d_ff" in values["feed_forward"] else {"feed_forward": {"d_ff": 4 * values["d_model"]}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        return {}


class _LogitsScaling:
    """Granite divides logits."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {"logit_scale": 1.0 / entries.pop("logits_scaling")}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        return {"logits_scaling": 1.0 / model.logit_scale}


class _ParallelResidual:
    """GPT-NeoX has attention and feed-forward in parallel, or one after the other."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {"residual": "parallel" if entries.pop("use_parallel_residual") else "sequential"}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        return {"use_parallel_residual": model.residual == "parallel"}


# Translations of several keys together, or of a single key whose value has another form.
_COMPOSITES = {
    "rope": LayerKinds(),
    "rope and windows": LayerKinds(windows=True),
    "rope and kinds of layers": LayerKinds(windows=True, kinds=True),
    "rope of windows": LayerKinds(windows=True, kinds=True, rotates="windowed"),
    "rope of windows where there are any": LayerKinds(windows=True, kinds=True, rotates="windowed or all"),
    "rope of listed layers": LayerKinds(windows=True, rotates="listed"),
    "query scale": _QueryScale(),
    "score multiplier": _ScoreMultiplier(),
    "activation": _Activation(),
    "whole heads": _WholeHeads(),
    "inner width": _InnerWidth(),
    "logits scaling": _LogitsScaling(),
    "parallel residual": _ParallelResidual(),
}
