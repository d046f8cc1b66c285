"""The section [lora]. Imports no JAX."""

import math
from typing import Annotated

from pydantic import Field

from jaxlm.core.schema import Count, Positive, Section


class LoraConfig(Section):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685, section 4.1): matrices W of the weights that a run begins
    with (`--from`) stay as they are, and x·W + scale · (x·A)·B takes the place of x·W. Only A and B are trained and
    saved."""

    rank: Count = 8
    """The width of x·A; B·A has this rank at most."""
    alpha: Positive = 16.0
    """`scale` is `alpha` / `rank`."""
    rank_stabilized: bool = False
    """`scale` is `alpha` / √`rank` instead (Kalajdzievski 2023, arXiv:2312.03732, equation 3)."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Patterns of the paths of matrices that have adapters, such as "*/attention/*" or "layers/attention/query"; `*`
    matches any characters, `/` too. All matrices of the layers are adapted by default, as those of Dettmers et al. 2023
    (arXiv:2305.14314, section 4), except those of experts and their routers: these have no adapters, and a pattern that
    matches one, other than "*", is refused."""

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
