"""Checks of arguments that operations share. Each raises ValueError with one line: what is wrong, and what is right."""

from collections.abc import Mapping
from typing import Any

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


def norm(operation: str, x: Any, vectors: Mapping[str, Any], residual: Any, epsilon: float) -> None:
    """The operands of a norm over x's last dimension."""
    matrix(operation, x)
    floating(operation, **vectors)
    like(operation, x, residual=residual)
    vector(operation, x, **vectors)
    positive(operation, epsilon=epsilon)


def matrix(operation: str, x: Any) -> None:
    """x has a last dimension, of floating point."""
    if x.ndim == 0:
        raise ValueError(f"{operation}: x is a scalar; it must have a last dimension")
    floating(operation, x=x)


def positive(operation: str, **numbers: float | None) -> None:
    """These numbers are positive, None aside."""
    for name, n in numbers.items():
        if n is not None and not n > 0:
            raise ValueError(f"{operation}: {name} = {n}; it must be positive")


def vector(operation: str, x: Any, **vectors: Any) -> None:
    """These arguments have one number for each of x's last dimension, None aside."""
    for name, v in vectors.items():
        if v is not None and v.shape != x.shape[-1:]:
            raise ValueError(f"{operation}: {name} has shape {list(v.shape)}; it must be {list(x.shape[-1:])}")
