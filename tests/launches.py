"""The kernels in a traced program."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params


def launches(program: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of each Pallas kernel in a jaxpr, once per run; a program's text shows a jitted function
    once.
    """
    for equation in program.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params
        for inner in jaxprs_in_params(equation.params):
            yield from launches(inner)
