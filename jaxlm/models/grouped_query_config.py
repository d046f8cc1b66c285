"""Grouped-query attention as a section of [model]. Imports no JAX."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from jaxlm.core.schema import Count, InWords, Positive
from jaxlm.models.layer_config import AttentionConfig

QKNorm = Literal["none", "head", "head_after_rope", "projection"]


class GroupedQueryAttentionConfig(AttentionConfig):
    """Grouped-query attention: `num_heads` query heads share `num_kv_heads` key/value heads (arXiv:2305.13245).

    `num_kv_heads = num_heads` is multi-head attention, `num_kv_heads = 1` multi-query attention.
    """

    activations: ClassVar = ("query", "key", "value", "attention")
    logical_axes: ClassVar = {"num_heads": "heads"}
    rotated: ClassVar = "head_dim"

    kind: Literal["gqa"] = "gqa"
    num_heads: Count
    """Query heads."""
    num_kv_heads: Annotated[Count, InWords(default="num_heads")]
    """Key/value heads; a divisor of `num_heads`."""
    head_dim: Annotated[Count, InWords(default="model.d_model / num_heads")]
    """Channels of a head."""
    qk_norm: QKNorm = "none"
    """Norms of queries and keys: of each head before its rotation (Qwen3, Gemma 3), of each head after it (HunYuan,
    nanochat), or of all heads together before it (OLMo 2, arXiv:2501.00656, section 2.1)."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values."""
    output_bias: bool = False
    """Add a bias to the output."""
    scale: Annotated[Positive | None, InWords(default="1 / √head_dim")] = None
    """Multiplies the products of queries and keys."""
    soft_cap: Positive | None = None
    """Keeps scores between −cap and cap (Gemma 2, arXiv:2408.00118, section 2)."""
    sinks: bool = False
    """Add a learned score of each head, without a value, to its softmax (GPT-OSS, arXiv:2508.10925, section 2.2)."""
    output_gate: Literal["none", "sigmoid"] = "none"
    """Multiply what attention returns by σ(x·W), a number for each channel of each head (Qwen3-Next,
    arXiv:2505.06708, section 2.2)."""
    window: Annotated[Count | None, InWords(default="all")] = None
    """The last tokens that a token sees, itself one of them (Beltagy et al. 2020, arXiv:2004.05150, 3.1)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_kv_heads(cls, values: Any) -> Any:
        """Write the default that depends on another key into the table."""
        has_heads = isinstance(values, dict) and "num_heads" in values
        return {"num_kv_heads": values["num_heads"], **values} if has_heads else values

    @model_validator(mode="after")
    def _grouped(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.attention.num_kv_heads = {self.num_kv_heads} does not divide "
                f"model.attention.num_heads = {self.num_heads}; set it to one that does"
            )
        return self
