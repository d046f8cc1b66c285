"""Feed-forward layers as sections of [model], dense and mixtures of experts. Imports no JAX."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from jaxlm.core.schema import Count, InWords, NonNegative, Positive, Section
from jaxlm.models.layer_config import LayerConfig

Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu_squared"]

_TILE = 128  # channels of a matrix unit's tile
_BIAS_RATE = 0.001  # DeepSeek-V3's (arXiv:2412.19437, section 4.2)


class DenseFeedForwardConfig(LayerConfig):
    """Two matrices with an activation between, or three when gated (Shazeer 2020, arXiv:2002.05202)."""

    logical_axes: ClassVar = {"d_ff": "feed_forward"}

    kind: Literal["dense"] = "dense"
    d_ff: Annotated[Count, InWords(default="4 · d_model, or where gated 8/3 · d_model, up to a multiple of 128")]
    """Channels between the matrices."""
    activation: Activation = "silu"
    """The activation."""
    gated: Annotated[bool, InWords(default="true without `activation`, false with one")] = False
    """Multiply the activation by a third matrix's product."""
    bias: bool = False
    """Add biases."""

    @model_validator(mode="before")
    @classmethod
    def _gate_the_default(cls, values: Any) -> Any:
        """Gate the default activation: a table that names one says itself whether it is gated."""
        return {"gated": True, **values} if isinstance(values, dict) and "activation" not in values else values

    @classmethod
    def with_sizes(cls, table: dict[str, Any], d_model: int) -> dict[str, Any]:
        """Return a table with its `d_ff`: as many parameters gated as not (Shazeer 2020, section 2), in whole tiles."""
        is_gated = table.get("gated", "activation" not in table)
        return {"d_ff": -(-8 * d_model // (3 * _TILE)) * _TILE if is_gated else 4 * d_model, **table}

    @property
    def activations(self) -> tuple[str, ...]:
        """Names of the activations that rematerialisation can keep."""
        return ("up", "gate") if self.gated else ("up",)


class SharedExpertsConfig(Section):
    """Shared experts, which every token has beside those that it chooses: one layer (arXiv:2401.06066, section 3.2)."""

    d_ff: Count
    """Hidden channels of all shared experts together."""
    gate: Literal["none", "sigmoid"] = "none"
    """Multiply the output of the shared experts by σ(x·w), a number for each token (Qwen2-MoE)."""


class ExpertGroupsConfig(Section):
    """Group-limited routing (arXiv:2412.19437, section 2.1.2): each token first chooses `kept` of `count` groups of
    experts, and then experts of these groups alone."""

    count: Count
    """Groups; a divisor of `num_experts`."""
    kept: Count
    """The groups that a token may choose experts from."""
    score: Literal["max", "top2_sum"] = "max"
    """The score of a group: that of its best expert (DeepSeek-V2), or of its best two (V3)."""

    @model_validator(mode="after")
    def _some_are_kept(self):
        if self.kept > self.count:
            raise ValueError(f"groups.kept = {self.kept} is more than groups.count = {self.count}; keep fewer")
        return self


class RouterConfig(Section):
    """The router: which experts each token chooses, and the weights of their outputs.

    Scores are float32. A token chooses the experts with the highest scores; of equal scores the first expert's wins.
    """

    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    """The scores, which are also the weights before they are normalised: the softmax over all experts, the softmax over
    the chosen ones (GPT-OSS), or the sigmoid of each expert's logit (DeepSeek-V3)."""
    normalise: bool = True
    """Divide the weights of the chosen experts by their sum."""
    epsilon: NonNegative = 0.0
    """Added to the sum that weights are divided by."""
    selection_bias: bool = False
    """Add a bias to each score for the choice of experts, not for the weights. It is no parameter and has no gradient:
    `balance.bias_rate` moves it after each update (arXiv:2408.15664). `balance.auxiliary_loss` stays on beside it
    unless it is 0."""
    groups: ExpertGroupsConfig | None = None
    """Group-limited routing; by default a token may choose any experts."""
    scale: Positive = 1.0
    """Factor of the weights."""
    bias: bool = False
    """Add a learned bias to the scores before the softmax or sigmoid (GPT-OSS)."""


class BalanceConfig(Section):
    """Load balancing: what spreads tokens evenly over experts in training. Inference has none of it."""

    auxiliary_loss: NonNegative = 0.01
    """Factor of the load-balancing loss of each mixture layer: the mean over tokens of Σ f·p over experts. f is the
    expert's share of the choices times `num_experts`, p the router's probability of the expert. Σ f·p is 1 for an even
    load (Switch Transformer, arXiv:2101.03961, equations 4 to 6). 0 leaves the loss out."""
    over: Literal["sequence", "microbatch"] = "sequence"
    """The tokens that f is taken over: those of each row by itself, or those of a microbatch. Rows do not depend on
    `training.microbatches`."""
    z_loss: NonNegative = 0.0
    """Factor of the router z-loss of each mixture layer: the mean over tokens of log² Z, where Z is the sum of exp of
    the router's logits (ST-MoE, arXiv:2202.08906, equation 5)."""
    bias_rate: Annotated[NonNegative | None, InWords(default="0.001 with `router.selection_bias`")] = None
    """The step by which each update moves the selection bias of an expert: up if fewer tokens than the mean chose it,
    down if more did. 0 leaves the bias as it is."""


class MixtureFeedForwardConfig(LayerConfig):
    """A mixture of experts in place of a dense feed-forward layer (Shazeer et al. 2017, arXiv:1701.06538). A router
    chooses `experts_per_token` of `num_experts` experts for each token, and the layer's output is the weighted sum of
    theirs. It is dropless: every token has all experts that it chooses, whatever their load."""

    training_keys: ClassVar = frozenset({"balance"})
    logical_axes: ClassVar = {"num_experts": "experts", "d_ff": "feed_forward", "shared.d_ff": "feed_forward"}

    kind: Literal["mixture"] = "mixture"
    num_experts: Count
    """Experts to choose from, without shared ones."""
    experts_per_token: Count = 2
    """Experts that each token chooses (top-k)."""
    d_ff: Annotated[Count, InWords(default="a dense layer's / experts_per_token, where gated up to a multiple of 128")]
    """Hidden channels of one expert. If the command line changes `kind`, a `d_ff` in the file becomes that of each
    expert, unless the command line gives `d_ff` too."""
    activation: Activation = "silu"
    """The activation."""
    gated: bool = True
    """Multiply the activation by a third matrix's product."""
    bias: bool = False
    """Add biases to the products of experts, not to those of shared experts."""
    clamp: Positive | None = None
    """Before the activation, limit the gate to at most this, and what it multiplies to between ± this (GPT-OSS)."""
    gate_slope: Positive | None = None
    """Use gate · σ(slope · gate) as the activation (GPT-OSS)."""
    up_offset: float = 0.0
    """Added to what the activation multiplies (GPT-OSS)."""
    latent_dim: Count | None = None
    """Let experts read and write a projection of the residual with this many channels, in place of `d_model`
    (Nemotron-3)."""
    router: RouterConfig = RouterConfig()
    shared: SharedExpertsConfig | None = None
    balance: BalanceConfig = BalanceConfig()

    @classmethod
    def with_sizes(cls, table: dict[str, Any], d_model: int) -> dict[str, Any]:
        """Return a table with its `d_ff`: a token's experts are together as wide as a dense layer, in whole tiles."""
        chosen, is_gated = table.get("experts_per_token", 2), table.get("gated", True)
        if not isinstance(chosen, int) or chosen < 1:  # said where it is validated
            return table
        width = -(-8 * d_model // (3 * chosen * _TILE)) * _TILE if is_gated else -(-4 * d_model // chosen)
        return {"d_ff": width, **table}

    @model_validator(mode="after")
    def _consistent(self):
        key = "model.feed_forward"
        if self.balance.bias_rate is not None and not self.router.selection_bias:
            raise ValueError(
                f"{key}.balance.bias_rate = {self.balance.bias_rate:g} moves a selection bias, which {key}.router has "
                "none of; set router.selection_bias = true or leave the rate out"
            )
        if self.router.epsilon and (not self.router.normalise or self.router.scores == "softmax_of_chosen"):
            raise ValueError(
                f"{key}.router.epsilon = {self.router.epsilon:g} is added to a sum that nothing is divided by; leave "
                "it out"
            )
        if self.router.selection_bias and self.router.scores == "softmax_of_chosen":
            raise ValueError(
                f"{key}.router.selection_bias is added to scores of all experts, and scores = 'softmax_of_chosen' has "
                "none; take 'softmax' or 'sigmoid'"
            )
        if not self.router.normalise and self.router.scores == "softmax_of_chosen":
            raise ValueError(
                f"{key}.router.normalise = false with scores = 'softmax_of_chosen', whose sum is 1; leave it out"
            )
        if self.gate_slope is not None and self.activation != "silu":
            raise ValueError(
                f"{key}.gate_slope = {self.gate_slope:g} takes the place of an activation; leave out activation = "
                f"{self.activation!r}"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"{key}.experts_per_token = {self.experts_per_token} is more than {key}.num_experts = "
                f"{self.num_experts}; choose fewer"
            )
        if not self.gated and (self.clamp or self.gate_slope or self.up_offset):
            raise ValueError(
                f"{key}.gated = false has no gate, which clamp, gate_slope and up_offset need; leave these out"
            )
        if (groups := self.router.groups) is not None:
            if self.num_experts % groups.count:
                raise ValueError(
                    f"{key}.router.groups.count = {groups.count} does not divide {key}.num_experts = "
                    f"{self.num_experts}; set it to one that does"
                )
            size = self.num_experts // groups.count
            if groups.kept * size < self.experts_per_token:
                raise ValueError(
                    f"{key}.router.groups keep {groups.kept * size} experts, fewer than {key}.experts_per_token = "
                    f"{self.experts_per_token}; keep more groups"
                )
            if groups.score == "top2_sum" and size < 2:
                raise ValueError(f'{key}.router.groups.score = "top2_sum" needs groups of two experts or more')
        return self

    @property
    def bias_rate(self) -> float:
        """The step by which an update moves the selection bias; 0 if nothing moves it."""
        rate = self.balance.bias_rate
        return (_BIAS_RATE if rate is None else rate) if self.router.selection_bias else 0.0

    @property
    def activations(self) -> tuple[str, ...]:
        """Names of the activations that rematerialisation can keep."""
        return ("up", "gate") if self.gated else ("up",)
