"""The architecture of a decoder-only Transformer as orthogonal choices. Imports no JAX.

`AttentionConfig`, `LayerConfig` and `NormConfig` are here too, since the sections of plug-ins derive from them
(docs/plugins.md).
"""

from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxlm.core.schema import Count, Positive
from jaxlm.models.block_config import BlockConfig
from jaxlm.models.default_sizes import with_default_sizes
from jaxlm.models.feed_forward_config import MixtureFeedForwardConfig
from jaxlm.models.layer_config import AttentionConfig as AttentionConfig
from jaxlm.models.layer_config import LayerConfig as LayerConfig
from jaxlm.models.norm_config import NormConfig as NormConfig
from jaxlm.models.pattern_config import PatternEntryConfig, patched

MOST_LAYERS = 100_000  # layers are listed: more are a slip, and would fill the memory


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
    def _fill_sizes(cls, values: Any) -> Any:
        """Write the default sizes into the tables."""
        return with_default_sizes(values) if isinstance(values, dict) else values

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
            block = patched(base, entry.patch, f"model.pattern[{i}]")
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
