"""The decoder-only Transformer, assembled from interchangeable parts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from jaxlm.models import config
from jaxlm.models.attention import attention
from jaxlm.models.feed_forward import feed_forward
from jaxlm.models.layers import Dropout, norm, product_in_float32, whole_sequence
from jaxlm.models.parameters import Module, normal, param, scope, stack
from jaxlm.models.positions import Rotation, Visible, rotation
from jaxlm.sharding import by_parts, constrain, is_parted


class Execution(NamedTuple):
    """How the layers run; the result is the same whichever is chosen.

    `remat`: what a layer keeps for its backward pass. `scan`: one compiled layer in a loop, or all written out.
    """

    remat: config.Remat = "none"
    scan: bool = True


class Block(Module):
    """One layer: attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: config.ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = norm(model, model.width, rngs)
        self.attention = attention(model, rngs)
        self.feed_forward_norm = norm(model, model.width, rngs)
        self.feed_forward = feed_forward(model, rngs)

    def __call__(
        self, x_BTD: jax.Array, visible: Visible, turn: Rotation | None, dropout: Dropout, cache: Any
    ) -> tuple[jax.Array, Any]:
        """x [B, T, D] → [B, T, D], and the cache extended by this layer."""
        read_BTD, cache = self.attention(self.attention_norm(x_BTD), visible, turn, cache)
        x_BTD, normalised_BTD = self.feed_forward_norm(x_BTD, residual=dropout(read_BTD, 0))
        return x_BTD + dropout(self.feed_forward(normalised_BTD), 1), cache


