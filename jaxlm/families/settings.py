"""Translation between the keys of a published config.json and the keys of [model], both ways."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ValidationError

from jaxlm.core.errors import InputError
from jaxlm.core.explain import first_line
from jaxlm.core.schema import merged
from jaxlm.families import (
    inert,
    latent_keys,
    mixer_kinds,
    quantized,
    rope_keys,
    single_layers,
    sparse_layers,
    state_space_keys,
    value_types,
)
from jaxlm.families.family import Family, families, named
from jaxlm.families.files import text_of
from jaxlm.families.layer_kinds import LayerKinds
from jaxlm.families.layer_patterns import LAYERS, pattern
from jaxlm.families.nearest import computed, why_of_none
from jaxlm.models.block_config import BlockConfig
from jaxlm.models.config import MOST_LAYERS, ModelConfig

_LAYERS = "num_hidden_layers"
_GATED = {"swiglu": "silu"}  # of activations that are named with their gate


def model_of(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the architecture that a config.json describes.

    For a model of text and pictures it is the architecture of the text part, and for a quantized model that of the
    dequantized one. Raises InputError for a family that jaxlm does not have, for a key that may change a result and
    that jaxlm does not know, for a value that [model] cannot express, and for two spellings of a key that differ.
    """
    values, _ = _read(config, where)
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{where} describes no model: {first_line(error)}") from None


def inert_keys(config: Mapping[str, Any], where: str) -> list[str]:
    """Return the keys of a config.json that change no result, in order, but for those that every file has. Raises
    InputError as `model_of` does."""
    return sorted(key for key in _read(config, where)[1] if not inert.is_usual(key, text_of(config)[key]))


