"""Layers that every block is made of: linear maps, norms, dropout."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models import config, kernels
from jaxlm.models.parameters import Module, ones, param, scope, zeros
from jaxlm.parallel.partition import constrain, is_sharded
from kernels_pallas import layer_norm, rms_norm


def linear(x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None = None, copies: int = 1) -> jax.Array:
    """Return x [B, T, *inputs] · kernel [*inputs, *outputs] (+ bias [*outputs]), [B, T, *outputs] in x's dtype.

    The kernel's declared axes say how many dimensions are inputs. `copies` repeats each entry along the first output
    dimension. Where T is not sharded it is one [B·T, I] × [I, O] product: XLA's CPU code for it is a third faster than
    for the batched form.
    """
    contracted = len(kernel.inputs)
    rows, inputs = x.shape[: x.ndim - contracted], math.prod(kernel.shape[:contracted])
    with scope(kernel):
        weights = _copied(kernel, contracted, copies)
        if is_sharded("residual"):
            y = jnp.tensordot(x, weights, contracted)
        else:
            y = jnp.matmul(x.reshape(-1, inputs), weights.reshape(inputs, -1))
            y = y.reshape(*rows, *weights.shape[contracted:])
        return y if bias is None else y + _spread(_copied(bias, 0, copies), y)


def _copied(parameter: nnx.Param, dimension: int, copies: int) -> jax.Array:
    """Repeat each entry of a replicated dimension `copies` times, and shard the result."""
    if copies == 1:
        return parameter[...]
    axes = parameter.axes[-parameter[...].ndim :]
    return constrain(jnp.repeat(constrain(parameter[...], *axes), copies, axis=dimension), *axes)


def _spread(bias: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast a bias [*outputs] to the shape and dtype of an array [..., *outputs].

    It goes through float32, in which its gradient is then accumulated: XLA for GPUs and CPUs would round each sum of
    two to bfloat16.
    """
    wide = bias.astype(jnp.promote_types(bias.dtype, jnp.float32))
    return jnp.broadcast_to(wide, like.shape).astype(like.dtype)


def all_gather_sequence(x_BTD: jax.Array) -> jax.Array:
    """Return the normalised residual [B, T, D] with all of T on each device, gathered in its present dtype."""
    # Without the first constraint the partitioner gathers before the cast from float32.
    x_BTD = constrain(x_BTD, "batch", "residual", "act_model")
    return constrain(x_BTD, "batch", "sequence", "act_model")


class RMSNorm(Module):
    """x / √(mean(x²) + ε) · scale over the last dimension, or times 1 + scale, statistics in float32
    (arXiv:1910.07467)."""

    def __init__(self, model: config.ModelConfig, width: int, axis: str, rngs: nnx.Rngs):
        assert isinstance(model.norm, config.RMSNormConfig)
        self.settings = model.norm
        self.scale = param(rngs, (width,), axis, zeros if model.norm.plus_one else ones)

    def __call__(self, x: jax.Array, axes: kernels.Axes = kernels.RESIDUAL, residual: jax.Array | None = None) -> Any:
        """Return the norm of x [..., width], which has these logical axes; with a residual (x + residual, its norm)."""
        options = {"epsilon": self.settings.epsilon, "plus_one": self.settings.plus_one}
        return _normalise(rms_norm, x, axes, residual, (self.scale[...],), **options)


class LayerNorm(Module):
    """(x − mean) / √(var + ε) · scale + bias over the last dimension, statistics in float32 (arXiv:1607.06450)."""

    def __init__(self, model: config.ModelConfig, width: int, axis: str, rngs: nnx.Rngs):
        assert isinstance(model.norm, config.LayerNormConfig)
        self.settings = model.norm
        self.scale = param(rngs, (width,), axis, ones)
        self.bias = param(rngs, (width,), axis, zeros) if model.norm.bias else None

    def __call__(self, x: jax.Array, axes: kernels.Axes = kernels.RESIDUAL, residual: jax.Array | None = None) -> Any:
        """Return the norm of x [..., width], which has these logical axes; with a residual (x + residual, its norm)."""
        vectors = self.scale[...], None if self.bias is None else self.bias[...]
        return _normalise(layer_norm, x, axes, residual, vectors, epsilon=self.settings.epsilon)


def _normalise(
    operation: Callable,
    x: jax.Array,
    axes: kernels.Axes,
    residual: jax.Array | None,
    vectors: tuple[jax.Array | None, ...],
    **options: Any,
) -> Any:
    """Return the norm of x, which has these logical axes, the last one unsharded; with a residual the sum and its norm,
    by one kernel."""

    def normalise(x: jax.Array, residual: jax.Array | None, *vectors: jax.Array | None, **options: Any) -> Any:
        return operation(x, *vectors, residual=residual, **options)

    operands = (x, axes), (residual, axes), *((v, axes[-1:]) for v in vectors)
    return kernels.run(normalise, *operands, **options)


_NORMS = {"rms": RMSNorm, "layer": LayerNorm}


def norm(model: config.ModelConfig, width: int, rngs: nnx.Rngs, axis: str = "channels") -> RMSNorm | LayerNorm:
    """Return the norm that the configuration names, over `width` channels."""
    return _NORMS[model.norm.kind](model, width, axis, rngs)


class Dropout(NamedTuple):
    """Inverted dropout (Srivastava et al. 2014); a `key` of None drops nothing, as in evaluation."""

    rate: float = 0.0
    key: jax.Array | None = None

    def __call__(self, x: jax.Array, site: int) -> jax.Array:
        """Zero each element of x with probability `rate`, another mask per site."""
        if self.key is None or self.rate == 0.0:
            return x
        keep = jax.random.bernoulli(jax.random.fold_in(self.key, site), 1.0 - self.rate, x.shape)
        return jnp.where(keep, x / (1.0 - self.rate), jnp.zeros_like(x))

    def at(self, layer: jax.Array | int) -> "Dropout":
        """Return the dropout of one layer."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, layer))
