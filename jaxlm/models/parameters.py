"""The declaration of parameters: once, in their module, with everything that other code reads about them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]

RANK = "lora"  # the logical axis between the two matrices of an adapter
# Axes along which parameters are many of a kind rather than one.
STACKED = frozenset({"layers", "experts"})

zeros: Initializer = jax.nn.initializers.zeros
ones: Initializer = jax.nn.initializers.ones


def uniform(bound: float) -> Initializer:
    """Return the initializer that draws from between −bound and bound."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def normal(std: float) -> Initializer:
    """Return the initializer that draws from N(0, std²)."""
    return jax.nn.initializers.normal(std)


# A user context: JAX keys its caches by it, so that what is traced here is not reused outside.
_shapes_alone = jax.make_user_context(False)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Declare parameters inside without their initial values, whose tracing is most of an abstract tree's time."""
    with _shapes_alone(True):
        yield


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: str, init: Initializer, kept: str = "") -> nnx.Param:
    """Declare a float32 parameter; the only way to do so.

    Args:
      rngs: its `params` stream draws the initial value.
      shape: one size per logical axis.
      axes: names of the logical axes. A matrix has an arrow between the axes that it contracts and those
        that it makes ("embed -> heads head_dim"), or a reversed one where those that it makes stand first
        ("experts feed_forward <- embed"); a vector of gains or biases has none ("heads head_dim").
      init: initializer of `jax.nn.initializers`.
      kept: the axes in the order in which an engine on a CPU keeps a matrix that is multiplied head by head.

    Returns an `nnx.Param` with metadata `axes`, all names, `inputs`, those that it contracts, `by_outputs`, whether
    these stand last, and `kept`: weight decay, `linear`, the engine and the sharding table read them, so that nothing
    is ever guessed from a number of dimensions.
    """
    by_outputs = "<-" in axes
    left, arrow, right = axes.partition("<-" if by_outputs else "->")
    names, inputs = (*left.split(), *right.split()), right if by_outputs else left
    if len(names) != len(shape):
        raise ValueError(f"axes {axes!r} name {len(names)} dimensions; the shape {shape} has {len(shape)}")
    value = jnp.zeros(shape, jnp.float32) if _shapes_alone.value else init(rngs.params(), shape, jnp.float32)
    contracted = tuple(inputs.split()) if arrow else ()
    return nnx.Param(value, axes=names, inputs=contracted, by_outputs=by_outputs, kept=tuple(kept.split()))


def state(shape: tuple[int, ...], axes: str, rate: float) -> nnx.Param:
    """Declare zeros that counts of a step move, by `rate`, and no gradient (`jaxlm.training.balancing`). They are
    float32 whatever the model computes in, and count as no parameters."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=tuple(axes.split()), inputs=(), rate=rate)


def is_state(parameter: nnx.Param) -> bool:
    """Return whether `state` declared a leaf of a tree."""
    return "rate" in parameter.get_metadata()


def keeps_dtype(parameter: nnx.Param) -> bool:
    """Return whether a leaf of a tree has one dtype, whatever the model computes in: state, and what is quantised."""
    return is_state(parameter) or bool(parameter.get_metadata().get("keeps_dtype"))


def is_quantized(parameter: nnx.Param) -> bool:
    """Return whether a parameter is of a quantised matrix."""
    return keeps_dtype(parameter) and not is_state(parameter)


def rate_of(parameter: nnx.Param) -> float:
    """Return the rate of state; 0 of a parameter."""
    return parameter.get_metadata().get("rate", 0.0)


class Module(nnx.Module):
    """A module whose submodules are named by the attributes that hold them.

    In the compiled program and in profiles its operations carry its path in the abstract tree
    ("layers/attention/query").
    """

    name: str | None = None  # in its parent; the root has none

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__call__" in vars(cls):
            cls.__call__ = _named(cls.__call__)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module):
            value.name = name
        elif isinstance(value, nnx.Param):
            value.set_metadata(name=name)
        super().__setattr__(name, value)


def is_adapter(parameter: nnx.Param) -> bool:
    """Return whether a parameter is one of an adapter."""
    return RANK in parameter.axes


def axes_of(parameter: nnx.Param) -> tuple[str, ...]:
    """Return the logical axes of a parameter's value: inside a loop over layers that of the layers is gone."""
    return parameter.axes[-parameter[...].ndim :]


def scope(parameter: nnx.Param | Module | None) -> AbstractContextManager:
    """Add the parameter's name to the path of everything computed inside."""
    name = (
        parameter.get_metadata().get("name") if isinstance(parameter, nnx.Param) else getattr(parameter, "name", None)
    )
    return jax.named_scope(name) if name else nullcontext()


def _named(call: Callable) -> Callable:
    @functools.wraps(call)
    def inner(self: Module, *arguments: Any, **options: Any) -> Any:
        with jax.named_scope(self.name) if self.name else nullcontext():
            return call(self, *arguments, **options)

    return inner


_Layer = TypeVar("_Layer", bound=Module)


def stack(make_layer: Callable[[nnx.Rngs], _Layer], n: int, rngs: nnx.Rngs) -> _Layer:
    """Return n layers as one module whose parameters are [n, …], with the leading axis "layers"."""
    layers = nnx.vmap(make_layer)(rngs.split(n))
    for _, variable in nnx.iter_graph(layers):
        if isinstance(variable, nnx.Param):
            variable.set_metadata(axes=("layers", *variable.axes))
    return layers
