"""Recurrent layers as sections of [model.attention]. Imports no JAX."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jaxlm.core.schema import Count, InWords
from jaxlm.models.layer_config import AttentionConfig

Taps = Annotated[int, Field(ge=2)]


class GatedDeltaConfig(AttentionConfig):
    """Gated DeltaNet: a recurrence with a matrix per head, from which each token takes out what it found under its key
    before it puts its value in, and which decays (Yang et al. 2024, arXiv:2412.06464; as in Qwen3-Next). Queries, keys
    and values come through a short convolution, and outputs through a norm and a gate.

    A cache keeps a key_dim × value_dim matrix of each value head, and taps − 1 tokens, for each sequence and layer.
    """

    activations: ClassVar = ("query", "key", "value", "gate")
    logical_axes: ClassVar = {"num_key_heads": "heads", "num_value_heads": "heads"}

    kind: Literal["gated_delta"] = "gated_delta"
    num_key_heads: Count
    """Heads of queries and keys; a divisor of `num_value_heads`."""
    num_value_heads: Annotated[Count, InWords(default="num_key_heads")]
    """Heads of values, each with a state of its own."""
    key_dim: Count
    """Channels of a head's queries and keys."""
    value_dim: Annotated[Count, InWords(default="key_dim")]
    """Channels of a head's values."""
    taps: Taps = 4
    """Tokens that the short convolution reads, the token itself one of them."""

    @model_validator(mode="before")
    @classmethod
    def _fill_values(cls, values: Any) -> Any:
        """Write the defaults that depend on another key into the table."""
        if not isinstance(values, dict):
            return values
        pairs = (("num_value_heads", "num_key_heads"), ("value_dim", "key_dim"))
        return {**{of: values[like] for of, like in pairs if like in values}, **values}

    @model_validator(mode="after")
    def _grouped(self):
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"model.attention.num_key_heads = {self.num_key_heads} does not divide "
                f"model.attention.num_value_heads = {self.num_value_heads}; set it to one that does"
            )
        return self
