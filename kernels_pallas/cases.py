"""What an operation is tried on, as data: tests, the compile matrix, benchmarks and the tuner read the same lists."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from kernels_pallas.launch import Costs

# The dtype of the case: each is tried in several.
FLOAT = "float"

Use = Literal["test", "compile", "bench"]


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument: its shape, its dtype, and how numbers are drawn for it.

    Attributes:
      draw: "normal" (times `scale`, plus `mean`), "zeros", "one_hot" along the last dimension (times `scale`), "mask"
        (True three times of four, and nowhere in the first row), "below" (integers in [0, scale)), or "labels" (the
        same, and −1 one time of four).
      differentiable: whether gradients with respect to it are checked; floats alone.
    """

    shape: tuple[int, ...]
    dtype: str = FLOAT
    draw: str = "normal"
    scale: float = 1.0
    mean: float = 0.0
    differentiable: bool = True

    def struct(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """Shape and dtype, where the case is tried in `dtype`."""
        return jax.ShapeDtypeStruct(self.shape, dtype if self.dtype == FLOAT else self.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One call of an operation.

    Attributes:
      name: unique among the operation's.
      arrays: arguments by name, None for one that is left out.
      options: static arguments by name.
      roundings: how often the operation, told to in its definition, rounds to its dtype within: tolerances grow by as
        many units in the last place.
      uses: "test": interpreted and held against the reference; "compile": for every chip; "bench": timed.
      dtypes: in which it is tried; benchmarks and the compile matrix take the first.
    """

    name: str
    arrays: Mapping[str, Array]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    roundings: int = 0
    uses: set[Use] | frozenset[Use] = frozenset({"test"})
    dtypes: tuple[str, ...] = ("float32",)

    def structs(self, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arguments."""
        return {name: array.struct(dtype) for name, array in self.arrays.items()}

    def draw(self, dtype: Any, seed: int = 0) -> dict[str, jax.Array]:
        """Random arguments."""
        keys = jax.random.split(jax.random.key(seed), max(len(self.arrays), 1))
        return {name: _draw(array, dtype, key) for (name, array), key in zip(self.arrays.items(), keys, strict=True)}

    def differentiable(self) -> tuple[str, ...]:
        """Names of the arguments with respect to which gradients are checked."""
        return tuple(name for name, a in self.arrays.items() if a.dtype == FLOAT and a.differentiable)


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An operation and all that proves it.

    Attributes:
      function: the public one; takes a case's arguments and options, `implementation` and `_interpret`.
      reference: the specification, in plain JAX; takes a case's arguments and options.
      implementations: names of the Pallas implementations.
      others: names of those that are not ours to compile, by XLA or a library: timed beside them.
      costs: what a call costs, from the shapes and dtypes of a case's arguments and its options.
      serves: whether an implementation serves a case in a dtype; where nothing is said, all do.
    """

    function: Callable[..., Any]
    reference: Callable[..., Any]
    implementations: tuple[str, ...]
    cases: tuple[Case, ...]
    costs: Callable[..., Costs]
    others: tuple[str, ...] = ()
    serves: Callable[[str, Case, str], bool] = lambda implementation, case, dtype: True

    @property
    def name(self) -> str:
        return self.function.__name__

    def used_in(self, use: Use) -> tuple[Case, ...]:
        """The cases with this use."""
        return tuple(case for case in self.cases if use in case.uses)


def _draw(array: Array, dtype: Any, key: jax.Array) -> jax.Array:
    shape, dtype = array.struct(dtype).shape, array.struct(dtype).dtype
    match array.draw:
        case "normal":
            # Drawn in the array's own precision, so that all of a case's dtypes see numbers they can hold.
            return (array.mean + array.scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
        case "zeros":
            return jnp.zeros(shape, dtype)
        case "one_hot":
            at = jax.random.randint(key, shape[:-1], 0, shape[-1])
            return (array.scale * jax.nn.one_hot(at, shape[-1])).astype(dtype)
        case "mask":
            rows = jnp.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
            return jax.random.bernoulli(key, 0.75, shape) & jnp.broadcast_to(rows > 0, shape)
        case "below":
            return jax.random.randint(key, shape, 0, int(array.scale)).astype(dtype)
        case "labels":
            some, which = jax.random.split(key)
            labels = jax.random.randint(which, shape, 0, int(array.scale))
            return jnp.where(jax.random.bernoulli(some, 0.75, shape), labels, -1).astype(dtype)
    raise ValueError(f"there is no way {array.draw!r} to draw numbers")
