"""The architecture of a decoder-only Transformer as orthogonal choices. Imports no JAX."""

import re
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from jaxlm.core.explain import explain
from jaxlm.core.schema import (
    Count,
    InWords,
    Kinds,
    NonNegative,
    Positive,
    Section,
    chosen,
    kind_of,
    merged,
    without_none,
)
from jaxlm.models.latent_config import LatentAttentionConfig
from jaxlm.models.layer_config import AttentionConfig as AttentionConfig
from jaxlm.models.layer_config import LayerConfig, NoAttentionConfig, NoFeedForwardConfig
from jaxlm.models.position_config import LearnedPositionsConfig, LongRopeScalingConfig, NoPositionsConfig, RopeConfig
from jaxlm.models.recurrent_config import GatedDeltaConfig, Mamba2Config, ShortConvolutionConfig

NormPlacement = Literal["before", "after", "both"]
QKNorm = Literal["none", "head", "head_after_rope", "projection"]
Residual = Literal["sequential", "parallel", "parallel_shared_norm"]
Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu_squared"]

MOST_LAYERS = 100_000  # layers are listed: more are a slip, and would fill the memory
_TILE = 128  # channels of a matrix unit's tile
_BIAS_RATE = 0.001  # DeepSeek-V3's (arXiv:2412.19437, section 4.2)


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


class PatternEntryConfig(Section):
    """Layers of a pattern, one after another. Its other keys are a patch of a block's keys.

    The patch is merged into the keys of the model's block, as a file into its `model.base`. Gemma 3 has two entries:
    `name = "local", layers = 5, attention = { window = 512 }`, and `name = "global"`.
    """

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")]
    """Its name, unique in the pattern."""
    layers: Count | Literal["rest"] = 1
    """The number of its layers; "rest" takes all that are left."""

    def __hash__(self) -> int:
        return hash((self.name, self.layers))

    @property
    def patch(self) -> dict[str, Any]:
        """The keys of a block that it changes."""
        return self.model_extra or {}