class Transformer(Module):
    """Token and position embedding, a stack of blocks, a final norm and the unembedding."""

    def __init__(self, model: config.ModelConfig, rngs: nnx.Rngs):
        V, D, std = model.vocabulary, model.width, model.initializer_std
        self.model = model
        self.embedding = param(rngs, (V, D), "vocab -> embed", normal(std))
        learned = model.position.kind == "learned"
        self.positions = param(rngs, (model.context, D), "positions -> embed", normal(std)) if learned else None
        self.layers = stack(lambda rngs: Block(model, rngs), model.layers, rngs)
        self.final_norm = norm(model, D, rngs)
        tied = model.tied_embeddings
        self.unembedding = None if tied else param(rngs, (D, V), "embed -> vocab", normal(std))

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        visible: Visible,
        *,
        cache: Any = None,
        dropout: Dropout = Dropout(),
        execution: Execution = Execution(),
    ) -> tuple[jax.Array, Any]:
        """The normalised residual stream after the last layer, [B, T, D], and the extended cache; see `residual`."""
        x_BTD, cache, _ = self.residual(
            tokens_BT, positions_BT, visible, cache=cache, dropout=dropout, execution=execution
        )
        return self.final_norm(x_BTD), cache

    def residual(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        visible: Visible,
        *,
        cache: Any = None,
        dropout: Dropout = Dropout(),
        execution: Execution = Execution(),
        observe: Callable[[jax.Array], Any] = lambda x_BTD: None,
    ) -> tuple[jax.Array, Any, Any]:
        """The residual stream after the last layer, [B, T, D], the extended cache, and what was observed.

        Args:
          tokens_BT: int32 token ids in [0, vocabulary).
          positions_BT: int32 position of each token in its document.
          visible: what each token may see; indices of the row, or of the cache where there is one.
          cache: keys and values of earlier tokens (`jaxlm.inference.cache.Cache`), or None.
          observe: a function of the stream after each layer; what it returns comes back stacked, [L, …].
        """
        x_BTD = _look_up(self.embedding, tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + _look_up(self.positions, positions_BT)
        x_BTD = dropout.at(0)(x_BTD, 0)

        turn = None
        if self.model.position.kind == "rotary":
            turn = rotation(self.model.position, self.model.attention.head_width, positions_BT)

        def run(block: Block, carry: tuple, layer: jax.Array) -> tuple:
            x_BTD, cache = block(carry[0], visible, turn, dropout.at(layer + 1), carry[1])
            return (x_BTD, cache), observe(x_BTD)

        (x_BTD, cache), observed = _through(self.layers, run, (x_BTD, cache), self.model.layers, execution)
        return x_BTD, cache, observed

    def unembedding_table(self) -> tuple[nnx.Param, str]:
        """What turns the stream into logits, and its dimensions: "DV", or "VD" where it is the embedding."""
        return (self.embedding, "VD") if self.unembedding is None else (self.unembedding, "DV")

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Unembed [B, T, D] to float32 logits [B, T, V]."""
        hidden_BTD = whole_sequence(hidden_BTD)
        rows, hidden = ("BT", hidden_BTD) if is_parted("stream") else ("R", rearrange(hidden_BTD, "B T D -> (B T) D"))
        table, letters = self.unembedding_table()
        with scope(table):
            logits = product_in_float32(f"{rows}D,{letters}->{rows}V", hidden, table[...])
        logits_BTV = logits.reshape(*hidden_BTD.shape[:-1], -1)
        return constrain(logits_BTV, "batch", "sequence", "act_vocab")


def _look_up(table: nnx.Param, index_BT: jax.Array) -> jax.Array:
    """Rows of a table [rows, D], as [B, T, D].

    The table is made whole in D first: left to itself, the partitioner gathers the ids and then moves the
    activations instead. The sequence is parted only behind the look-up: before it, the rows would be gathered.
    """
    with scope(table):
        rows_PRD = by_parts(constrain(table[...], table.axes[0], "act_model"), table.axes[0])
        x_BTD = looked_up(rows_PRD, index_BT)
        x_BTD = constrain(x_BTD, "batch", "sequence", "act_model")
        return constrain(x_BTD, "batch", "stream", "act_model")


def looked_up(rows_PRD: jax.Array, index_BT: jax.Array) -> jax.Array:
    """Rows of a table [P, R, D], which lies in P parts, by their numbers, int [B, T], as [B, T, D] in its dtype; beyond
    the table the nearest. The gradient of a table narrower than float32 is added up in float32."""
    return (_rows if rows_PRD.dtype == jnp.float32 else _narrow_rows)(rows_PRD, index_BT)


def _rows(rows_PRD: jax.Array, index_BT: jax.Array) -> jax.Array:
    """The parts stay where they are: each gives what it has and zeros for the rest, and the results are added."""
    parts, rows, _ = rows_PRD.shape

    def held(rows_RD: jax.Array, first: jax.Array) -> jax.Array:
        at_BT = jnp.clip(index_BT, 0, parts * rows - 1) - first
        x_BTD = jnp.take(rows_RD, at_BT, axis=0, mode="clip")
        return jnp.where(((0 <= at_BT) & (at_BT < rows))[..., None], x_BTD, 0)

    x_PBTD = jax.vmap(held)(rows_PRD, rows * jnp.arange(parts))
    # jnp.sum would add in float32, and send that: here one of the P is not zero.
    return jax.lax.reduce_sum(x_PBTD, axes=(0,))


_narrow_rows = jax.custom_vjp(_rows)


def _rows_forward(rows_PRD: jax.Array, index_BT: jax.Array) -> tuple[jax.Array, tuple]:
    # An empty array remembers shape and dtype, and lets the table go.
    return _rows(rows_PRD, index_BT), (index_BT, jnp.zeros((0, *rows_PRD.shape), rows_PRD.dtype))


def _rows_backward(saved: tuple, d_BTD: jax.Array) -> tuple[jax.Array, None]:
    """Of a frequent token thousands of gradients are added: in float32, since in bfloat16 the sum would stand still.
    Each device adds those of its own rows of the batch, and rounds before sums travel."""
    index_BT, like = saved
    _, parts, rows, D = like.shape

    def added(d_BTD: jax.Array, index_BT: jax.Array) -> jax.Array:
        """[P, R, D]. Sums of N tokens are as many or fewer: a table of them in float32 may be far larger."""
        place_N = jnp.arange(index_BT.size)
        index_N, order_N = jax.lax.sort((jnp.clip(index_BT, 0, parts * rows - 1).reshape(-1), place_N), num_keys=1)
        begins_N = jnp.concatenate([jnp.ones(1, bool), index_N[1:] != index_N[:-1]])
        at_N = jax.lax.cummax(jnp.where(begins_N, place_N, 0))  # each sum stands where its index begins
        sums_ND = jnp.zeros((index_BT.size, D), jnp.float32)
        sums_ND = sums_ND.at[at_N].add(d_BTD.reshape(-1, D)[order_N].astype(jnp.float32), indices_are_sorted=True)

        def put(first: jax.Array) -> jax.Array:
            held_N = begins_N & (first <= index_N) & (index_N < first + rows)
            row_N = jnp.where(held_N, index_N - first, rows)  # behind the last: dropped
            return jnp.zeros((rows, D), like.dtype).at[row_N].set(sums_ND.astype(like.dtype), mode="drop")

        return jax.vmap(put)(rows * jnp.arange(parts))

    d_GPRD = jax.vmap(added)(by_parts(d_BTD, "batch"), by_parts(index_BT, "batch"))
    return jax.lax.reduce_sum(d_GPRD, axes=(0,)), None


_narrow_rows.defvjp(_rows_forward, _rows_backward)


def _through(
    layers: Module, run: Callable[[Block, tuple, jax.Array], tuple], carry: tuple, n: int, execution: Execution
) -> tuple:
    """Carry a value through the stacked layers, scanned or unrolled over the same tree; and what each of them gives."""
    graph, stacked = nnx.split(layers)

    def body(carry: tuple, layer: tuple) -> tuple[tuple, Any]:
        tree, index = layer
        return run(nnx.merge(graph, tree), carry, index)

    if execution.remat != "none":
        saved = () if execution.remat == "full" else execution.remat
        # Inside scan nothing can be merged across iterations, so the barrier against it is needless there.
        body = jax.checkpoint(
            body,
            policy=jax.checkpoint_policies.save_only_these_names(*saved),
            prevent_cse=not execution.scan,
        )
    # unroll=True writes the loop out at trace time: the same tree, the same body, no while loop in the program.
    return jax.lax.scan(body, carry, (stacked, jnp.arange(n)), unroll=1 if execution.scan else n)
