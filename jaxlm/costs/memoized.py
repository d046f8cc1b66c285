"""Methods that compute their result once."""

import functools
from collections.abc import Callable
from typing import Any


def memoized_in(answers: str) -> Callable[[Callable], Callable]:
    """Return a decorator of methods that compute their result once for each arguments and each dictionary that objects
    have as their attribute `answers`, which several objects may share."""

    def decorate(method: Callable) -> Callable:
        name = f"{method.__module__}.{method.__qualname__}"  # functions of several modules share a dictionary

        @functools.wraps(method)
        def memoized_method(self: Any, *arguments: Any) -> Any:
            key, known = (name, *arguments), getattr(self, answers)
            if key not in known:
                known[key] = method(self, *arguments)
            return known[key]

        return memoized_method

    return decorate


# Returns a method that computes its result once for each object and arguments.
memoized = memoized_in("answers")
