"""The decoder-only Transformer, assembled from interchangeable layers."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlm.models import config, doors
from jaxlm.models.attention import attention
from jaxlm.models.cache import Cache, CacheEntry, LayerCache, NoCache, Slot
from jaxlm.models.doors import Dropout, add, look_up, scale
from jaxlm.models.execution_config import ExecutionConfig
from jaxlm.models.feed_forward import feed_forward
from jaxlm.models.layers import Slots, copied, through, through_stage, written_out
from jaxlm.models.masks import Mask
from jaxlm.models.norms import NoNorm, Norm, norm
from jaxlm.models.parameters import Module, normal, param
from jaxlm.models.positions import LayerRows
from jaxlm.models.quantized_matrix import QuantizedMatrix
from jaxlm.models.rows import Auxiliary, LayerIndex, RowContext
from jaxlm.models.stacks import Groups, grouped


class Block(Module):
    """One layer: attention and feed-forward, or one of the two, each with norms before it, after it, or both, added to
    the residual."""

    def __init__(self, model: config.ModelConfig, rngs: nnx.Rngs):
        def norm_where(there: bool) -> Norm:
            return norm(model, rngs) if there else NoNorm()

        before, after = model.norm_placement != "after", model.norm_placement != "before"
        attends, feeds = model.attention.kind != "none", model.feed_forward.kind != "none"
        self.residual, self.residual_scale = model.residual, model.residual_scale
        self.attention_norm = norm_where(before and attends)
        self.attention = attention(model, rngs)
        self.feed_forward_norm = norm_where(before and feeds and model.residual != "parallel_shared_norm")
        self.feed_forward = feed_forward(model, rngs)
        self.attention_post_norm = norm_where(after and attends)
        self.feed_forward_post_norm = norm_where(after and feeds)

    def slots(self) -> dict[str, Slot]:
        """Return what the layer keeps of earlier tokens."""
        return {} if self.attention is None else self.attention.slots()

    def __call__(
        self, x_BTD: jax.Array, rows: RowContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache, Auxiliary]:
        """Return the layer's output for x, [B, T, D] both, and the cache after it."""
        if self.feed_forward is None:
            attention_BTD, cache, auxiliary = self._attended(self.attention_norm(x_BTD), rows, cache)
            return add(x_BTD, attention_BTD), cache, auxiliary
        if self.attention is None:
            feed_forward_BTD, auxiliary = self._fed_forward(self.feed_forward_norm(x_BTD), rows)
            return add(x_BTD, feed_forward_BTD), cache, auxiliary
        form = self._sequential if self.residual == "sequential" else self._parallel
        return form(x_BTD, rows, cache)

    def _attended(
        self, normalised_BTD: jax.Array, rows: RowContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache, Auxiliary]:
        """Return what attention adds to the residual, and the cache after it."""
        assert self.attention is not None, "a layer of this form has attention"
        attention_BTD, cache, auxiliary = self.attention(normalised_BTD, rows, cache)
        attention_BTD = scale(self.attention_post_norm(attention_BTD), self.residual_scale)
        return rows.dropout(attention_BTD, 0), cache, auxiliary

    def _fed_forward(self, normalised_BTD: jax.Array, rows: RowContext) -> tuple[jax.Array, Auxiliary]:
        """Return what the feed-forward layer adds to the residual."""
        assert self.feed_forward is not None, "a layer of this form has a feed-forward layer"
        feed_forward_BTD, auxiliary = self.feed_forward(normalised_BTD, rows)
        feed_forward_BTD = scale(self.feed_forward_post_norm(feed_forward_BTD), self.residual_scale)
        return rows.dropout(feed_forward_BTD, 1), auxiliary

    def _sequential(
        self, x_BTD: jax.Array, rows: RowContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache, Auxiliary]:
        """Add attention of x to x, then the feed-forward layer of the sum."""
        attention_BTD, cache, of_attention = self._attended(self.attention_norm(x_BTD), rows, cache)
        x_BTD, normalised_BTD = self.feed_forward_norm(x_BTD, residual=attention_BTD)
        feed_forward_BTD, of_feed_forward = self._fed_forward(normalised_BTD, rows)
        return add(x_BTD, feed_forward_BTD), cache, of_attention | of_feed_forward

    def _parallel(
        self, x_BTD: jax.Array, rows: RowContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache, Auxiliary]:
        """Add to x both attention and the feed-forward layer of x itself (arXiv:2204.02311, section 2)."""
        normalised_BTD = self.attention_norm(x_BTD)
        attention_BTD, cache, of_attention = self._attended(normalised_BTD, rows, cache)
        if self.residual != "parallel_shared_norm":
            normalised_BTD = self.feed_forward_norm(x_BTD)
        feed_forward_BTD, of_feed_forward = self._fed_forward(normalised_BTD, rows)
        return add(x_BTD, add(attention_BTD, feed_forward_BTD)), cache, of_attention | of_feed_forward