class ModelConfig(BlockConfig):
    """A decoder-only Transformer. All layers have the block that its own keys describe, or those of a `pattern`.

    In a file, `base = "FILE"` names another, relative to it, whose [model] the other keys change.
    """

    vocab_size: Count
    """Tokens of the vocabulary."""
    context_length: Count
    """The longest sequence that it can read, in tokens."""
    num_layers: Annotated[int, Field(gt=0, le=MOST_LAYERS)]
    """Layers."""
    d_model: Count
    """Channels of the residual stream."""
    pattern: tuple[PatternEntryConfig, ...] = ()
    """Entries of layers, repeated until there are `num_layers`, unless the last takes the rest."""
    tied_embeddings: bool = False
    """Use the token embedding as the unembedding too."""
    embedding_scale: Positive | Literal["sqrt_d_model"] = 1.0
    """Multiplies embeddings: a number (Granite), or √d_model rounded to their dtype (Gemma)."""
    embedding_norm: bool = False
    """Normalise embeddings, learned positions among them (nanochat)."""
    logit_scale: Positive = 1.0
    """Multiplies logits, before their cap (Cohere, Granite)."""
    logit_soft_cap: Positive | None = None
    """Keeps logits between −cap and cap."""
    initializer_std: Positive = 0.02
    """Standard deviation of the initial weights."""

    @model_validator(mode="before")
    @classmethod
    def _fill_sizes(cls, values):
        """Write the sizes that follow from several tables into those of attention and of the feed-forward layer, so
        that a resolved file is whole."""
        if not isinstance(values, dict):
            return values
        attention, feed_forward = (values.get(name, {}) for name in ("attention", "feed_forward"))
        width, pattern = values.get("d_model"), values.get("pattern")
        filled = {**values, "attention": attention, "feed_forward": feed_forward}
        if isinstance(feed_forward, dict) and isinstance(width, int):
            filled["feed_forward"] = _with_own_sizes(FEED_FORWARDS, feed_forward, width)
            if isinstance(pattern, list | tuple):
                pattern = tuple(_with_sizes_of_kind(entry, feed_forward, width) for entry in pattern)
                filled["pattern"] = pattern
        if not isinstance(attention, dict):
            return filled
        filled["attention"] = _with_head_dim(attention, width, "model.attention")
        if isinstance(pattern, list | tuple):
            base = {"kind": kind_of(next(iter(ATTENTIONS))), **attention}
            filled["pattern"] = tuple(_with_own_heads(entry, base, width, i) for i, entry in enumerate(pattern))
        return filled

    @model_validator(mode="after")
    def _whole(self):
        names = [entry.name for entry in self.pattern]
        for i, entry in enumerate(self.pattern):
            if (first := names.index(entry.name)) < i:
                raise ValueError(f"model.pattern[{i}].name = {entry.name!r} is the name of model.pattern[{first}] too")
            if entry.layers == "rest" and i < len(names) - 1:
                raise ValueError(
                    f"model.pattern[{i}].layers = 'rest' leaves none for the entries after it; move it last"
                )
        *_, counted = accumulate((entry.layers for entry in self.pattern if entry.layers != "rest"), initial=0)
        if counted > self.num_layers:
            raise ValueError(
                f"model.pattern has {counted} layers, more than model.num_layers = {self.num_layers}; change either"
            )
        if counted == self.num_layers and self.pattern[-1].layers == "rest":
            raise ValueError(
                f"model.pattern[{len(names) - 1}] is left no layers: those before it are all of model.num_layers = "
                f"{self.num_layers}; leave it out"
            )
        layers = [layer.feed_forward for layer in self.layers]  # the merged blocks are valid
        biased = {f.num_experts for f in layers if isinstance(f, MixtureFeedForwardConfig) and f.router.selection_bias}
        if len(biased) > 1:
            raise ValueError(
                f"model.pattern has layers of {' and of '.join(map(str, sorted(biased)))} experts with "
                "router.selection_bias; give these as many experts, or no bias"
            )
        return self

    @cached_property
    def entries(self) -> tuple[tuple[str, BlockConfig], ...]:
        """The name and the block of each entry of the pattern; without one "layers" and the model's own block."""
        keys = BlockConfig.model_fields
        if not self.pattern:
            return (("layers", BlockConfig.model_validate({key: getattr(self, key) for key in keys})),)
        base = self.model_dump(include=set(keys))
        blocks: dict[BlockConfig, BlockConfig] = {}  # one object of equal ones
        named_blocks = []
        for i, entry in enumerate(self.pattern):
            block = _patched(base, entry.patch, f"model.pattern[{i}]")
            here, there = block.position.kind, self.position.kind
            if here != there and "learned" in (here, there):
                raise ValueError(
                    f"model.pattern[{i}].position.kind = {here!r}, and model.position.kind = {there!r}: learned "
                    "positions belong to the whole model, leave it out"
                )
            named_blocks.append((entry.name, blocks.setdefault(block, block)))
        return tuple(named_blocks)

    @cached_property
    def layers(self) -> tuple[BlockConfig, ...]:
        """The block of each layer; equal ones are one object."""
        return tuple(self.entries[i][1] for i in self._entry_of_layers)

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """The name of each layer's entry in the pattern; "layers" without one."""
        return tuple(self.entries[i][0] for i in self._entry_of_layers)

    @property
    def _entry_of_layers(self) -> list[int]:
        """The index of each layer's entry."""
        counts = [entry.layers for entry in self.pattern] or ["rest"]
        once = [i for i, count in enumerate(counts) for _ in range(count if isinstance(count, int) else 0)]
        if counts[-1] == "rest":
            return once + [len(counts) - 1] * (self.num_layers - len(once))
        return [once[layer % len(once)] for layer in range(self.num_layers)]

    @property
    def activations(self) -> tuple[str, ...]:
        """Names of the activations of any layer that `execution.remat` may keep."""
        return tuple(dict.fromkeys(name for _, block in self.entries for name in block.activations))

    def based_on(self, block: BlockConfig) -> "ModelConfig":
        """Return a model of the same layers whose own keys are those of this block, which the pattern then changes."""
        keys = BlockConfig.model_fields
        pattern = tuple(
            PatternEntryConfig.model_validate({"name": name, "layers": entry.layers, **own.model_dump()})
            for entry, (name, own) in zip(self.pattern, self.entries, strict=True)
        )
        return self.model_copy(update={**{key: getattr(block, key) for key in keys}, "pattern": pattern})

    @property
    def activation_sources(self) -> frozenset[str]:
        """Names of the activations of any layer that others are made of, in whose place it may keep these."""
        parts = (part for _, block in self.entries for part in (block.attention, block.feed_forward))
        return frozenset(name for part in parts for name in part.activation_sources)

    def of(self, block: BlockConfig) -> "ModelConfig":
        """Return the model with this block in all layers."""
        return self.model_copy(update={**{key: getattr(block, key) for key in BlockConfig.model_fields}, "pattern": ()})


