"""A call that runs one implementation forward alone, and another where it is differentiated."""

import functools
from collections.abc import Callable
from typing import Any

import jax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def by_direction(forward: Callable[..., Any], training: Callable[..., Any], *arrays: Any) -> Any:
    """Return forward(*arrays), or training(*arrays) where JAX differentiates the call. Both compute the same.

    The fastest implementation of a pass alone need not be the fastest of two passes, and some have no gradient that may
    be used. JAX knows which it is: it runs a function's own rule only where somebody takes a gradient.

    Args:
      arrays: all arrays that are read, also those without a gradient: the functions may close over none.
    """
    return forward(*arrays)


def _trained(forward: Callable[..., Any], training: Callable[..., Any], *arrays: Any) -> tuple[Any, Any]:
    return jax.vjp(training, *arrays)


def _pulled_back(forward: Callable[..., Any], training: Callable[..., Any], pull_back: Any, cotangents: Any) -> Any:
    return pull_back(cotangents)


by_direction.defvjp(_trained, _pulled_back)
