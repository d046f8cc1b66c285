"""Positions of tokens as choices: learned, rotary with its scalings, or none. Imports no JAX."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxlm.core.schema import Count, InWords, Kinds, NonNegative, Positive, PositiveShare, Section


class LearnedPositionsConfig(Section):
    """One learned vector per position, added to the token embedding (GPT-2)."""

    kind: Literal["learned"] = "learned"


class RopeScalingConfig(Section):
    """A stretching of rotary frequencies."""

    @property
    def amplitude(self) -> float:
        """The number that multiplies cos and sin."""
        return 1.0


class Llama3ScalingConfig(RopeScalingConfig):
    """Stretches the slow rotary frequencies, as Llama 3.1 does to reach 128k tokens (arXiv:2407.21783)."""

    kind: Literal["llama3"] = "llama3"
    factor: Positive
    """Divides the slow frequencies."""
    low_frequency_factor: Positive = 1.0
    """Frequencies that rotate fewer times than this in the original context are divided whole."""
    high_frequency_factor: Positive = 4.0
    """Frequencies that rotate more times than this in the original context stay; those between are interpolated."""
    original_context_length: Count
    """The context before it was stretched."""

    @model_validator(mode="after")
    def _ordered(self):
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError("high_frequency_factor must be larger than low_frequency_factor")
        return self


class LinearScalingConfig(RopeScalingConfig):
    """Stretches all rotary wavelengths (Chen et al. 2023, arXiv:2306.15595, section 2.3)."""

    kind: Literal["linear"] = "linear"
    factor: Positive
    """Multiplies all wavelengths."""


class DynamicScalingConfig(RopeScalingConfig):
    """Stretches wavelengths with the length of the text, the longest most (dynamic NTK; arXiv:2309.00071, section 3.3).

    Keys in a cache keep the angles with which they were written.
    """

    kind: Literal["dynamic"] = "dynamic"
    factor: Positive
    """A document of L tokens, longer than the original context of C, has the longest wavelength multiplied by
    1 + factor · (L / C − 1)."""
    original_context_length: Count
    """The context before it was stretched."""


class YarnScalingConfig(RopeScalingConfig):
    """Stretches the slow rotary frequencies, and sharpens attention (YaRN, Peng et al. 2023, arXiv:2309.00071).

    Pairs of channels are blended by their number between those that rotate `beta_fast` and `beta_slow` times.
    """

    kind: Literal["yarn"] = "yarn"
    factor: Positive
    """Divides the slow frequencies."""
    beta_fast: Positive = 32.0
    """Frequencies that rotate more times than this in the original context stay."""
    beta_slow: Positive = 1.0
    """Frequencies that rotate fewer times than this in the original context are divided whole."""
    original_context_length: Count
    """The context before it was stretched."""
    truncate: bool = True
    """Blend between whole numbers of pairs: the first is rounded down, the last up."""
    mscale: NonNegative = 1.0
    """The slope m of the attention factor 1 + 0.1 · m · ln(factor) (section 3.4)."""
    mscale_all_dim: NonNegative = 0.0
    """The slope of what divides that factor (DeepSeek-V2, which scales scores instead)."""
    attention_factor: Annotated[
        Positive | None, InWords(default="(1 + 0.1 · mscale · ln(factor)) / (1 + 0.1 · mscale_all_dim · ln(factor))")
    ] = None
    """Multiplies cos and sin, and so queries and keys."""

    @model_validator(mode="after")
    def _ordered(self):
        if self.beta_fast <= self.beta_slow:
            raise ValueError("beta_fast must be larger than beta_slow")
        return self

    @property
    def amplitude(self) -> float:
        """The attention factor: `attention_factor`, or what follows from `factor`."""
        if self.attention_factor is not None:
            return self.attention_factor
        steps = 0.1 * math.log(max(self.factor, 1.0))
        return (1 + self.mscale * steps) / (1 + self.mscale_all_dim * steps)


class LongRopeScalingConfig(RopeScalingConfig):
    """Stretches each wavelength by a factor of its own (LongRoPE, Ding et al. 2024, arXiv:2402.13753; Phi-3).

    Keys in a cache keep the angles with which they were written.
    """

    kind: Literal["longrope"] = "longrope"
    factor: Positive
    """The stretched context over the original one, from which `attention_factor` follows."""
    short_factors: Annotated[tuple[Positive, ...], InWords(type="list of numbers > 0")]
    """What multiplies the wavelength of each pair of channels in documents that the original context holds."""
    long_factors: Annotated[tuple[Positive, ...], InWords(type="list of numbers > 0")]
    """What multiplies the wavelength of each pair of channels in longer documents."""
    original_context_length: Annotated[int, Field(gt=1, lt=2**31)]
    """The context before it was stretched."""
    attention_factor: Annotated[
        Positive | None, InWords(default="√(1 + ln(factor) / ln(original_context_length)), 1 for a factor below 1")
    ] = None
    """Multiplies cos and sin, and so queries and keys."""

    @model_validator(mode="after")
    def _alike(self):
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError(
                f"short_factors has {len(self.short_factors)} numbers, and long_factors {len(self.long_factors)}; they "
                "must have one for each pair of channels"
            )
        return self

    @property
    def amplitude(self) -> float:
        """The attention factor: `attention_factor`, or what follows from `factor`."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_context_length))


_SCALINGS = Kinds(
    Llama3ScalingConfig, LinearScalingConfig, DynamicScalingConfig, YarnScalingConfig, LongRopeScalingConfig
)


class RopeConfig(Section):
    """Rotation of query and key pairs, half-split layout (Su et al. 2021, arXiv:2104.09864)."""

    kind: Literal["rope"] = "rope"
    theta: Positive = 10_000.0
    """The base of the frequencies."""
    fraction: PositiveShare = 1.0
    """Rotates the first channels of each head, this share of them rounded down, and leaves the others as they are
    (GPT-NeoX, arXiv:2204.06745, section 2.1.1). Their number must be even."""
    reversed: bool = False
    """Rotate by the negative angle (nanochat)."""
    scaling: _SCALINGS | None = None  # pyright: ignore[reportInvalidTypeForm]
    """Stretching of the frequencies, for longer contexts."""

    @model_validator(mode="after")
    def _falling(self):
        if isinstance(self.scaling, YarnScalingConfig) and self.theta <= 1:
            raise ValueError(f"theta = {self.theta:g}: it must be above 1 for scaling.kind = 'yarn'")
        return self


class NoPositionsConfig(Section):
    """No positions: tokens are told apart by the mask alone (NoPE, Kazemnejad et al. 2023, arXiv:2305.19466)."""

    kind: Literal["none"] = "none"