def _with_own_sizes(kinds: Kinds, table: dict[str, Any], width: int) -> dict[str, Any]:
    """Return a table with the sizes that its section takes from the model's width."""
    section, *others = chosen(kinds, table)
    return table if others or not issubclass(section, LayerConfig) else section.with_sizes(table, width)


def _with_head_dim(attention: dict[str, Any], width: Any, key: str) -> dict[str, Any]:
    """Return a table of attention, which stands at a key, with the default of `head_dim`."""
    if "num_heads" not in attention:
        return attention
    heads = attention["num_heads"]
    for name, size in ((f"{key}.num_heads", heads), ("model.d_model", width)):
        if size is not None and not isinstance(size, int):
            raise ValueError(f"{name} = {size!r}: it must be an integer")
    sections = chosen(ATTENTIONS, attention)
    asked = all("head_dim" in s.model_fields and s.model_fields["head_dim"].is_required() for s in sections)
    if asked and "head_dim" not in attention and isinstance(width, int) and heads > 0:
        if width % heads:
            raise ValueError(
                f"{key}.num_heads = {heads} does not divide model.d_model = {width}: "
                f"change one of them, or set {key}.head_dim"
            )
        return {**attention, "head_dim": width // heads}
    return attention


def _with_sizes_of_kind(entry: Any, base: dict[str, Any], width: int) -> Any:
    """Return an entry of a pattern with the sizes of its feed-forward layer, if that is of another kind than the
    model's."""
    patch = entry.get("feed_forward") if isinstance(entry, dict) else None
    default = kind_of(next(iter(FEED_FORWARDS)))
    if not isinstance(patch, dict) or patch.get("kind", base.get("kind", default)) == base.get("kind", default):
        return entry
    return {**entry, "feed_forward": _with_own_sizes(FEED_FORWARDS, patch, width)}


def _with_own_heads(entry: Any, base: dict[str, Any], width: Any, index: int) -> Any:
    """Return an entry of a pattern with the defaults of attention that follow from its keys and not from the model's.

    The model's defaults would be merged into it otherwise.
    """
    patch = entry.get("attention") if isinstance(entry, dict) else None
    if not isinstance(patch, dict):
        return entry

    def resolved(table: dict[str, Any], key: str) -> dict[str, Any]:
        filled = _with_head_dim(table, width, key)
        try:
            (section,) = chosen(ATTENTIONS, filled)
            return section.model_validate(filled).model_dump(exclude_none=True)
        except ValueError:  # said where the whole block is validated
            return filled

    def patched(table: dict[str, Any]) -> dict[str, Any]:
        return merged({"attention": table}, {"attention": patch})["attention"]

    inherited = patched(resolved(base, "model.attention"))
    own = resolved(patched(base), f"model.pattern[{index}].attention")
    changes = {name: value for name, value in own.items() if inherited.get(name) != value}
    return {**entry, "attention": {**patch, **changes}} if changes else entry


class _Patched(Section):
    """The place of a merged block in a file, for the messages of its errors."""

    model: BlockConfig


def _patched(base: Mapping[str, Any], patch: Mapping[str, Any], key: str) -> BlockConfig:
    """Return a block with a patch merged in. Raises ValueError in one line about the keys of the entry."""
    whole = {"model": without_none(merged(base, patch), [BlockConfig])}
    try:
        return _Patched.model_validate(whole).model
    except ValidationError as error:
        line = explain(error, _Patched, whole, set())
        raise ValueError(re.sub(rf"\bmodel\.({'|'.join(whole['model'])})\b", rf"{key}.\1", line)) from None
