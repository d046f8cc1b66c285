"""The parameters of a model, and what its layers keep of earlier tokens."""

import functools
from fractions import Fraction

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from jaxlm.costs.counted.recorder import abstract
from jaxlm.models import tree
from jaxlm.models.cache import CacheEntry
from jaxlm.models.config import ModelConfig
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import using_rules
from jaxlm.parallel.rules import RULES, Kind


@functools.lru_cache(maxsize=256)
def parameters(
    model: ModelConfig, lora: LoraConfig | None = None, quantized: Quantization | None = None
) -> dict[str, tree.Dimensions]:
    """The dimensions of each parameter, by path, perhaps with adapters, or of quantised matrices."""
    return tree.paths(tree.dimensions(abstract(model, lora, quantized=quantized)[1]))


@functools.lru_cache(maxsize=256)
def base(model: ModelConfig, lora: LoraConfig, quantized: Quantization | None = None) -> frozenset[str]:
    """Return the paths of the parameters that adapters leave untrained."""
    return frozenset(tree.paths(tree.shapes(tree.trained(abstract(model, lora, quantized=quantized)[1])[1])))


@functools.lru_cache(maxsize=256)
def copied(
    model: ModelConfig, lora: LoraConfig | None = None, quantized: Quantization | None = None
) -> dict[str, Fraction]:
    """Return the share of each parameter that training copies before the loops over layers, by path; no zeros."""
    return {
        path: share for path, share in nnx.merge(*abstract(model, lora, quantized=quantized)).copied().items() if share
    }


@functools.lru_cache(maxsize=1024)
def slots(model: ModelConfig, kind: Kind, layout: Layout) -> dict[str, CacheEntry]:
    """Return what layers keep of earlier tokens, on a mesh of this layout."""
    mesh = AbstractMesh(tuple(layout.values()), tuple(layout), (AxisType.Auto,) * len(layout))
    with jax.sharding.use_abstract_mesh(mesh), using_rules(RULES[kind]):
        return nnx.merge(*abstract(model)).slots()


@functools.lru_cache(maxsize=256)
def windows(model: ModelConfig) -> tuple[int | None, ...]:
    """Return the windows in which layers read earlier tokens, each once."""
    entries = nnx.merge(*abstract(model)).slots().values()
    all_windows = [slot.window for entry in entries for slot in entry.slots.values() if slot.per == "token"]
    return tuple(dict.fromkeys(all_windows))
