"""A load of requests as data: prompts, lengths, and the times at which they are sent. Imports no JAX."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from jaxlm.core.errors import InputError

Kind = Literal["random", "shared-prefix"]


class LoadRequest(NamedTuple):
    """A prompt of token ids, and how many tokens are to follow it."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Load:
    """Requests for texts of random tokens.

    Attributes:
      kind: `random`: each prompt is its own; `shared-prefix`: its first `prefix_tokens` are one of so many `prefixes`.
      requests: their number, after `warm_up` others that are not measured.
      input_tokens, output_tokens: their means; each is drawn evenly from `spread` below to as much above.
      rate: requests a second, at random times: waits between them have a gamma distribution with this mean, of shape
        `burstiness` (1: a Poisson process; less: in bursts; more: evenly). None: as soon as `concurrency` allows.
      concurrency: requests that are under way at most; None: any number.
      seed: of all random numbers.
    """

    kind: Kind = "random"
    requests: int = 100
    warm_up: int = 8
    input_tokens: int = 128
    output_tokens: int = 32
    spread: float = 0.0
    prefix_tokens: int = 0
    prefixes: int = 1
    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = 8
    seed: int = 0

    def check(self) -> "Load":
        """Return the load. Raises InputError for values without meaning."""
        for name in ("requests", "input_tokens", "output_tokens", "prefixes", "concurrency"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value} must be 1 or more")
        if self.warm_up < 0:
            raise InputError(f"--warm-up {self.warm_up} must be 0 or more")
        for name in ("rate", "burstiness"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise InputError(f"--{name} {value:g} must be above 0")
        if not 0 <= self.spread < 1:
            raise InputError(f"--spread {self.spread:g} must be 0 or more, and below 1")
        if not 0 <= self.prefix_tokens < (least := self._bounds(self.input_tokens)[0]):
            raise InputError(
                f"--prefix-tokens {self.prefix_tokens} must be fewer than a prompt has at least, {least}: it is a part "
                "of it"
            )
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed {self.seed} must be from 0 to {2**32 - 1}")
        return self

    @property
    def longest(self) -> int:
        """The most tokens that a text may have, of prompt and what follows."""
        return self._bounds(self.input_tokens)[1] + self._bounds(self.output_tokens)[1]

    def texts(self, vocabulary: int) -> list[LoadRequest]:
        """Return what is asked for, of token ids below `vocabulary`: first the warm-up."""
        draw = np.random.default_rng([self.seed, 0])
        heads = draw.integers(0, vocabulary, (self.prefixes, self.prefix_tokens))
        requests = []
        for _ in range(self.warm_up + self.requests):
            read, follow = (int(draw.integers(low, high + 1)) for low, high in map(self._bounds, self._means))
            head = heads[draw.integers(0, self.prefixes)]
            tail = draw.integers(0, vocabulary, read - len(head))
            requests.append(LoadRequest([*head.tolist(), *tail.tolist()], follow))
        return requests

    def times(self) -> list[float]:
        """Return the seconds from the beginning at which the measured requests are sent, as far as `concurrency`
        lets them be."""
        if self.rate is None:
            return [0.0] * self.requests
        draw = np.random.default_rng([self.seed, 1])
        waits = draw.gamma(self.burstiness, 1 / (self.rate * self.burstiness), self.requests)
        return [0.0, *np.cumsum(waits)[:-1].tolist()]

    @property
    def _means(self) -> tuple[int, int]:
        return self.input_tokens, self.output_tokens

    def _bounds(self, mean: int) -> tuple[int, int]:
        """Return the least and the most tokens."""
        return max(math.ceil(mean * (1 - self.spread)), 1), math.floor(mean * (1 + self.spread))
