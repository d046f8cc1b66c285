"""Layers of one part each of a published config.json: recurrences, attention, MLPs and mixtures, both ways."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.families.family import Family
from jaxlm.families.layer_patterns import LAYERS
from jaxlm.families.state_space_keys import time_limits
from jaxlm.models.block_config import BlockConfig
from jaxlm.models.config import ModelConfig

_TYPES, _PATTERN, _LIMITS = "layers_block_type", "hybrid_override_pattern", "time_step_limit"
# Of each letter of the pattern, the kind that is written, and its name in a pattern of [model].
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NAMES = {"M": "state_space", "*": "full", "-": "dense", "E": "mixture"}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()} | {"mamba": "M", "attention": "*"}
# By key of config.json, the key of the part.
_STATE_SPACE = {
    "mamba_num_heads": "num_heads",
    "mamba_head_dim": "head_dim",
    "ssm_state_size": "state_dim",
    "n_groups": "num_groups",
    "conv_kernel": "taps",
    "use_conv_bias": "convolution_bias",
}
_EXPERTS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "d_ff",
    "moe_latent_size": "latent_dim",
}
_WIDTH, _SHARED = "intermediate_size", "moe_shared_expert_intermediate_size"
_ROUTER = "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"
_MLP = {"activation": "relu_squared", "gated": False}
_EPSILON = 1e-20


class SingleLayers:
    """Nemotron-H has a recurrence, attention, an MLP or a mixture in each layer, by a list or by letters."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        letters = _letters(entries, values["num_layers"], where)
        state_space = {ours: entries.pop(theirs) for theirs, ours in _STATE_SPACE.items()}
        if time_limits(limits := entries.pop(_LIMITS, None), where) is not None:  # which its class does not read
            raise InputError(f"{where}: {_LIMITS} = {limits!r}, and jaxlm has none here")
        experts = {ours: entries.pop(theirs, None) for theirs, ours in _EXPERTS.items()}
        normalise, scale, groups, kept = (entries.pop(key) for key in _ROUTER)
        router: dict[str, Any] = {"scores": "sigmoid", "selection_bias": True, "normalise": normalise, "scale": scale}
        if normalise:
            router["epsilon"] = _EPSILON
        if groups != kept:
            router["groups"] = {"count": groups, "kept": kept, "score": "top2_sum"}
        rest = {"shared": {"d_ff": entries.pop(_SHARED)}, "router": router}
        rest |= {"balance": {"auxiliary_loss": 0.0, "bias_rate": 0.0}}
        none = {"attention": {"kind": "none"}}
        patches: dict[str, dict[str, Any]] = {
            "M": {"attention": {"kind": "mamba2", **_given(state_space)}},
            "*": {},
            "-": none | {"feed_forward": {"kind": "dense", "d_ff": entries.pop(_WIDTH), **_MLP}},
            "E": none | {"feed_forward": {"kind": "mixture", **_given(experts), **_MLP, **rest}},
        }
        return {LAYERS: [(_NAMES[letter], patches[letter]) for letter in letters]}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        letters = [_letter(block, family) for block in model.layers]
        parts: dict[str, Any] = {}
        for block, letter in zip(model.layers, letters, strict=True):
            part = block.attention if letter in "M*" else block.feed_forward
            if parts.setdefault(letter, part) != part:
                raise InputError(f"{family.name} has one kind of {_KINDS[letter]} layers")
        keys = (*_STATE_SPACE, *_EXPERTS, *_ROUTER, _WIDTH, _SHARED, _LIMITS)
        written: dict[str, Any] = {key: family.defaults.get(key) for key in keys}
        if (settings := parts.get("M")) is not None:
            written |= {theirs: getattr(settings, ours) for theirs, ours in _STATE_SPACE.items()}
            if settings.time_limits is not None:
                raise InputError(f"{family.name} has no limits of time steps")
        if (settings := parts.get("-")) is not None:
            written[_WIDTH] = settings.d_ff
        if (settings := parts.get("E")) is not None:
            if settings.shared is None:
                raise InputError(f"{family.name} has shared experts")
            written |= {theirs: getattr(settings, ours) for theirs, ours in _EXPERTS.items()}
            router, groups = settings.router, settings.router.groups
            limits = (groups.count, groups.kept) if groups else (1, 1)
            written |= dict(zip(_ROUTER, (router.normalise, router.scale, *limits), strict=True))
            written[_SHARED] = settings.shared.d_ff
        return written | {_TYPES: [_KINDS[letter] for letter in letters], _PATTERN: "".join(letters)}


def _letters(entries: dict[str, Any], layers: int, where: str) -> Sequence[str]:
    """Take the kinds of layers out of `entries`, and return the letter of each. Raises InputError for a kind that the
    family does not have, and where the two spellings differ."""
    types, letters = entries.pop(_TYPES, None), entries.pop(_PATTERN, None)
    if types is not None and not (isinstance(types, list) and all(isinstance(each, str) for each in types)):
        raise InputError(f"{where}: {_TYPES} = {types!r}; it must be a list of the kinds of the layers")
    if letters is not None and not isinstance(letters, str):
        raise InputError(f"{where}: {_PATTERN} = {letters!r}; it must be a text with a letter for each layer")
    if types is None and letters is None:
        raise InputError(f"{where} has neither {_TYPES} nor {_PATTERN}, one of which says what the layers are")
    if strange := sorted(set(types or ()) - _LETTERS.keys()):
        raise InputError(f"{where}: {_TYPES} has {', '.join(strange)}, and jaxlm has {', '.join(_KINDS.values())} here")
    if strange := sorted(set(letters or ()) - _KINDS.keys()):
        raise InputError(f"{where}: {_PATTERN} has {', '.join(strange)}, and jaxlm has {', '.join(_KINDS)} here")
    listed = None if types is None else "".join(_LETTERS[each] for each in types)
    if None not in (listed, letters) and listed != letters:
        raise InputError(f"{where}: {_TYPES} and {_PATTERN} = {letters!r} differ; leave one out")
    of_layers = listed or letters or ""
    if len(of_layers) != layers:
        key = _PATTERN if listed is None else _TYPES
        raise InputError(f"{where}: {key} names {len(of_layers)} layers, and num_hidden_layers = {layers}")
    return of_layers


def _letter(block: BlockConfig, family: Family) -> str:
    """Return the letter of a layer. Raises InputError for one that the family does not have."""
    kinds = block.attention.kind, block.feed_forward.kind
    letters = {("mamba2", "none"): "M", ("gqa", "none"): "*", ("none", "dense"): "-", ("none", "mixture"): "E"}
    if kinds not in letters:
        raise InputError(f"{family.name} has layers of one part: Mamba-2, attention, an MLP or a mixture")
    return letters[kinds]


def _given(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}
