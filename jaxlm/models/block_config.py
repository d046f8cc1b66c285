"""One layer as orthogonal choices, and the kinds that each may take. Imports no JAX."""

from typing import Literal

from pydantic import model_validator

from jaxlm.core.schema import Kinds, Positive, Section
from jaxlm.models.feed_forward_config import DenseFeedForwardConfig, MixtureFeedForwardConfig
from jaxlm.models.grouped_query_config import GroupedQueryAttentionConfig
from jaxlm.models.latent_config import LatentAttentionConfig
from jaxlm.models.layer_config import NoAttentionConfig, NoFeedForwardConfig
from jaxlm.models.norm_config import LayerNormConfig, RMSNormConfig
from jaxlm.models.position_config import LearnedPositionsConfig, LongRopeScalingConfig, NoPositionsConfig, RopeConfig
from jaxlm.models.recurrent_config import GatedDeltaConfig, Mamba2Config, ShortConvolutionConfig

NormPlacement = Literal["before", "after", "both"]
Residual = Literal["sequential", "parallel", "parallel_shared_norm"]

POSITIONS = Kinds(RopeConfig, LearnedPositionsConfig, NoPositionsConfig)
# The sections of tables of `[model]`, to which `jaxlm.models` registers further kinds.
NORMS = Kinds(RMSNormConfig, LayerNormConfig)
ATTENTIONS = Kinds(
    GroupedQueryAttentionConfig,
    LatentAttentionConfig,
    GatedDeltaConfig,
    ShortConvolutionConfig,
    Mamba2Config,
    NoAttentionConfig,
)
FEED_FORWARDS = Kinds(DenseFeedForwardConfig, MixtureFeedForwardConfig, NoFeedForwardConfig)


class BlockConfig(Section):
    """One layer."""

    norm: NORMS = RMSNormConfig()  # pyright: ignore[reportInvalidTypeForm]
    position: POSITIONS = RopeConfig()  # pyright: ignore[reportInvalidTypeForm]
    attention: ATTENTIONS  # pyright: ignore[reportInvalidTypeForm]
    feed_forward: FEED_FORWARDS  # pyright: ignore[reportInvalidTypeForm]
    norm_placement: NormPlacement = "before"
    """The place of the norms of attention f and the feed-forward layer f: before, x + f(norm(x)) (Llama); after,
    x + norm(f(x)) (OLMo 2, arXiv:2501.00656, section 2.1); or both, x + norm(f(norm(x))) (Gemma 2)."""
    residual: Residual = "sequential"
    """The input of the feed-forward layer: the residual with attention added to it, or in parallel the one that
    attention reads (arXiv:2204.02311, section 2), by a norm of its own (GPT-NeoX) or by attention's (GPT-J, Phi,
    Cohere)."""
    residual_scale: Positive = 1.0
    """Multiplies what attention and the feed-forward layer add to the residual (Granite)."""

    @model_validator(mode="after")
    def _consistent(self):
        if self.position.kind == "rope" and self.attention.rotated:
            self._check_rope(self.position)
        if self.residual == "parallel_shared_norm" and self.norm_placement == "after":
            raise ValueError(
                'model.residual = "parallel_shared_norm" shares the norm before attention, and model.norm_placement = '
                '"after" has none there; set model.residual to "parallel"'
            )
        if self.is_single and self.residual != "sequential":
            raise ValueError(
                f'model.residual = "{self.residual}" needs attention and a feed-forward layer side by side; with '
                'kind = "none" for one of them leave it out'
            )
        if self.attention.kind == self.feed_forward.kind == "none":
            raise ValueError(
                'model.attention.kind = "none" and model.feed_forward.kind = "none" leave a layer without parts; take '
                "another kind of either"
            )
        return self

    def _check_rope(self, position: RopeConfig) -> None:
        """Raise ValueError unless the channels that rotate are pairs, of which each has a frequency."""
        key, width = f"model.attention.{self.attention.rotated}", self.rope_dim
        if position.fraction < 1 and (width == 0 or width % 2):
            raise ValueError(
                f"model.position.fraction = {position.fraction:g} of {key} is {width} channels: their number must be "
                "even and more than 0, RoPE rotates pairs"
            )
        if width % 2:
            raise ValueError(f"{key} = {width}: it must be even, RoPE rotates pairs")
        scaling = position.scaling
        if isinstance(scaling, LongRopeScalingConfig) and len(scaling.short_factors) != width // 2:
            raise ValueError(
                f"model.position.scaling.short_factors has {len(scaling.short_factors)} numbers; {width} channels of a "
                f"head rotate, and ask for {width // 2}"
            )

    @property
    def is_single(self) -> bool:
        """True if the layer has attention alone, or a feed-forward layer alone."""
        return "none" in (self.attention.kind, self.feed_forward.kind)

    @property
    def window(self) -> int | None:
        """`attention.window`; None too for a kind that has none."""
        return getattr(self.attention, "window", None)

    @property
    def rope_dim(self) -> int:
        """The channels of a head that rotary positions rotate: its first."""
        if self.position.kind != "rope" or self.attention.rotated is None:
            return 0
        return int(getattr(self.attention, self.attention.rotated) * self.position.fraction)

    @property
    def activations(self) -> tuple[str, ...]:
        """Names of the activations of a layer that `execution.remat` may keep."""
        return *self.attention.activations, *self.feed_forward.activations
