"""Layers of attention and recurrent layers of a published config.json, in its several spellings, both ways."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxlm.core.errors import InputError
from jaxlm.core.schema import kind_of
from jaxlm.families.family import Family
from jaxlm.families.layer_patterns import LAYERS
from jaxlm.models.config import ModelConfig
from jaxlm.models.layer_config import AttentionConfig
from jaxlm.models.recurrent_config import GatedDeltaConfig, ShortConvolutionConfig

_TYPES = "layer_types"
_ATTENTION = ("full_attention", "attention")  # the first is written


class OlderKey(Protocol):
    """The key that older files have in place of `layer_types`."""

    name: str

    def read(self, value: Any, layers: int, where: str) -> list[bool]:
        """Return whether each layer has attention; the value is None where a file leaves out both keys. Raises
        InputError for a value that is none."""
        ...

    def write(self, has_attention: Sequence[bool]) -> dict[str, Any]:
        """Return the key, or nothing where it cannot say it."""
        ...


@dataclass(frozen=True)
class AttentionInterval:
    """Every n-th layer has attention."""

    default: int
    name: str = "full_attention_interval"

    def read(self, value: Any, layers: int, where: str) -> list[bool]:
        every = self.default if value is None else value
        if type(every) is not int or every < 1:
            raise InputError(f"{where}: {self.name} = {value!r}; it must be a whole number above 0")
        return [(layer + 1) % every == 0 for layer in range(layers)]

    def write(self, has_attention: Sequence[bool]) -> dict[str, Any]:
        layers = len(has_attention)
        every = next((n for n in range(1, layers + 2) if self.read(n, layers, "") == list(has_attention)), None)
        return {} if every is None else {self.name: every}


@dataclass(frozen=True)
class AttentionIndices:
    """A list has the layers with attention, which are all without a list."""

    name: str = "full_attn_idxs"

    def read(self, value: Any, layers: int, where: str) -> list[bool]:
        listed = range(layers) if value is None else value
        if value is not None and not (
            isinstance(value, list) and all(type(each) is int and 0 <= each < layers for each in value)
        ):
            raise InputError(f"{where}: {self.name} = {value!r}; it must be a list of layers from 0 to {layers - 1}")
        return [layer in listed for layer in range(layers)]

    def write(self, has_attention: Sequence[bool]) -> dict[str, Any]:
        return {self.name: [layer for layer, has_it in enumerate(has_attention) if has_it]}


@dataclass(frozen=True)
class RecurrentLayers:
    """The layers of a family whose other layers have attention.

    Attributes:
      section: the recurrent layers.
      keys: by key of config.json, the key of the section with the same value.
      types: names in `layer_types` of the recurrent layers, the first of which is written.
      name: of these layers in a pattern.
      older: the key of older files; None where the class has recurrent layers alone without `layer_types`.
      attention: the name in `layer_types` of layers of attention that is written.
    """

    section: type[AttentionConfig]
    keys: Mapping[str, str]
    types: tuple[str, ...]
    name: str
    older: OlderKey | None
    attention: str = _ATTENTION[0]

    def read(self, entries: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Take the keys of recurrent layers out of `entries`, and return what each layer changes of [model].

        Raises InputError for a kind of layer that the family does not have, and where `layer_types` and the older key
        say otherwise.
        """
        layers, types = values["num_layers"], entries.pop(_TYPES, None)
        older, has_attention = None, [False] * layers
        if self.older is not None:
            older = entries.pop(self.older.name, None)
            has_attention = self.older.read(older, layers, where)
        if types is not None:
            listed = self._listed(types, layers, where)
            if self.older is not None and older is not None and listed != has_attention:
                raise InputError(f"{where}: {_TYPES} and {self.older.name} = {older!r} differ; leave one out")
            has_attention = listed
        found = {ours: entries.pop(theirs) for theirs, ours in self.keys.items()}
        sizes = {ours: value for ours, value in found.items() if value is not None}
        recurrent = self.name, {"attention": {"kind": kind_of(self.section), **sizes}}
        return {LAYERS: [("full", {}) if has_it else recurrent for has_it in has_attention]}

    def write(self, model: ModelConfig, family: Family) -> dict[str, Any]:
        """Return the keys of recurrent layers, in both spellings. Raises InputError if the family has no keys for the
        model's layers."""
        recurrent = {block.attention for block in model.layers if isinstance(block.attention, self.section)}
        if len(recurrent) > 1:
            raise InputError(f"{family.name} has one kind of {self.name} layers")
        has_attention = [not isinstance(block.attention, self.section) for block in model.layers]
        sizes = {theirs: family.defaults[theirs] for theirs in self.keys}
        sizes |= {theirs: getattr(each, ours) for each in recurrent for theirs, ours in self.keys.items()}
        types = [self.attention if has_it else self.types[0] for has_it in has_attention]
        return {**sizes, _TYPES: types, **({} if self.older is None else self.older.write(has_attention))}

    def _listed(self, types: Any, layers: int, where: str) -> list[bool]:
        """Return whether each layer has attention, of `layer_types`."""
        known = {*_ATTENTION, *self.types}
        if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
            raise InputError(f"{where}: {_TYPES} = {types!r}; it must be a list of the kinds of the layers")
        if strange := sorted(set(types) - known):
            names = " and ".join((self.attention, self.types[0]))
            raise InputError(f"{where}: {_TYPES} has {', '.join(strange)}, and jaxlm has {names} here")
        if len(types) != layers:
            raise InputError(f"{where}: {_TYPES} names {len(types)} layers, and num_hidden_layers = {layers}")
        return [each in _ATTENTION for each in types]


# Qwen3-Next and Qwen3.5.
GATED_DELTA_LAYERS = RecurrentLayers(
    GatedDeltaConfig,
    {
        "linear_num_key_heads": "num_key_heads",
        "linear_num_value_heads": "num_value_heads",
        "linear_key_head_dim": "key_dim",
        "linear_value_head_dim": "value_dim",
        "linear_conv_kernel_dim": "taps",
    },
    types=("linear_attention",),
    name="delta",
    older=AttentionInterval(4),
)

# LFM2.
SHORT_CONVOLUTION_LAYERS = RecurrentLayers(
    ShortConvolutionConfig,
    {"conv_L_cache": "taps", "conv_bias": "bias"},
    types=("conv",),
    name="convolution",
    older=AttentionIndices(),
)
