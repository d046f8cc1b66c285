"""How tokens are drawn. Imports no JAX."""

from typing import NamedTuple

from jaxlm.errors import InputError


class Sampling(NamedTuple):
    """How a token is drawn: from softmax(logits / temperature) among the `top_k` likeliest, then among the fewest
    that hold `top_p` of what is left (nucleus sampling; Holtzman et al. 2020, arXiv:1904.09751).

    Temperature 0 takes the likeliest. None leaves a filter out.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self) -> "Sampling":
        """Raises InputError for values that mean nothing."""
        if not 0.0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature {self.temperature:g} must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"--top-k {self.top_k} must be 1 or more")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InputError(f"--top-p {self.top_p:g} must be above 0 and at most 1")
        return self