class Transformer(Module):
    """Token and position embedding, blocks, a final norm and the unembedding.

    Blocks of equal structure are stacked; `unrolled` ones have arrays of their own, and no loop runs them.
    """

    unembedding: nnx.Param | QuantizedMatrix | None = nnx.data()

    def __init__(self, model: config.ModelConfig, rngs: nnx.Rngs, unrolled: bool = False):
        V, D, std = model.vocab_size, model.d_model, model.initializer_std
        self.model = model
        self.embedding = param(rngs, (V, D), "vocab -> embed", normal(std))
        learned = model.position.kind == "learned"
        self.positions = param(rngs, (model.context_length, D), "positions -> embed", normal(std)) if learned else None
        self.embedding_norm = norm(model, rngs) if model.embedding_norm else NoNorm()
        self.groups = Groups.of(model, Block, unrolled)
        self.layers = self.groups.stacked(model, Block, rngs)
        self.final_norm = norm(model, rngs)
        tied = model.tied_embeddings
        self.unembedding = None if tied else param(rngs, (D, V), "embed -> vocab", normal(std))

    def copied(self) -> dict[str, Fraction]:
        """Return the share of each parameter of the layers that training copies before its loops, by path."""
        shares, trees = copied(self.groups), self.groups.trees(self.layers)
        under = {name: ("layers",) if len(trees) == 1 else ("layers", name) for name in trees}
        paths = {name: [path for path, _ in nnx.to_flat_state(tree)] for name, tree in trees.items()}
        return {"/".join((*under[name], *map(str, path))): shares[name] for name in trees for path in paths[name]}

    def slots(self) -> dict[str, CacheEntry]:
        """Return what layers keep of earlier tokens, by entry: layers that keep the same have one.

        It depends on the mesh and the rules around.
        """
        blocks = self.groups.modules(self.layers)
        return {name: CacheEntry(len(at), blocks[at[0]].slots()) for name, at in self._entries().items()}

    def _entries(self) -> dict[str, tuple[int, ...]]:
        """Return the layers of each entry of a cache."""
        if self.groups.unrolled:
            return {name: layers for name, layers in self.groups.stacks}
        kept = [tuple(sorted(block.slots().items())) for block in self.groups.modules(self.layers)]
        return grouped(kept, self.model.layer_names)

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        key_range: Mask,
        *,
        cache: Cache = NoCache(),
        dropout: Dropout = Dropout(),
        execution: ExecutionConfig = ExecutionConfig(),
        length_BT: jax.Array | None = None,
        padding_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache, Auxiliary]:
        """Return the normalised residual after the last layer, [B, T, D], and the rest as `residual` does."""
        x_BTD, cache, auxiliary = self.residual(
            tokens_BT,
            positions_BT,
            key_range,
            cache=cache,
            dropout=dropout,
            execution=execution,
            length_BT=length_BT,
            padding_BT=padding_BT,
        )
        return self.final_norm(x_BTD), cache, auxiliary

    def residual(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        key_range: Mask,
        *,
        cache: Cache = NoCache(),
        dropout: Dropout = Dropout(),
        execution: ExecutionConfig = ExecutionConfig(),
        length_BT: jax.Array | None = None,
        padding_BT: jax.Array | None = None,
        observe: Callable[[jax.Array], dict[str, jax.Array]] = lambda x_BTD: {},
    ) -> tuple[jax.Array, Cache, Auxiliary]:
        """Return the residual after the last layer, [B, T, D], the cache after it, and what layers return besides.

        Args:
          tokens_BT: int32 token ids in [0, vocabulary).
          positions_BT: int32 position of each token in its document.
          key_range: the keys that each token attends to: indices of the row, or of the cache where there is one.
          cache: what layers keep of earlier tokens (`jaxlm.inference.cache`); the caller advances it.
          length_BT: int32 tokens of each token's document, which some scaled rotary angles depend on; those that the
            row has of it where None.
          padding_BT: bool, where there is no token; where None, what sees no key is padding.
          observe: statistics of the residual after each layer, besides those that layers return of themselves.

        The auxiliary losses and statistics are those of each layer that has them, [L] in layer order.
        """
        x_BTD = self.embedded(tokens_BT, positions_BT, dropout)
        rows = LayerRows(self.model, positions_BT, key_range, dropout, length_BT, padding_BT)
        entries = None if isinstance(cache, NoCache) else self._entries()
        (x_BTD, cache), auxiliary = through(
            self.groups, self.layers, self._layer(rows, observe), (x_BTD, cache), execution, entries
        )
        return x_BTD, cache, auxiliary

    def embedded(self, tokens_BT: jax.Array, positions_BT: jax.Array, dropout: Dropout = Dropout()) -> jax.Array:
        """Return the residual before the first layer, [B, T, D]; the arguments are those of `residual`."""
        x_BTD = look_up(self.embedding, tokens_BT)
        x_BTD = scale(x_BTD, self._embedding_scale(x_BTD.dtype))
        if self.positions is not None:
            x_BTD = add(x_BTD, look_up(self.positions, positions_BT))
        return dropout.at(0)(self.embedding_norm(x_BTD), 0)

    def through_layers(
        self, x_BTD: jax.Array, rows: LayerRows, execution: ExecutionConfig, layers: range
    ) -> tuple[jax.Array, Auxiliary]:
        """Return the residual after some layers that follow one another, [B, T, D], and their auxiliary results."""
        if not layers:
            return x_BTD, Auxiliary()
        carry = x_BTD, NoCache()
        (x_BTD, _), auxiliary = through(
            self.groups, self.layers, self._layer(rows), carry, execution, None, layers=layers
        )
        return x_BTD, auxiliary

    def through_stage(
        self, x_BTD: jax.Array, rows: LayerRows, execution: ExecutionConfig, slots: Slots
    ) -> tuple[jax.Array, Auxiliary]:
        """Return the residual after the layers of a stage, as `jaxlm.models.layers.through_stage` does."""
        (x_BTD, _), auxiliary = through_stage(self.groups, self._layer(rows), (x_BTD, NoCache()), execution, slots)
        return x_BTD, auxiliary

    def _layer(
        self, rows: LayerRows, observe: Callable[[jax.Array], dict[str, jax.Array]] = lambda x_BTD: {}
    ) -> Callable[[Block, tuple, LayerIndex], tuple]:
        """Return the function that carries the residual and a cache through a layer."""

        def layer(block: Block, *operands: Any) -> tuple:
            return block(*operands)

        if self.groups.unrolled:
            # XLA for TPUs would keep calls of a large function, and abort on maps over devices there that are inside
            # another map.
            layer = written_out(layer)

        def run(block: Block, carry: tuple, at: LayerIndex) -> tuple:
            x_BTD, cache = carry
            x_BTD, of_layer, auxiliary = layer(block, x_BTD, rows.of(at), cache.layer(at.entry, at.index))
            return (x_BTD, cache.put(at.entry, of_layer)), auxiliary | Auxiliary(statistics=observe(x_BTD))

        return run

    def _embedding_scale(self, dtype: jnp.dtype) -> float:
        """Return the number that multiplies embeddings of this dtype."""
        factor = self.model.embedding_scale
        return float(np.asarray(self.model.d_model**0.5, dtype)) if factor == "sqrt_d_model" else factor

    @property
    def unembedding_table(self) -> nnx.Param | QuantizedMatrix:
        """The unembedding [D, V], or the embedding [V, D] where it is tied and not quantised."""
        return self.embedding if self.unembedding is None else self.unembedding

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Unembed [B, T, D] to float32 logits [B, T, V], scaled, and between −cap and cap where there is a soft cap."""
        hidden_BTD = scale(hidden_BTD, self.model.logit_scale)
        return doors.logits(hidden_BTD, self.unembedding_table, self.model.logit_soft_cap)

    def token_losses(self, hidden_BTD: jax.Array, targets_BT: jax.Array, counted_BT: jax.Array) -> jax.Array:
        """Return the cross-entropy of each target, as `jaxlm.models.doors.token_losses` does."""
        hidden_BTD, cap = scale(hidden_BTD, self.model.logit_scale), self.model.logit_soft_cap
        return doors.token_losses(hidden_BTD, self.unembedding_table, targets_BT, counted_BT, cap)

    def cross_entropy(
        self, hidden_BTD: jax.Array, targets_BT: jax.Array, counted_BT: jax.Array, z_loss: float = 0.0
    ) -> dict[str, jax.Array]:
        """Return the terms of the objective of these targets, as `jaxlm.models.doors.cross_entropy` does."""
        # A scaled input has scaled logits, and no kernel has to know.
        hidden_BTD, cap = scale(hidden_BTD, self.model.logit_scale), self.model.logit_soft_cap
        return doors.cross_entropy(hidden_BTD, self.unembedding_table, targets_BT, counted_BT, cap, z_loss)
