"""Layers with experts and dense layers of a published config.json, and what else its keys say of experts, both ways."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.families.family import Family
from jaxlm.families.layer_patterns import LAYERS
from jaxlm.models.config import ModelConfig

_SHARED = "layers/feed_forward/shared/"


class SparseLayers:
    """Qwen has experts in every `decoder_sparse_step`-th layer that is not listed; the others are dense."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        step, listed = entries.pop("decoder_sparse_step"), entries.pop("mlp_only_layers", None) or []
        layers = range(values["num_layers"])
        if not isinstance(step, int) or step < 1:
            raise InputError(f"{where}: decoder_sparse_step = {step!r}; it must be a whole number above 0")
        if not isinstance(listed, list) or any(type(each) is not int or each not in layers for each in listed):
            raise InputError(
                f"{where}: mlp_only_layers = {listed!r}; it must be a list of layers from 0 to {layers[-1]}"
            )
        sparse = [layer not in listed and (layer + 1) % step == 0 for layer in layers]
        if not any(sparse):
            raise InputError(f"{where}: decoder_sparse_step and mlp_only_layers leave no layer with experts")
        return dense_among(sparse, entries.pop("intermediate_size"))

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        dense = dense_layers(model)
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense, **dense_width(model)}


@dataclass(frozen=True)
class LayersAfterDenseOnes:
    """The first layers, whose number DeepSeek and LFM2 have under a key, are dense, and the others have experts."""

    key: str

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        first, layers = entries.pop(self.key), values["num_layers"]
        if not isinstance(first, int) or first < 0:
            raise InputError(f"{where}: {self.key} = {first!r}; it must be a whole number from 0 up")
        if first >= layers:
            raise InputError(f"{where}: {self.key} = {first} leaves no layer of {layers} with experts")
        return dense_among([layer >= first for layer in range(layers)], entries.pop("intermediate_size"))

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        dense = dense_layers(model)
        if dense != list(range(len(dense))):
            raise InputError(f"{family.name} has dense layers before those with experts alone")
        return {self.key: len(dense), **dense_width(model)}


