"""Methods that compute their result once."""

import functools
from collections.abc import Callable
from typing import Any


def memoized(method: Callable) -> Callable:
    """Return a method that computes its result once for each object and arguments. The object keeps the results in its
    `answers`."""
    name = method.__name__

    @functools.wraps(method)
    def memoized_method(self: Any, *arguments: Any) -> Any:
        key = name, *arguments
        if key not in self.answers:
            self.answers[key] = method(self, *arguments)
        return self.answers[key]

    return memoized_method
