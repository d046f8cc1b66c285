"""Adafactor over declared matrices, one per layer. (Optax factors the two largest dimensions, whatever they are.)"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxlm.models.tree import Dimensions, Tree

_TINY_SQUARE = 1e-30  # ε₁ of the paper, section 9
_SMALLEST_SCALE = 1e-3  # ε₂


class AdafactorState(NamedTuple):
    """State of Adafactor, float32. `count`: updates so far. `second`: for a matrix {"inputs": [*stack, *inputs],
    "outputs": [*stack, *outputs]}, the mean squared gradients over the outputs and over the inputs; for a vector the
    squared gradients themselves."""

    count: jax.Array
    second: Tree


def scale_by_adafactor(dimensions: Tree, decay_exponent: float, update_clip: float) -> optax.GradientTransformation:
    """Return the directions of Shazeer and Stern 2018 (arXiv:1804.04235), algorithms 4 and 5, times the parameter's
    scale. Every root mean square is over one layer's parameter, stacked or not."""

    def init(parameters: Tree) -> AdafactorState:
        def moments(d: Dimensions, p: jax.Array) -> jax.Array | dict[str, jax.Array]:
            if not d.inputs:
                return jnp.zeros_like(p)
            return {"inputs": jnp.zeros(_without(p, d.outputs)), "outputs": jnp.zeros(_without(p, d.inputs))}

        return AdafactorState(jnp.zeros((), jnp.int32), jax.tree.map(moments, dimensions, parameters))

    def update(gradients: Tree, state: AdafactorState, parameters: Tree) -> tuple[Tree, AdafactorState]:
        count = state.count + 1
        decay = 1.0 - count.astype(jnp.float32) ** -decay_exponent

        def averaged(d: Dimensions, g: jax.Array, second: jax.Array | dict) -> jax.Array | dict:
            square = jnp.square(g) + _TINY_SQUARE
            if not d.inputs:
                return decay * second + (1.0 - decay) * square
            means = {"inputs": jnp.mean(square, axis=d.outputs), "outputs": jnp.mean(square, axis=d.inputs)}
            return {side: decay * second[side] + (1.0 - decay) * means[side] for side in means}

        def direction(d: Dimensions, g: jax.Array, second: jax.Array | dict, p: jax.Array) -> jax.Array:
            layer = d.inputs + d.outputs
            if d.inputs:
                by_input = jnp.expand_dims(second["inputs"], d.outputs)
                by_output = jnp.expand_dims(second["outputs"], d.inputs)
                share = by_input / jnp.mean(by_input, axis=d.inputs, keepdims=True)
                u = g * _over(g, jax.lax.rsqrt(share)) * _over(g, jax.lax.rsqrt(by_output))
            else:
                u = g * jax.lax.rsqrt(second)
            u = u / _over(u, jnp.maximum(1.0, _rms(u, layer) / update_clip))
            return u * _over(u, jnp.maximum(_SMALLEST_SCALE, _rms(p, layer)))

        second = jax.tree.map(averaged, dimensions, gradients, state.second)
        return jax.tree.map(direction, dimensions, gradients, second, parameters), AdafactorState(count, second)

    return optax.GradientTransformation(init, update)


def _without(x: jax.Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(x.shape) if axis not in axes)


def _rms(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))


def _over(x: jax.Array, small: jax.Array) -> jax.Array:
    """Broadcast an array with dimensions of size 1 to the shape of x."""
    return jnp.broadcast_to(small, x.shape)
