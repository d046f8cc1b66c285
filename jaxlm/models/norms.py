"""Norm layers."""

from typing import Any

import jax
from flax import nnx

from jaxlm.models import config, operations
from jaxlm.models.operations import STREAM
from jaxlm.models.parameters import Module, ones, param, zeros
from jaxlm.models.recording import Axes
from kernels_pallas import layer_norm, rms_norm


class RMSNorm(Module):
    """x / √(mean(x²) + ε) · scale over the last dimension, or times 1 + scale, statistics in float32
    (arXiv:1910.07467)."""

    def __init__(self, model: config.ModelConfig, width: int, axis: str, rngs: nnx.Rngs):
        assert isinstance(model.norm, config.RMSNormConfig)
        self.settings = model.norm
        self.scale = param(rngs, (width,), axis, zeros if model.norm.plus_one else ones)

    def __call__(self, x: jax.Array, axes: Axes = STREAM, residual: jax.Array | None = None) -> Any:
        """Return the norm of x [..., width], which has these logical axes; with a residual (x + residual, its norm)."""
        options = {"epsilon": self.settings.epsilon, "plus_one": self.settings.plus_one}
        return operations.norm(rms_norm, x, axes, (self.scale[...],), residual, **options)


class LayerNorm(Module):
    """(x − mean) / √(var + ε) · scale + bias over the last dimension, statistics in float32 (arXiv:1607.06450)."""

    def __init__(self, model: config.ModelConfig, width: int, axis: str, rngs: nnx.Rngs):
        assert isinstance(model.norm, config.LayerNormConfig)
        self.settings = model.norm
        self.scale = param(rngs, (width,), axis, ones)
        self.bias = param(rngs, (width,), axis, zeros) if model.norm.bias else None

    def __call__(self, x: jax.Array, axes: Axes = STREAM, residual: jax.Array | None = None) -> Any:
        """Return the norm of x [..., width], which has these logical axes; with a residual (x + residual, its norm)."""
        vectors = self.scale[...], None if self.bias is None else self.bias[...]
        return operations.norm(layer_norm, x, axes, vectors, residual, epsilon=self.settings.epsilon)


class NoNorm(Module):
    """x itself, where a block has no norm."""

    def __call__(self, x: jax.Array, axes: Axes = STREAM, residual: jax.Array | None = None) -> Any:
        """Return x; with a residual (x + residual, x + residual)."""
        if residual is None:
            return x
        total = operations.add(x, residual)
        return total, total


_NORMS = {"rms": RMSNorm, "layer": LayerNorm}


def norm(model: config.ModelConfig, width: int, rngs: nnx.Rngs, axis: str = "channels") -> RMSNorm | LayerNorm:
    """Return the norm that the configuration names, over `width` channels."""
    return _NORMS[model.norm.kind](model, width, axis, rngs)
