"""The requests that a deployment serves, and its limits of latency."""

import math
from typing import NamedTuple

from jaxlm.config.experiment import Experiment
from jaxlm.core import units
from jaxlm.core.errors import InputError
from jaxlm.costs.queueing import Service


class Demand(NamedTuple):
    """The requests that a deployment serves, and the limits that it is to keep.

    Attributes:
      prompt, output: tokens of each request.
      ttft: the most seconds until the first token, for nine of ten requests; None: any.
      tpot: the most seconds for each later token, on average; None: any.
      rate: requests a second, at random times; None: as many clients as there are slots, each of which sends a request
        as soon as the one before is answered.
    """

    prompt: int
    output: int
    ttft: float | None = None
    tpot: float | None = None
    rate: float | None = None

    def check(self, experiment: Experiment) -> "Demand":
        """Return the demand. Raises InputError for values without meaning, and for a text that the model or the engine
        does not hold."""
        for name in ("prompt", "output"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)} must be 1 or more")
        for name in ("ttft", "tpot", "rate"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise InputError(f"--{name} {value:g} must be above 0")
        limits = {
            "model.context_length": experiment.model.context_length,
            "inference.context": experiment.inference.context,
        }
        for name, limit in limits.items():
            if limit is not None and self.prompt + self.output > limit:
                raise InputError(
                    f"--prompt {self.prompt} and --output {self.output} are {self.prompt + self.output} tokens, more "
                    f"than {name} = {limit}"
                )
        return self

    def is_met(self, service: Service | None) -> bool:
        """Return whether a service keeps the limits; None, an endless queue, keeps none."""
        if service is None:
            return False
        return (self.ttft is None or service.ttft_p90 <= self.ttft) and (self.tpot is None or service.tpot <= self.tpot)

    def __str__(self) -> str:
        limits = {"TTFT": self.ttft, "TPOT": self.tpot}
        said = "".join(f", {name} within {units.seconds(limit)}" for name, limit in limits.items() if limit is not None)
        rate = "" if self.rate is None else f" at {self.rate:g} requests/s"
        return f"{self.prompt:,} tokens in, {self.output:,} out{rate}{said}"
