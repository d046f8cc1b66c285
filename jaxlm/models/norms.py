"""Norm layers, over one or more of the last dimensions of an array, by the `kind` of `[model.norm]`."""

from typing import Any, Protocol

import jax
from flax import nnx

from jaxlm.core.registry import Registry
from jaxlm.models import doors
from jaxlm.models.block_config import NORMS
from jaxlm.models.config import ModelConfig
from jaxlm.models.logical_axes import HEADS, KV_HEADS, RESIDUAL, Axes
from jaxlm.models.norm_config import LayerNormConfig, NormConfig, RMSNormConfig
from jaxlm.models.parameters import Module, ones, param, zeros
from kernels_pallas import layer_norm, rms_norm


class Norm(Protocol):
    """A norm: a module made of (model, rngs, shape, axes), the shape and the axes of the dimensions that it is over."""

    def __call__(self, x: jax.Array, axes: Axes = RESIDUAL, residual: jax.Array | None = None) -> Any:
        """Return the norm of x, which has these logical axes; with a residual (x + residual, its norm)."""
        ...


class RMSNorm(Module):
    """x / √(mean(x²) + ε) · scale, or times 1 + scale, statistics in float32 (arXiv:1910.07467)."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs, shape: tuple[int, ...], axes: str):
        self.settings, self.dimensions = model.norm, len(shape)
        initial = zeros if model.norm.plus_one else ones
        self.scale = param(rngs, shape, axes, initial) if model.norm.scale else None

    def __call__(self, x: jax.Array, axes: Axes = RESIDUAL, residual: jax.Array | None = None) -> Any:
        """Return the norm of x, which has these logical axes; with a residual (x + residual, its norm)."""
        options = {"epsilon": self.settings.epsilon, "plus_one": self.settings.plus_one}
        return doors.norm(rms_norm, x, axes, (self.scale,), residual, self.dimensions, **options)


class GroupedRMSNorm(Module):
    """RMSNorm of the channels of each of several groups of heads, times a scale of each channel (Mamba-2)."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs, heads: int, channels: int, groups: int):
        self.groups, self.epsilon = groups, _epsilon(model)
        self.scale = param(rngs, (heads, channels), "heads head_dim", ones)

    def __call__(self, x_BTNH: jax.Array) -> jax.Array:
        """Return the norm of x [B, T, N, H]."""
        options = {"epsilon": self.epsilon, "plus_one": False}
        if self.groups == 1:
            return doors.norm(rms_norm, x_BTNH, HEADS, (self.scale,), dimensions=2, **options)
        x_BTGI = x_BTNH.reshape(*x_BTNH.shape[:2], self.groups, -1)
        y_BTGI = doors.norm(rms_norm, x_BTGI, (*KV_HEADS[:3], None), (None,), **options)
        return y_BTGI.reshape(x_BTNH.shape) * self.scale[...][None, None]


class LayerNorm(Module):
    """(x − mean) / √(var + ε) · scale + bias, statistics in float32 (arXiv:1607.06450)."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs, shape: tuple[int, ...], axes: str):
        self.settings, self.dimensions = model.norm, len(shape)
        self.scale = param(rngs, shape, axes, ones) if model.norm.scale else None
        self.bias = param(rngs, shape, axes, zeros) if model.norm.bias else None

    def __call__(self, x: jax.Array, axes: Axes = RESIDUAL, residual: jax.Array | None = None) -> Any:
        """Return the norm of x, which has these logical axes; with a residual (x + residual, its norm)."""
        vectors, epsilon = (self.scale, self.bias), self.settings.epsilon
        return doors.norm(layer_norm, x, axes, vectors, residual, self.dimensions, epsilon=epsilon)


class NoNorm(Module):
    """x itself, where a block has no norm."""

    def __call__(self, x: jax.Array, axes: Axes = RESIDUAL, residual: jax.Array | None = None) -> Any:
        """Return x; with a residual (x + residual, x + residual)."""
        if residual is None:
            return x
        total = doors.add(x, residual)
        return total, total


_REGISTRY = Registry(NORMS, NormConfig, {RMSNormConfig: RMSNorm, LayerNormConfig: LayerNorm})
register, unregister = _REGISTRY.register, _REGISTRY.unregister


def norm(
    model: ModelConfig,
    rngs: nnx.Rngs,
    shape: tuple[int, ...] | None = None,
    axes: str = "channels",
    epsilon: float | None = None,
) -> Norm:
    """Return the norm that the configuration names, over dimensions of this shape; over the residual's where None.

    `epsilon`: in place of the configuration's, for a kind of norm that has one.
    """
    if epsilon is not None and "epsilon" in type(model.norm).model_fields:
        model = model.model_copy(update={"norm": model.norm.model_copy(update={"epsilon": epsilon})})
    return _REGISTRY.of(model.norm)(model, rngs, shape or (model.d_model,), axes)


def plain_rms_norm(model: ModelConfig, rngs: nnx.Rngs, shape: tuple[int, ...], axes: str) -> RMSNorm:
    """Return RMSNorm with a scale that starts at 1, whatever the model's norm is, and with the epsilon of that."""
    return RMSNorm(model.model_copy(update={"norm": RMSNormConfig(epsilon=_epsilon(model))}), rngs, shape, axes)


def _epsilon(model: ModelConfig) -> float:
    """Return the epsilon of a model's norms; 1e-6 where these have none."""
    return getattr(model.norm, "epsilon", 1e-6)