def _read(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of [model], and the keys of config.json that change nothing."""
    quantized.check_method(config, where)
    config = {key: value for key, value in text_of(config).items() if key != quantized.CONFIG_KEY}
    family = named(config.get("model_type"), where)
    given = _renamed(config, family, where)
    value_types.check(given, family, where)
    rope_keys.check_whole(given, family, where)
    known = {**family.defaults, **given}
    lists = [known[key] for key in family.layer_lists if isinstance(known.get(key), list | str)]
    if lists and known.get(_LAYERS) is None:
        known[_LAYERS] = len(lists[0])
    entries = {key: value for key, value in known.items() if key not in family.inert}
    values: dict[str, Any] = dict(family.model)
    for key, allowed in family.equal.items():
        value = entries.pop(key, allowed[0])
        if value is not None and value not in allowed:
            raise InputError(f"{where}: {key} = {value!r}, and jaxlm has {family.name} with {_either(allowed)} alone")
    for key, targets in family.config.items():
        if (value := entries.pop(key, None)) is not None:
            for target in targets:
                values = merged(values, _nested(target, value))
    layers = values.get("num_layers")
    if type(layers) is not int or not 1 <= layers <= MOST_LAYERS:
        raise InputError(
            f"{where} gives {layers!r} as the number of layers; it must be a whole number from 1 to {MOST_LAYERS:,}"
        )
    of_layers = []
    for composite in family.composites:
        found = _COMPOSITES[composite].read(entries, values, where)
        of_layers += [found.pop(LAYERS)] if LAYERS in found else []
        values = merged(values, found)
    values |= pattern(of_layers)
    refused = [key for key, value in entries.items() if not _is_repeated(key, value, known, family, where)]
    refused = [key for key in refused if not inert.is_inert(key, entries[key])]
    if refused:
        raise InputError(
            f"{where}: {', '.join(sorted(refused))}: jaxlm knows no such key of {family.name}; if no result depends on "
            "it, take it out of the file"
        )
    return values, [key for key in config if key in entries or key in family.inert]


def _renamed(config: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Return the keys under the names of today. Raises InputError where an older name has another value beside it."""
    for old, now in family.aliases.items():
        if None not in (config.get(old), config.get(now)) and config[old] != config[now]:
            raise _differing(where, old, config[old], now, config[now])
    return {
        family.aliases.get(key, key): value
        for key, value in config.items()
        if value is not None or key not in family.aliases
    }


def _is_repeated(key: str, value: Any, known: Mapping[str, Any], family: Family, where: str) -> bool:
    """Return whether a key repeats the value of one that the family reads. Raises InputError where it has another."""
    of = family.repeats.get(key)
    if value is None or known.get(of) is None:
        return False
    if (_GATED.get(value, value) if isinstance(value, str) else value) != known[of]:
        raise _differing(where, key, value, of, known[of])
    return True


def _differing(where: str, key: str, value: Any, other: str, its: Any) -> InputError:
    return InputError(f"{where}: {key} = {value!r} and {other} = {its!r} are two names of one setting; leave one out")


def config_of(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the config.json of a model in a family, with both spellings of keys that have two. Raises InputError where
    the family has no keys for it."""
    model = _on_a_block_of(model, family)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "transformers_version": "4.40.0",
        "initializer_range": model.initializer_std,
    }
    config |= {key: allowed[0] for key, allowed in family.equal.items()}
    config |= {key: _value(model, targets[0], family) for key, targets in family.config.items()}
    for composite in family.composites:
        config |= _COMPOSITES[composite].write(model, family)
    return config | {old: config[new] for old, new in family.aliases.items() if new in config}


def _on_a_block_of(model: ModelConfig, family: Family) -> ModelConfig:
    """Return the same model, its own block one of the kinds that the family has, where only an entry of its pattern
    has them."""
    kinds = {part: table["kind"] for part, table in family.model.items() if isinstance(table, dict) and "kind" in table}
    kinds = {
        part: kind for part, kind in kinds.items() if any(getattr(each, part).kind == kind for each in model.layers)
    }

    def has_them(block: BlockConfig) -> bool:
        return all(getattr(block, part).kind == kind for part, kind in kinds.items())

    other = None if has_them(model) else next(filter(has_them, model.layers), None)
    return model if other is None else model.based_on(other)


def family_of(model: ModelConfig) -> Family:
    """Return the family that a model can be published in, the plainest of several. Raises InputError for none; it names
    the nearest, and the keys in which the model differs."""
    tried: list[tuple[Family, ModelConfig | str]] = []
    for family in families().values():
        try:
            published = model_of(config_of(model, family), family.name)
        except (InputError, AttributeError) as error:  # of a part that this model has not
            tried.append((family, str(error) if isinstance(error, InputError) else "it has other parts"))
            continue
        if _alike(published, model):
            return family
        tried.append((family, published))
    raise InputError(f"this [model] is of no family, and cannot be exported: {why_of_none(model, tried)}")


def _alike(one: ModelConfig, other: ModelConfig) -> bool:
    """Return whether two models compute the same, whatever the entries of their patterns are called, and whatever
    training adds.

    With dynamic scaling the context changes nothing that is computed, and no file gives another than the factor's.
    """
    unlike = {*BlockConfig.model_fields, "pattern", "initializer_std"}
    scalings = [block.position.scaling for block in one.layers if block.position.kind == "rope"]
    if any(scaling is not None and scaling.kind == "dynamic" for scaling in scalings):
        unlike |= {"context_length"}
    of_layers = (list(map(computed, model.layers)) for model in (one, other))
    return next(of_layers) == next(of_layers) and one.model_dump(exclude=unlike) == other.model_dump(exclude=unlike)


def _either(allowed: tuple[Any, ...]) -> str:
    return " or ".join(map(repr, allowed))


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value


def _value(model: ModelConfig, dotted: str, family: Family) -> Any:
    value: Any = model
    for key in dotted.split("."):
        if value is None:
            raise InputError(f"{family.name} has model.{dotted.rpartition('.')[0]}, and this model has none")
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


@dataclass(frozen=True)
class _Activation:
    """GPT-2 and GPT-NeoX give their activation by transformers' name, under a key."""

    key: str
    # The first name of each is written. Those of the tanh form differ in the order of their products alone.
    NAMES: ClassVar = {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
        "relu": "relu",
        "relu2": "relu_squared",
        "silu": "silu",
        "swish": "silu",
    }

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        name = entries.pop(self.key)
        if name not in self.NAMES:
            raise InputError(f"{where}: {self.key} = {name!r}, and jaxlm has {_either(tuple(self.NAMES))} alone")
        return {"feed_forward": {"activation": self.NAMES[name]}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        names = {ours: theirs for theirs, ours in reversed(self.NAMES.items())}
        return {self.key: names[model.feed_forward.activation]}


class _InnerWidth:
    """GPT-2 leaves out d_ff, which is four times d_model."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {} if "d_ff" in values["feed_forward"] else {"feed_forward": {"d_ff": 4 * values["d_model"]}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        return {}


class _AdjustedWidth:
    """LFM2 gives d_ff, or a number of which it is two thirds, times a number, up to a multiple."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        keys = "intermediate_size", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"
        width, adjusts, multiplier, multiple = (entries.pop(key) for key in keys)
        if adjusts:
            if type(multiple) is not int or multiple < 1:
                raise InputError(f"{where}: block_multiple_of = {multiple!r}; it must be a whole number above 0")
            width = int(2 * width / 3)
            if multiplier is not None:
                width = -(-int(multiplier * width) // multiple) * multiple
        return {"feed_forward": {"d_ff": width}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        return {"intermediate_size": model.feed_forward.d_ff, "block_auto_adjust_ff_dim": False}


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


class _HeadNorms:
    """GLM-4.5 has norms of queries and keys in its largest size alone."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {"attention": {"qk_norm": "head" if entries.pop("use_qk_norm") else "none"}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        return {"use_qk_norm": model.attention.qk_norm == "head"}


class _RotaryDim:
    """MiniMax gives the channels of a head that rotate. Their share is left to the composite of rotary positions."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        rotated, share = entries.pop("rotary_dim", None), "partial_rotary_factor"
        if rotated is not None:
            whole = values["d_model"] // values["attention"]["num_heads"]
            fraction = rotated / values["attention"].get("head_dim", whole)
            if entries[share] not in (1.0, fraction):
                raise _differing(where, "rotary_dim", rotated, share, entries[share])
            entries[share] = fraction
        return {}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        return {"rotary_dim": model.layers[0].rope_dim}


class _AttentionAlone:
    """MiniMax lists the layers with attention; in earlier models of its publisher others are linear."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        if set(entries.pop("attn_type_list", None) or ()) - {1}:
            raise InputError(f"{where}: attn_type_list has linear attention, which jaxlm does not have")
        return {}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        return {}


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
    "activation": _Activation("hidden_act"),
    "activation function": _Activation("activation_function"),
    "whole heads": _WholeHeads(),
    "inner width": _InnerWidth(),
    "logits scaling": _LogitsScaling(),
    "parallel residual": _ParallelResidual(),
    "head norms": _HeadNorms(),
    "rotary dim": _RotaryDim(),
    "attention in every layer": _AttentionAlone(),
    "state space heads": state_space_keys.StateSpaceHeads(),
    "layers of one part": single_layers.SingleLayers(),
    "state space layers": state_space_keys.GRANITE_LAYERS,
    "rope or none": state_space_keys.RopeOrNone(),
    "experts or none": state_space_keys.ExpertsOrNone(),
    "time limits": state_space_keys.TimeLimits(),
    "gated delta layers": mixer_kinds.GATED_DELTA_LAYERS,
    "short convolution layers": mixer_kinds.SHORT_CONVOLUTION_LAYERS,
    "adjusted width": _AdjustedWidth(),
    "sparse layers": sparse_layers.SparseLayers(),
    "layers after dense ones": sparse_layers.LayersAfterDenseOnes("first_k_dense_replace"),
    "layers after num_dense_layers": sparse_layers.LayersAfterDenseOnes("num_dense_layers"),
    "expert bias": sparse_layers.SelectionBias(),
    "listed dense layers": sparse_layers.ListedDenseLayers(),
    "groups by their best expert": sparse_layers.GroupsByBestExpert(),
    "latent heads": latent_keys.LatentHeads(),
    "latent scores": latent_keys.LatentScores(),
    "expert groups": sparse_layers.ExpertGroups(),
    "shared experts": sparse_layers.SharedExperts(),
    "normalised weights + 1e-20": sparse_layers.NormalisedWeights(1e-20),
    "normalised weights + 1e-6": sparse_layers.NormalisedWeights(1e-6),
}
