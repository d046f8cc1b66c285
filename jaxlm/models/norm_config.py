"""Norms as sections of [model]. Imports no JAX."""

from typing import Literal

from pydantic import model_validator

from jaxlm.core.schema import Positive, Section


class NormConfig(Section):
    """A section from which norms are made."""

    kind: str


class RMSNormConfig(NormConfig):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4)."""

    kind: Literal["rms"] = "rms"
    epsilon: Positive = 1e-5
    """Added to the mean square."""
    scale: bool = True
    """Multiply by a learned parameter (without one in nanochat)."""
    plus_one: bool = False
    """Multiply by 1 + the parameter, which starts at 0 (Gemma)."""

    @model_validator(mode="after")
    def _scaled(self):
        if self.plus_one and not self.scale:
            raise ValueError("plus_one = true adds 1 to a parameter that scale = false leaves out; change either")
        return self


class LayerNormConfig(NormConfig):
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450, equations 3 and 4)."""

    kind: Literal["layer"] = "layer"
    epsilon: Positive = 1e-5
    """Added to the variance."""
    scale: bool = True
    """Multiply by a learned parameter."""
    bias: bool = True
    """Add a learned bias."""
