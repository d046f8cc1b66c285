"""Operations outside `jax.jit`: one compiled program for each shape, option and chip, kept for the next call."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax

from kernels_pallas.core import target, tuning


def compiled_once(static: int) -> Callable[[Callable], Callable]:
    """Decorate a function whose first `static` arguments are hashable and known while tracing; arrays follow.

    A kernel is a closure, new in each call, and therefore a new program to JAX. The program depends only on these
    arguments, the chip being lowered for and the kernel's block sizes.
    """

    def decorate(function: Callable) -> Callable:
        @functools.partial(jax.jit, static_argnums=range(1 + static))
        @functools.wraps(function)
        def program(made_of: Hashable, *arguments: Any) -> Any:
            return function(*arguments)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return program((target.current(), tuning.state()), *arguments)

        return call

    return decorate
