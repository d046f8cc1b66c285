"""Recurrent layers as sections of [model.attention]. Imports no JAX."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jaxlm.core.schema import Count, InWords, NonNegative
from jaxlm.models.layer_config import AttentionConfig

Taps = Annotated[int, Field(ge=2)]
NonNegativeOrInfinite = Annotated[float, Field(ge=0.0, allow_inf_nan=True)]


class GatedDeltaConfig(AttentionConfig):
    """Gated DeltaNet: a recurrence with a matrix per head, from which each token takes out what it found under its key
    before it puts its value in, and which decays (Yang et al. 2024, arXiv:2412.06464; as in Qwen3-Next). Queries, keys
    and values come through a short convolution, and outputs through a norm and a gate.

    A cache keeps a key_dim × value_dim matrix of each value head, and taps − 1 tokens, for each sequence and layer.
    """

    activations: ClassVar = ("query", "key", "value", "gate")
    carries_states: ClassVar = True
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


class ShortConvolutionConfig(AttentionConfig):
    """A gated short convolution: of the residual's channels, each with its own weights, with a gate before and a gate
    after it (LFM2, arXiv:2511.23404, section 2).

    A cache keeps taps − 1 tokens of d_model channels for each sequence and layer.
    """

    activations: ClassVar = ("value", "input_gate", "gate")
    carries_states: ClassVar = True

    kind: Literal["short_convolution"] = "short_convolution"
    taps: Taps = 3
    """Tokens that the convolution reads, the token itself one of them."""
    bias: bool = False
    """Add biases to all products and to the convolution."""


class Mamba2Config(AttentionConfig):
    """Mamba-2: a recurrence with a matrix per head, which decays (Dao and Gu 2024, arXiv:2405.21060). What it writes
    and reads comes through a short convolution, and outputs through a gate and a norm.

    A cache keeps a state_dim × head_dim matrix of each head, and taps − 1 tokens, for each sequence and layer.
    """

    activations: ClassVar = ("query", "key", "value", "gate")
    carries_states: ClassVar = True
    logical_axes: ClassVar = {"num_heads": "heads"}

    kind: Literal["mamba2"] = "mamba2"
    num_heads: Count
    """Heads, each with a state of its own."""
    head_dim: Count = 64
    """Channels of a head."""
    state_dim: Count = 128
    """Numbers of the state for each channel."""
    num_groups: Count = 1
    """Groups of heads that share what is written under and read by (B and C); a divisor of `num_heads`."""
    taps: Taps = 4
    """Tokens that the short convolution reads, the token itself one of them."""
    bias: bool = False
    """Add biases to all products but that of the times, which has one always."""
    convolution_bias: bool = True
    """Add a bias to the convolution."""
    time_limits: Annotated[tuple[NonNegative, NonNegativeOrInfinite] | None, InWords(default="none")] = None
    """The least and the greatest time step, after its softplus; the greatest may be `inf`."""
    gate: Literal["before_norm", "after_norm"] = "before_norm"
    """The place of the gate: norm(y ⊙ silu(gate)), or norm(y) ⊙ silu(gate). The norm is of each group."""

    @model_validator(mode="after")
    def _consistent(self):
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"model.attention.num_groups = {self.num_groups} does not divide model.attention.num_heads = "
                f"{self.num_heads}; set it to one that does"
            )
        if self.time_limits is not None and self.time_limits[0] >= self.time_limits[1]:
            raise ValueError(
                f"model.attention.time_limits = {list(self.time_limits)} must be a lower and a higher limit"
            )
        return self
