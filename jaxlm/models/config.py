"""The architecture of a decoder-only Transformer as orthogonal choices. Imports no JAX."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxlm.core.schema import Count, Kinds, Positive, Section, chosen

NormPlacement = Literal["before", "after", "both"]
Residual = Literal["sequential", "parallel", "parallel_shared_norm"]
Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu_squared"]

# Norms, RoPE, attention, gated activations and the loss run as kernels of kernels_pallas wherever there is one for the
# chip, or as what XLA makes of plain JAX.
Kernels = Literal["auto", "xla"]


def _remat(value: Any) -> Any:
    listed = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    if value not in ("none", "full") and not listed:
        raise ValueError(f'{value!r} is neither "none" nor "full" nor a list of activations, such as ["query", "up"]')
    return value


# What a layer keeps for its backward pass: everything, only its input, or its input and the activations named
# (`ModelConfig.activations`).
Remat = Annotated[Literal["none", "full"] | tuple[str, ...], BeforeValidator(_remat)]


class RMSNormConfig(Section):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4).

    `plus_one` multiplies by 1 + the parameter, which starts at 0 (Gemma).
    """

    kind: Literal["rms"] = "rms"
    epsilon: Positive = 1e-5
    plus_one: bool = False


class LayerNormConfig(Section):
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450, equations 3 and 4)."""

    kind: Literal["layer"] = "layer"
    epsilon: Positive = 1e-5
    bias: bool = True


class LearnedPositionsConfig(Section):
    """One learned vector per position, added to the token embedding (GPT-2)."""

    kind: Literal["learned"] = "learned"


class Llama3ScalingConfig(Section):
    """Stretches the slow rotary frequencies, as Llama 3.1 does to reach 128k tokens (arXiv:2407.21783)."""

    kind: Literal["llama3"] = "llama3"
    factor: Positive
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0
    original_context_length: Count

    @model_validator(mode="after")
    def _ordered(self):
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError("high_frequency_factor must be larger than low_frequency_factor")
        return self


class LinearScalingConfig(Section):
    """Stretches all rotary wavelengths by `factor` (Chen et al. 2023, arXiv:2306.15595, section 2.3)."""

    kind: Literal["linear"] = "linear"
    factor: Positive


class RopeConfig(Section):
    """Rotation of query and key pairs, half-split layout (Su et al. 2021, arXiv:2104.09864)."""

    kind: Literal["rope"] = "rope"
    theta: Positive = 10_000.0
    scaling: Kinds(Llama3ScalingConfig, LinearScalingConfig) | None = None  # pyright: ignore[reportInvalidTypeForm]


class SlidingWindowConfig(Section):
    """A token sees the last `size` tokens alone, itself one of them (Beltagy et al. 2020, arXiv:2004.05150, 3.1).

    In each `global_every`-th layer it sees all before it, as Gemma does; in none where that is not given (Mistral).
    `rope_theta` turns the layers with a window by other angles, which are not scaled (Gemma 3); without `global_every`
    those are all layers.
    """

    size: Count
    global_every: Annotated[int, Field(ge=2, lt=2**31)] | None = None
    rope_theta: Positive | None = None


class LayerConfig(Section):
    """A section from which a part of every layer is made: attention, or the feed-forward layer.

    Attributes:
      activations: names of the activations that rematerialisation can keep.
      sharded: keys whose sizes `mesh.tensor` must divide.
    """

    kind: str
    activations: ClassVar[tuple[str, ...]] = ()
    sharded: ClassVar[tuple[str, ...]] = ()


class AttentionConfig(LayerConfig):
    """A section from which attention is made. With a key `window` it may have a `SlidingWindowConfig`.

    Attributes:
      rotated: the key that holds the number of a head's channels that rotary positions rotate; None rotates none.
    """

    rotated: ClassVar[str | None] = None


class GroupedQueryAttentionConfig(AttentionConfig):
    """Grouped-query attention: `num_heads` query heads share `num_kv_heads` key/value heads (arXiv:2305.13245).

    `num_kv_heads = num_heads` is multi-head attention, `num_kv_heads = 1` multi-query attention. Scores are the
    products of queries and keys times `scale`, 1 / √head_dim where it is not given; with a `soft_cap` they
    stay between −cap and cap (Gemma 2, arXiv:2408.00118, section 2).
    """

    activations: ClassVar = ("query", "key", "value", "attention")
    sharded: ClassVar = ("num_heads",)
    rotated: ClassVar = "head_dim"

    kind: Literal["gqa"] = "gqa"
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    scale: Positive | None = None
    soft_cap: Positive | None = None
    window: SlidingWindowConfig | None = None

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

    def kv_heads_over(self, devices: int) -> int:
        """Return the number of key/value heads that are computed where query heads are sharded over `devices`.

        Where `devices` does not divide them each head is repeated, so that every device has exactly those of its query
        heads.
        """
        return math.lcm(self.num_kv_heads, devices)


class DenseFeedForwardConfig(LayerConfig):
    """Two matrices with an activation between, or three when gated (Shazeer 2020, arXiv:2002.05202)."""

    sharded: ClassVar = ("d_ff",)

    kind: Literal["dense"] = "dense"
    d_ff: Count
    activation: Activation
    gated: bool = False
    bias: bool = False

    @property
    def activations(self) -> tuple[str, ...]:
        """Names of the activations that rematerialisation can keep."""
        return ("up", "gate") if self.gated else ("up",)


# The sections of `[model.attention]` and `[model.feed_forward]`, to which `jaxlm.models` registers further kinds.
ATTENTIONS = Kinds(GroupedQueryAttentionConfig)
FEED_FORWARDS = Kinds(DenseFeedForwardConfig)


class ModelConfig(Section):
    """A decoder-only Transformer.

    `context_length` is the longest sequence that it can read. `attention.num_kv_heads` defaults to
    `attention.num_heads`, `attention.head_dim` to `d_model / attention.num_heads`. `scale_embeddings` multiplies
    embeddings by √d_model; a `logit_soft_cap` keeps logits between −cap and cap.

    `norm_placement` says where attention f and the feed-forward layer f have norms: before, x + f(norm(x)) (Llama);
    after, x + norm(f(x)) (OLMo 2, arXiv:2501.00656, section 2.1); or both, x + norm(f(norm(x))) (Gemma 2).
    `residual` says what the feed-forward layer reads: the stream with attention added to it, or in parallel the one
    that attention reads (arXiv:2204.02311, section 2), by a norm of its own (GPT-NeoX) or by attention's (GPT-J, Phi,
    Cohere).
    """

    vocab_size: Count
    context_length: Count
    num_layers: Count
    d_model: Count
    norm: Annotated[RMSNormConfig | LayerNormConfig, Field(discriminator="kind")]
    position: Annotated[LearnedPositionsConfig | RopeConfig, Field(discriminator="kind")]
    attention: ATTENTIONS  # pyright: ignore[reportInvalidTypeForm]
    feed_forward: FEED_FORWARDS  # pyright: ignore[reportInvalidTypeForm]
    norm_placement: NormPlacement = "before"
    residual: Residual = "sequential"
    tied_embeddings: bool = False
    scale_embeddings: bool = False
    logit_soft_cap: Positive | None = None
    initializer_std: Positive = 0.02

    @model_validator(mode="before")
    @classmethod
    def _fill_head_dim(cls, values):
        """Write the default that depends on two tables into that of attention, so that a resolved file is whole."""
        attention = values.get("attention") if isinstance(values, dict) else None
        if not isinstance(attention, dict) or "num_heads" not in attention:
            return values
        heads, width = attention["num_heads"], values.get("d_model")
        for key, size in (("attention.num_heads", heads), ("d_model", width)):
            if size is not None and not isinstance(size, int):
                raise ValueError(f"model.{key} = {size!r}: it must be an integer")
        sections = chosen(ATTENTIONS, attention)
        asked = all("head_dim" in s.model_fields and s.model_fields["head_dim"].is_required() for s in sections)
        if asked and "head_dim" not in attention and isinstance(width, int) and heads > 0:
            if width % heads:
                raise ValueError(
                    f"model.attention.num_heads = {heads} does not divide model.d_model = {width}: "
                    "change one of them, or set model.attention.head_dim"
                )
            return {**values, "attention": {**attention, "head_dim": width // heads}}
        return values

    @model_validator(mode="after")
    def _consistent(self):
        if self.position.kind == "rope" and self.rope_dim % 2:
            key = f"model.attention.{self.attention.rotated}"
            raise ValueError(f"{key} = {self.rope_dim}: it must be even, RoPE rotates pairs")
        if self.window and self.window.rope_theta and self.position.kind != "rope":
            raise ValueError(
                f"model.attention.window.rope_theta rotates nothing: model.position.kind is {self.position.kind!r}; "
                "leave it out"
            )
        if self.residual == "parallel_shared_norm" and self.norm_placement == "after":
            raise ValueError(
                'model.residual = "parallel_shared_norm" shares the norm before attention, and model.norm_placement = '
                '"after" has none there; set model.residual to "parallel"'
            )
        return self

    @property
    def window(self) -> SlidingWindowConfig | None:
        """`attention.window`; None too for a kind that has none."""
        return getattr(self.attention, "window", None)

    @property
    def rope_dim(self) -> int:
        """The channels of a head that rotary positions rotate."""
        return getattr(self.attention, self.attention.rotated) if self.attention.rotated else 0

    @property
    def activations(self) -> tuple[str, ...]:
        """Names of the activations of a layer that `training.remat` may keep."""
        return *self.attention.activations, *self.feed_forward.activations

    @property
    def windowed_layers(self) -> int:
        """The number of layers with `attention.window`."""
        if self.window is None:
            return 0
        return self.num_layers - (self.num_layers // self.window.global_every if self.window.global_every else 0)
