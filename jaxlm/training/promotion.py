"""Dtype promotion of code that is not ours."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def promoting(function: Callable) -> Callable:
    """Return a function of a library that runs under JAX's standard dtype promotion, which it is written for, whatever
    `jax_numpy_dtype_promotion` says."""

    @functools.wraps(function)
    def promoted(*arguments: Any, **options: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*arguments, **options)

    return promoted