class ListedDenseLayers:
    """GLM-4.7-Flash lists its layers as dense or sparse; without a list the first is dense."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        layers, first = values["num_layers"], entries.pop("first_k_dense_replace", None)
        counted = ["dense" if layer < (1 if first is None else first) else "sparse" for layer in range(layers)]
        types = entries.pop("mlp_layer_types", None) or counted
        if not isinstance(types, list) or len(types) != layers or set(types) - {"dense", "sparse"}:
            raise InputError(f'{where}: mlp_layer_types must be a list of {layers} layers, each "dense" or "sparse"')
        if first is not None and types != counted:
            raise InputError(f"{where}: mlp_layer_types and first_k_dense_replace = {first} differ; leave one out")
        if "sparse" not in types:
            raise InputError(f"{where}: mlp_layer_types leaves no layer with experts")
        return dense_among([kind == "sparse" for kind in types], entries.pop("intermediate_size"))

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        dense = dense_layers(model)
        types = ["dense" if layer in dense else "sparse" for layer in range(model.num_layers)]
        return {"mlp_layer_types": types, **dense_width(model)}


class SelectionBias:
    """LFM2 may choose experts without a bias."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        if not entries.pop("use_expert_bias"):
            return {}
        return {"feed_forward": {"router": {"selection_bias": True}, "balance": {"bias_rate": 0.0}}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        return {"use_expert_bias": model.feed_forward.router.selection_bias}


class GroupsByBestExpert:
    """DeepSeek-V2 scores groups of experts by the best expert of each, or has none."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        method, count, kept = (entries.pop(key, None) for key in ("topk_method", "n_group", "topk_group"))
        if method == "greedy":
            return {}
        if method != "group_limited_greedy":
            raise InputError(f"{where}: topk_method = {method!r}, and jaxlm has greedy and group_limited_greedy alone")
        return {"feed_forward": {"router": {"groups": {"count": count or 1, "kept": kept or 1, "score": "max"}}}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        groups = model.feed_forward.router.groups
        if groups is None:
            return {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
        if groups.score != "max":
            raise InputError(f"{family.name} scores groups of experts by their best")
        return {"topk_method": "group_limited_greedy", "n_group": groups.count, "topk_group": groups.kept}


def dense_among(sparse: list[bool], width: int) -> dict[str, Any]:
    """Return what layers with experts, by layer, and dense layers of this width between them change of [model]."""
    if all(sparse):
        return {}
    dense = {"kind": "dense", "d_ff": width, "activation": "silu", "gated": True}
    return {LAYERS: [("mixture", {}) if is_sparse else ("dense", {"feed_forward": dense}) for is_sparse in sparse]}


def dense_layers(model: ModelConfig) -> list[int]:
    """Return the layers without experts."""
    return [layer for layer, block in enumerate(model.layers) if block.feed_forward.kind == "dense"]


def dense_width(model: ModelConfig) -> dict[str, Any]:
    """Return the key of the dense layers' width, which a model without such layers leaves out."""
    dense = dense_layers(model)
    return {"intermediate_size": model.layers[dense[0]].feed_forward.d_ff} if dense else {}


class ExpertGroups:
    """DeepSeek-V3 and what derives from it score groups of experts by their best two, and always name a number of
    groups: where all are kept, they limit no choice."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        count, kept = (entries.pop(key, None) or 1 for key in ("n_group", "topk_group"))
        groups = {"count": count, "kept": kept, "score": "top2_sum"}
        return {} if count == kept else {"feed_forward": {"router": {"groups": groups}}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        groups = model.feed_forward.router.groups
        if groups is not None and groups.score != "top2_sum":
            raise InputError(f"{family.name} scores groups of experts by their best two")
        return {"n_group": groups.count if groups else 1, "topk_group": groups.kept if groups else 1}


class SharedExperts:
    """DeepSeek gives the number of shared experts, each as wide as one that is chosen: one layer here."""

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        count = entries.pop("n_shared_experts", None)
        if count is not None and (type(count) is not int or count < 0):
            raise InputError(f"{where}: n_shared_experts = {count!r}; it must be a whole number from 0 up")
        return {"feed_forward": {"shared": {"d_ff": count * values["feed_forward"]["d_ff"]}}} if count else {}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        shared, width = model.feed_forward.shared, model.feed_forward.d_ff
        if shared is not None and shared.d_ff % width:
            raise InputError(f"{family.name} has shared experts as wide as the others")
        return {"n_shared_experts": 0 if shared is None else shared.d_ff // width}


def empty_tensors(model: ModelConfig, family: Family) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors without elements, by name: those of shared experts in layers that have none. Classes
    of transformers have them, of no channels, and report those that a file lacks as missing."""
    if "shared experts" not in family.composites:
        return {}
    layers = [layer for layer, block in enumerate(model.layers) if block.feed_forward.kind == "mixture"]
    without = [layer for layer in layers if getattr(model.layers[layer].feed_forward, "shared", None) is None]
    shapes = {f"{_SHARED}gate": (model.d_model, 0), f"{_SHARED}up": (model.d_model, 0)}
    shapes |= {f"{_SHARED}down": (0, model.d_model)}
    return {
        rule.name.replace("{l}", str(layer)): rule.pattern.stored_shape([shapes[rule.paths[0]]])
        for rule in family.rules
        if rule.paths[0] in shapes and rule.pattern is not None
        for layer in without
    }


@dataclass(frozen=True)
class NormalisedWeights:
    """Some families add a small number to the sum that the weights of the chosen experts are divided by."""

    epsilon: float

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        normalise = entries.pop("norm_topk_prob")
        router = {"normalise": True, "epsilon": self.epsilon} if normalise else {"normalise": False}
        return {"feed_forward": {"router": router}}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        return {"norm_topk_prob": model.feed_forward.router.normalise}
