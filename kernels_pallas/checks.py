"""Checks of arguments that operations share. Each raises ValueError with one line: what is wrong, and what is right."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def floating(operation: str, **arrays: Any) -> None:
    """These arguments are of floating point, None aside."""
    for name, x in arrays.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{operation}: {name} is {x.dtype}; it must be of floating point")


def like(operation: str, x: Any, **arrays: Any) -> None:
    """These arguments have the shape and dtype of x, None aside."""
    for name, other in arrays.items():
        if other is not None and (other.shape, other.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"{operation}: {name} is {other.dtype}{list(other.shape)}; it must be {x.dtype}{list(x.shape)} like x"
            )


def norm(operation: str, x: Any, vectors: Mapping[str, Any], residual: Any, epsilon: Any) -> float:
    """The operands of a norm over x's last dimension; returns epsilon, which a float32 has to hold."""
    matrix(operation, x)
    floating(operation, **vectors)
    like(operation, x, residual=residual)
    vector(operation, x, **vectors)
    (epsilon,) = positive(operation, epsilon=epsilon)
    smallest = float(jnp.finfo(jnp.float32).tiny)
    if epsilon < smallest:
        raise ValueError(f"{operation}: epsilon = {epsilon}; it must be at least {smallest}, float32's smallest normal")
    return epsilon


def matrix(operation: str, x: Any) -> None:
    """x has a last dimension, of floating point."""
    if x.ndim == 0:
        raise ValueError(f"{operation}: x is a scalar; it must have a last dimension")
    floating(operation, x=x)


def positive(operation: str, **numbers: Any) -> tuple[float | None, ...]:
    """These numbers are positive and known, None aside; returns them as Python's: kernels hold no other constants."""
    known = []
    for name, n in numbers.items():
        if isinstance(n, jax.core.Tracer):
            raise ValueError(f"{operation}: {name} is traced; it must be a number that is known while tracing")
        known.append(n if n is None else float(n))
        if n is not None and not n > 0:
            raise ValueError(f"{operation}: {name} = {n}; it must be positive")
    return tuple(known)


def vector(operation: str, x: Any, **vectors: Any) -> None:
    """These arguments have one number for each of x's last dimension, None aside."""
    for name, v in vectors.items():
        if v is not None and v.shape != x.shape[-1:]:
            raise ValueError(f"{operation}: {name} has shape {list(v.shape)}; it must be {list(x.shape[-1:])}")
