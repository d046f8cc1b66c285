"""Test cases of an operation, as data: tests, the compile matrix, benchmarks and the tuner read the same lists."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.launch import KernelCosts
from kernels_pallas.core.measured import CallClass

# The dtype of the case, which is tried in several.
FLOAT = "float"

Use = Literal["test", "compile", "bench"]


@dataclasses.dataclass(frozen=True)
class CaseArray:
    """An argument: its shape, its dtype, and how its numbers are drawn.

    Attributes:
      draw: "normal" (times `scale`, plus `mean`), "zeros", "one_hot" along the last dimension (times `scale`), "mask"
        (True three times of four, and nowhere in the first row), "seldom" (True one time of 16), "below" (integers in
        [mean, mean + scale)), "labels" (those in [0, scale), and −1 one time of four), "groups" (sizes of uneven
        groups, some empty, that leave a few of `scale` rows), or "bytes" (all finite numbers of a dtype of eight bits).
      differentiable: whether gradients with respect to it are checked; only for floats.
    """

    shape: tuple[int, ...]
    dtype: str = FLOAT
    draw: str = "normal"
    scale: float = 1.0
    mean: float = 0.0
    differentiable: bool = True

    def struct(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype for a case tried in `dtype`."""
        return jax.ShapeDtypeStruct(self.shape, dtype if self.dtype == FLOAT else self.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class KernelCase:
    """One call of an operation.

    Attributes:
      name: unique among the operation's cases.
      arrays: arguments by name, None for one that is left out.
      options: static arguments by name.
      roundings: the number of times that the operation's definition rounds intermediate values to its dtype; tolerances
        grow by the same number of units in the last place.
      uses: "test": interpreted and compared with the reference; "compile": compiled for every chip; "bench": timed.
      dtypes: dtypes in which it is tried; benchmarks and the compile matrix take the first.
    """

    name: str
    arrays: Mapping[str, CaseArray]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    roundings: int = 0
    uses: set[Use] | frozenset[Use] = frozenset({"test"})
    dtypes: tuple[str, ...] = ("float32",)

    def structs(self, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of the arguments."""
        return {name: array.struct(dtype) for name, array in self.arrays.items()}

    def draw(self, dtype: Any, seed: int = 0) -> dict[str, jax.Array]:
        """Return random arguments, drawn by NumPy so that no program is compiled. This takes about 10 s per GB."""
        random = np.random.default_rng(seed)
        return {name: jnp.asarray(_draw(array, dtype, random)) for name, array in self.arrays.items()}

    def differentiable(self) -> tuple[str, ...]:
        """Return the names of the arguments with respect to which gradients are checked."""
        return tuple(name for name, a in self.arrays.items() if a.dtype == FLOAT and a.differentiable)


@dataclasses.dataclass(frozen=True, eq=False)
class KernelOperation:
    """An operation with its reference, implementations, cases and costs.

    Attributes:
      function: the public one; takes a case's arguments and options, and `implementation`.
      reference: the specification, in plain JAX; takes a case's arguments and options.
      implementations: names of the Pallas implementations.
      others: names of implementations by XLA or a library, which are timed alongside but are not ours to compile.
      costs: returns a call's costs from the shapes and dtypes of a case's arguments and its options.
      serves: returns whether an implementation supports a case in a dtype; by default each supports all.
      gradients_by_xla: whether no implementation has a kernel for the backward pass.
      timed_with: options that an implementation is timed with, by its name.
      classify: returns the class of a call from the shapes and dtypes of a case's arguments and its options.
    """

    function: Callable[..., Any]
    reference: Callable[..., Any]
    implementations: tuple[str, ...]
    cases: tuple[KernelCase, ...]
    costs: Callable[..., KernelCosts]
    others: tuple[str, ...] = ()
    serves: Callable[[str, KernelCase, str], bool] = lambda implementation, case, dtype: True
    gradients_by_xla: bool = False
    timed_with: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    classify: Callable[[Mapping[str, Any], Mapping[str, Any]], CallClass] = lambda arrays, options: CallClass.of_rows(
        next(iter(arrays.values()))
    )

    @property
    def name(self) -> str:
        return self.function.__name__

    def used_in(self, use: Use) -> tuple[KernelCase, ...]:
        """Return the cases with this use."""
        return tuple(case for case in self.cases if use in case.uses)


def _draw(array: CaseArray, dtype: Any, random: np.random.Generator) -> np.ndarray:
    shape, dtype = array.struct(dtype).shape, array.struct(dtype).dtype
    match array.draw:
        case "normal":
            # Rounded to the array's own precision, so that all dtypes of a case represent the numbers exactly.
            numbers = random.standard_normal(shape, np.float32)
            numbers *= np.float32(array.scale)
            numbers += np.float32(array.mean)
            return numbers.astype(dtype)
        case "zeros":
            return np.zeros(shape, dtype)
        case "one_hot":
            at = random.integers(shape[-1], size=(*shape[:-1], 1))
            return np.where(np.arange(shape[-1]) == at, array.scale, 0.0).astype(dtype)
        case "mask":
            rows = np.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
            return (random.random(shape, np.float32) < 0.75) & (rows > 0)
        case "seldom":
            return random.random(shape, np.float32) < 1 / 16
        case "below":
            return (int(array.mean) + random.integers(int(array.scale), size=shape)).astype(dtype)
        case "bytes":
            drawn = random.integers(256, size=shape, dtype=np.uint8).view(dtype)
            return np.where(np.isfinite(drawn.astype(np.float32)), drawn, np.zeros_like(drawn))
        case "labels":
            labels = random.integers(int(array.scale), size=shape)
            return np.where(random.random(shape, np.float32) < 0.75, labels, -1).astype(dtype)
        case "groups":
            rows, weights = int(array.scale), random.exponential(size=shape)
            weights[1::4] = 0
            return random.multinomial(rows - min(rows // 8, 3), weights / weights.sum()).astype(dtype)
    raise ValueError(f"there is no way {array.draw!r} to draw numbers")
