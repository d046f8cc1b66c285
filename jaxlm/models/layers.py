"""The small parts that every block is made of: linear maps, norms, activations, dropout."""

import functools
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
from kernels_pallas.core import activations


def linear(x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None = None, copies: int = 1) -> jax.Array:
    """x [B, T, *inputs] · kernel [*inputs, *outputs] (+ bias [*outputs]) → [B, T, *outputs], in x's dtype.

    With `copies` each entry along the first of the outputs comes so many times, side by side.

    The kernel's declared axes say how many dimensions are inputs. Where no device has a part of T alone it is one
    [B·T, I] × [I, O] product: XLA's CPU code for it is a third faster than for the batched form.
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
    """So many copies of each entry along a dimension, which a device holds whole, and takes its part of here."""
    if copies == 1:
        return parameter[...]
    axes = parameter.axes[-parameter[...].ndim :]
    return constrain(jnp.repeat(constrain(parameter[...], *axes), copies, axis=dimension), *axes)


def _spread(bias: jax.Array, like: jax.Array) -> jax.Array:
    """A bias [*outputs] for every row of an array [..., *outputs], in its dtype. By way of float32, in which its
    gradient is then added up: XLA for GPUs and CPUs would round each sum of two to bfloat16."""
    wide = bias.astype(jnp.promote_types(bias.dtype, jnp.float32))
    return jnp.broadcast_to(wide, like.shape).astype(like.dtype)


def whole_sequence(x_BTD: jax.Array) -> jax.Array:
    """The normalised stream [B, T, D] with all of T on each device, gathered in the dtype that it has now: without
    the first of the two the partitioner gathers it before it is narrowed from float32."""
    x_BTD = constrain(x_BTD, "batch", "residual", "act_model")
    return constrain(x_BTD, "batch", "sequence", "act_model")


def product_in_float32(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum(subscripts, a, b) with a float32 result, whose backward pass multiplies in the operands' dtype.

    JAX alone would multiply the float32 cotangent with operands widened to float32, at a fraction of a matrix
    unit's rate. Every index of an operand must appear in the other or in the result.
    """
    if a.dtype == b.dtype == jnp.float32:
        return jnp.einsum(subscripts, a, b)
    return _product_in_float32(subscripts, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product_in_float32(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _forward(subscripts: str, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple]:
    return _product_in_float32(subscripts, a, b), (a, b)


def _backward(subscripts: str, operands: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    (a, b), (inputs, result) = operands, subscripts.split("->")
    left, right = inputs.split(",")
    narrow = cotangent.astype(a.dtype)
    return jnp.einsum(f"{result},{right}->{left}", narrow, b), jnp.einsum(f"{result},{left}->{right}", narrow, a)


_product_in_float32.defvjp(_forward, _backward)


class RMSNorm(Module):
    """x / √(mean(x²) + ε) · scale over the last dimension, or times 1 + scale, statistics in float32
    (arXiv:1910.07467)."""

    def __init__(self, model: config.ModelConfig, width: int, axis: str, rngs: nnx.Rngs):
        assert isinstance(model.norm, config.RMSNormConfig)
        self.settings = model.norm
        self.scale = param(rngs, (width,), axis, zeros if model.norm.plus_one else ones)

    def __call__(self, x: jax.Array, axes: kernels.Axes = kernels.STREAM, residual: jax.Array | None = None) -> Any:
        """x [..., width], with these logical axes → the same; with a residual like x (x + residual, its norm)."""
        how = {"epsilon": self.settings.epsilon, "plus_one": self.settings.plus_one}
        return _normalise(rms_norm, x, axes, residual, (self.scale[...],), **how)


class LayerNorm(Module):
    """(x − mean) / √(var + ε) · scale + bias over the last dimension, statistics in float32 (arXiv:1607.06450)."""

    def __init__(self, model: config.ModelConfig, width: int, axis: str, rngs: nnx.Rngs):
        assert isinstance(model.norm, config.LayerNormConfig)
        self.settings = model.norm
        self.scale = param(rngs, (width,), axis, ones)
        self.bias = param(rngs, (width,), axis, zeros) if model.norm.bias else None

    def __call__(self, x: jax.Array, axes: kernels.Axes = kernels.STREAM, residual: jax.Array | None = None) -> Any:
        """x [..., width], with these logical axes → the same; with a residual like x (x + residual, its norm)."""
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
    """The norm of x, which has these logical axes, the last whole on each device; with a residual the sum of both and
    its norm, by one kernel."""

    def normalise(x: jax.Array, residual: jax.Array | None, *vectors: jax.Array | None, **how: Any) -> Any:
        return operation(x, *vectors, residual=residual, **how)

    operands = (x, axes), (residual, axes), *((v, axes[-1:]) for v in vectors)
    return kernels.run(normalise, *operands, **options)


_NORMS = {"rms": RMSNorm, "layer": LayerNorm}


def norm(model: config.ModelConfig, width: int, rngs: nnx.Rngs, axis: str = "channels") -> RMSNorm | LayerNorm:
    """The norm that the configuration names, over `width` channels."""
    return _NORMS[model.norm.kind](model, width, axis, rngs)


def activation(name: str, x: jax.Array) -> jax.Array:
    """The activation of this name (`kernels_pallas.core.activations`) of each number of x [...]: computed in float32,
    given in x's shape and dtype, with one array like x, its slope, for the backward pass."""
    return _with_slopes(activations.KERNEL[name], x)


def gated(name: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """activation(gate) · up, number by number, like `activation`; what `kernels_pallas.gated_activation` computes."""
    return _with_slopes(_Gated(name), gate, up)


def soft_capped(x: jax.Array, cap: float) -> jax.Array:
    """cap · tanh(x / cap) of each number of x [...] (arXiv:2408.00118, section 2), like `activation`."""
    return _with_slopes(_SoftCap(cap), x)


class _Gated(NamedTuple):
    name: str

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return activations.KERNEL[self.name](gate) * up


class _SoftCap(NamedTuple):
    cap: float

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.cap * jnp.tanh(x / self.cap)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_slopes(function: Callable, *x: jax.Array) -> jax.Array:
    """A function of numbers, of each in arrays alike: computed in float32, given in their dtype. The backward pass
    reads one such array for each operand, the slope, where JAX would keep each step of the formula."""
    return function(*(each.astype(jnp.float32) for each in x)).astype(x[0].dtype)


@_with_slopes.defjvp
def _with_slopes_jvp(function: Callable, x: tuple, tangents: tuple) -> tuple[jax.Array, Any]:
    value, pull_back = jax.vjp(function, *(each.astype(jnp.float32) for each in x))
    slopes = (slope.astype(x[0].dtype) for slope in pull_back(jnp.ones_like(value)))
    return value.astype(x[0].dtype), sum(t * slope for t, slope in zip(tangents, slopes, strict=True))


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
        """The dropout of one layer."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, layer))
