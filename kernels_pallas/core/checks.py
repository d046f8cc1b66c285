"""Argument checks that operations share. Each raises ValueError with one line: what is wrong, and what is right."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def array(operation: str, **arrays: Any) -> None:
    """Check that these arguments are arrays."""
    for name, x in arrays.items():
        if not (hasattr(x, "dtype") and hasattr(x, "shape")):
            raise ValueError(f"{operation}: {name} is {'None' if x is None else type(x).__name__}; it must be an array")


def boolean(operation: str, **flags: Any) -> None:
    """Check that these arguments are Python's True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{operation}: {name} = {flag!r}; it must be True or False")


def floating(operation: str, **arrays: Any) -> None:
    """Check that these arguments are None or floating-point arrays of two bytes or more."""
    for name, x in arrays.items():
        if x is None:
            continue
        array(operation, **{name: x})
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
            raise ValueError(f"{operation}: {name} is {x.dtype}; it must be of floating point, of two bytes or more")


def like(operation: str, what: str, x: Any, **arrays: Any) -> None:
    """Check that these arguments are None or have the shape and dtype of x, which messages call `what`."""
    for name, other in arrays.items():
        if other is None:
            continue
        array(operation, **{name: other})
        if (other.shape, other.dtype) != (x.shape, x.dtype):
            wanted = f"{x.dtype}{list(x.shape)} like {what}"
            raise ValueError(f"{operation}: {name} is {other.dtype}{list(other.shape)}; it must be {wanted}")


def norm(operation: str, x: Any, vectors: Mapping[str, Any], residual: Any, epsilon: Any, plus_one: Any) -> float:
    """Check the operands of a norm over x's last dimension; return epsilon as a Python float."""
    matrix(operation, x=x)
    floating(operation, **vectors)
    like(operation, "x", x, residual=residual)
    vector(operation, x, **vectors)
    boolean(operation, plus_one=plus_one)
    return positive(operation, epsilon=epsilon)[0]


def matrix(operation: str, **arrays: Any) -> None:
    """Check that these arguments are floating-point arrays with a last dimension."""
    array(operation, **arrays)
    for name, x in arrays.items():
        if x.ndim == 0:
            raise ValueError(f"{operation}: {name} is a scalar; it must have a last dimension")
    floating(operation, **arrays)


def number(operation: str, name: str, n: Any) -> float:
    """Return a number that is known while tracing as a Python float: kernels hold no other constants."""
    if isinstance(n, jax.core.Tracer):
        raise ValueError(f"{operation}: {name} is traced; it must be a number that is known while tracing")
    try:
        return float(n)
    except (TypeError, ValueError):
        raise ValueError(f"{operation}: {name} = {n!r}; it must be a number") from None


def positive(operation: str, **numbers: Any) -> tuple[float, ...]:
    """Check that numbers are known and positive, and that float32 holds them and their reciprocals; return Python
    floats.
    """
    smallest, known = float(jnp.finfo(jnp.float32).tiny), []
    for name, given in numbers.items():
        n = number(operation, name, given)
        if not n > 0:
            raise ValueError(f"{operation}: {name} = {n}; it must be positive")
        if n < smallest:
            raise ValueError(f"{operation}: {name} = {n}; it must be at least {smallest}, float32's smallest normal")
        if n > 1 / smallest:
            raise ValueError(
                f"{operation}: {name} = {n}; it must be at most {1 / smallest:.4g}, 1 / float32's smallest normal"
            )
        known.append(n)
    return tuple(known)


def positive_or_none(operation: str, **numbers: Any) -> tuple[float | None, ...]:
    """Check as `positive` does, but allow None."""
    return tuple(n if n is None else positive(operation, **{name: n})[0] for name, n in numbers.items())


def vector(operation: str, x: Any, **vectors: Any) -> None:
    """Check that these arguments are None or have one number for each of x's last dimension."""
    for name, v in vectors.items():
        if v is not None and v.shape != x.shape[-1:]:
            raise ValueError(f"{operation}: {name} has shape {list(v.shape)}; it must be {list(x.shape[-1:])}")
