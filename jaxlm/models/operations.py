"""The operations through which every model computes: its doors.

An operation takes arrays and parameters, pins the sharding of its results by their logical axes, bears its name in
profiles and for rematerialisation, and chooses its implementation. Between operations a model holds mathematics alone.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlm.models import kernels
from jaxlm.models.embedding import looked_up
from jaxlm.models.parameters import RANK, AdaptedMatrix, scope
from jaxlm.models.recording import Axes, is_recording, mark
from jaxlm.parallel.partition import by_shards, constrain, is_sharded, mesh_around, partition, rules_around, shards_of
from kernels_pallas import flash_attention, linear_cross_entropy, rotary_embedding
from kernels_pallas import gated_activation as gated_operation
from kernels_pallas.core import slopes
from kernels_pallas.flash_attention import KeyRange
from kernels_pallas.linear_cross_entropy import xla
from kernels_pallas.paged_attention import paged_attention

# Logical axes of the arrays of a layer: the stream between blocks, what a block reads of it, heads and hidden numbers.
STREAM: Axes = ("batch", "residual", "act_embed")
WHOLE: Axes = ("batch", "sequence", "act_embed")
HEADS: Axes = ("batch", "sequence", "act_heads", "act_head_dim")
KV_HEADS: Axes = ("batch", "sequence", "act_kv_heads", "act_head_dim")
HIDDEN: Axes = ("batch", "sequence", "act_feed_forward")


class RopeTable(NamedTuple):
    """cos and sin of the rotary angles, float32 [B, T, R/2]: the first R channels of each head rotate."""

    cos: jax.Array
    sin: jax.Array


class CacheView(NamedTuple):
    """The slots of a layer's cache, for reading.

    `arrays`: by slot of tokens, [B, S, *shape]. `key_range`: the keys, as indices into S, that each token of this pass
    sees; None before they were written. `is_causal`: a promise that S are the tokens of this pass, and that none sees a
    key after its own.
    """

    arrays: dict[str, jax.Array]
    key_range: KeyRange | None = None
    is_causal: bool = False


@partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["rows"])
@dataclass(frozen=True)
class PagedSection:
    """Rows of a step in runs of `rows`, each of one sequence: the pages of these, int32 [Q, M], for Q · rows rows."""

    table: jax.Array
    rows: int


class PagedView(NamedTuple):
    """The slots of tokens of a layer's cache in pages, for reading by rows [R, 1] that follow one another in sections.

    `pages`: by slot, [P, …, S, H] where an entry is [..., H]: each head's tokens of a page together; [P, …, H, S] of
    those `tokens_last`. `key_range`: the positions that each row sees in its sequence.
    """

    pages: dict[str, jax.Array]
    sections: tuple[PagedSection, ...]
    key_range: KeyRange
    tokens_last: frozenset[str] = frozenset()

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The slots as a `CacheView` has them, [R, M · S, *shape]: a copy of all pages for each row."""
        table_RM = jnp.concatenate([jnp.repeat(each.table, each.rows, axis=0) for each in self.sections])

        def gathered(pages: jax.Array) -> jax.Array:
            by_token = jnp.moveaxis(pages, -2, 1)[table_RM]  # [R, M, S, …, H]
            return by_token.reshape(by_token.shape[0], -1, *by_token.shape[3:])

        return {name: gathered(self.pages_of(name, tokens_last=False)) for name in self.pages}

    def pages_of(self, name: str, *, tokens_last: bool) -> jax.Array:
        """Return the pages of a slot with tokens last, or last but one: a copy of all where they lie otherwise."""
        pages = self.pages[name]
        return pages if tokens_last == (name in self.tokens_last) else jnp.swapaxes(pages, -1, -2)


def look_up(table: nnx.Param, index_BT: jax.Array) -> jax.Array:
    """Return the rows of a table [rows, D] at these indices, as [B, T, D].

    The table is made whole in D first: left to itself, the partitioner gathers the ids and then moves the
    activations instead. The sequence is sharded only after the look-up: otherwise the rows would be gathered.
    """
    with scope(table):
        if is_recording():
            shape = jax.ShapeDtypeStruct((*index_BT.shape, table.shape[1]), table[...].dtype)
            return mark("look_up", [(table[...], table.axes), (index_BT, WHOLE[:2])], [(shape, STREAM)])[0]
        rows_PRD = by_shards(constrain(table[...], table.axes[0], "act_embed"), table.axes[0])
        return constrain(constrain(looked_up(rows_PRD, index_BT), *WHOLE), *STREAM)


def gathered(x_BTD: jax.Array) -> jax.Array:
    """Return the normalised stream [B, T, D] with all of T on each device, gathered in its present dtype."""
    if is_recording():
        return mark("gather", [(x_BTD, STREAM)], [(x_BTD, WHOLE)])[0]
    # Without the first constraint the partitioner gathers before the cast from float32.
    return constrain(constrain(x_BTD, *STREAM), *WHOLE)


def linear(
    x: jax.Array,
    *matrices: nnx.Param | AdaptedMatrix,
    biases: Sequence[nnx.Param | None] = (),
    names: Sequence[str] = (),
    readers: int | None = None,
) -> tuple[jax.Array, ...]:
    """Return x [B, T, *inputs] · matrix [*inputs, *outputs] (+ bias [*outputs]) of each matrix, in x's dtype; of one
    with an adapter x·W + scale · (x·A)·B.

    The axes that a matrix declares say which are inputs, and how its result [B, T, *outputs] is sharded. A stream is
    gathered once for all matrices that read it, and what is added to a stream is scattered again.

    Args:
      biases: one for each matrix, or None; none has one where this is empty.
      names: of the results, for rematerialisation; none has one where this is empty.
      readers: query heads that read the key/value heads. Where devices hold fewer of those than they need, each is
        computed and kept by all devices whose query heads read it.
    """
    plain = [matrix.base if isinstance(matrix, AdaptedMatrix) else matrix for matrix in matrices]
    if plain[0].inputs == ("embed",):
        x = gathered(x)
    reads = [readers if "kv_heads" in _axes(matrix) else None for matrix in plain]
    # Adapters come first, so that the gradients of x by the other matrices follow one another: these are parts of sums
    # over devices, which are then added once.
    added = [
        _adapted(x, whole, _made(matrix), read) if isinstance(whole, AdaptedMatrix) else None
        for whole, matrix, read in zip(matrices, plain, reads, strict=True)
    ]
    results = []
    for i, (matrix, whole) in enumerate(zip(plain, matrices, strict=True)):
        made, more = _made(matrix), added[i]
        with nullcontext() if whole is matrix else jax.named_scope(whole.name or ""):
            y = _product(x, matrix, biases[i] if biases else None, reads[i], made)
            if names or made == STREAM:
                y = constrain(y, *made)
            y = y if more is None else y + more
        results.append(checkpoint_name(y, names[i]) if names else y)
    return tuple(results)


def _adapted(x: jax.Array, matrix: AdaptedMatrix, made: Axes, readers: int | None) -> jax.Array:
    """Return scale · (x·A)·B, with these logical axes: each device makes its part of a stream from its part of x·A."""
    rows = made[:2]
    narrow = *rows, f"act_{RANK}"
    with jax.named_scope(matrix.name or ""):
        x_BTR = scale(constrain(_product(x, matrix.a, None, made=narrow), *narrow), matrix.scale, narrow)
        return constrain(_product(x_BTR, matrix.b, None, readers, made, rows), *made)


def kv_heads(size: int, readers: int) -> int:
    """Return the number of key/value heads that `readers` query heads read, with the copies that `linear` makes."""
    return math.lcm(size, shards_of("act_heads", readers))


def _made(matrix: nnx.Param) -> Axes:
    """Return the logical axes of what a matrix makes: what is as wide as the stream is added to it."""
    outputs = _axes(matrix)[len(matrix.inputs) :]
    return STREAM if outputs == ("embed",) else (*WHOLE[:2], *(f"act_{axis}" for axis in outputs))


def _axes(parameter: nnx.Param) -> tuple[str, ...]:
    """Return the logical axes of a parameter's value: inside a loop over layers that of the layers is gone."""
    return parameter.axes[-parameter[...].ndim :]


def _product(
    x: jax.Array,
    matrix: nnx.Param,
    bias: nnx.Param | None,
    readers: int | None = None,
    made: Axes = (),
    rows: Axes = WHOLE[:2],
) -> jax.Array:
    """Return x · matrix (+ bias); where there are readers, each of its key/value heads as often as they need it. The
    logical axes of the result are `made`, and the first ones of x `rows`.

    Where T is not sharded it is one [B·T, I] × [I, O] product: XLA's CPU code for it is a third faster than for the
    batched form.
    """
    contracted = len(matrix.inputs)
    sizes, inputs = x.shape[: x.ndim - contracted], math.prod(matrix.shape[:contracted])
    with scope(matrix):
        if is_recording():
            axes = (*rows, *(f"act_{axis}" for axis in matrix.inputs))
            weights = [(p[...], _axes(p)) for p in (matrix, bias) if p is not None]
            shape = jax.ShapeDtypeStruct((*sizes, *matrix[...].shape[contracted:]), x.dtype)
            return mark("linear", [(x, axes), *weights], [(shape, made)], readers=readers)[0]
        size = matrix[...].shape[contracted]
        copies = 1 if readers is None else kv_heads(size, readers) // size
        weights = _copied(matrix, contracted, copies)
        if is_sharded("residual"):
            y = jnp.tensordot(x, weights, contracted)
        else:
            y = jnp.matmul(x.reshape(-1, inputs), weights.reshape(inputs, -1))
            y = y.reshape(*sizes, *weights.shape[contracted:])
        return y if bias is None else y + _spread(_copied(bias, 0, copies), y)


def _copied(parameter: nnx.Param, dimension: int, copies: int) -> jax.Array:
    """Repeat each entry of a replicated dimension `copies` times, and shard the result."""
    if copies == 1:
        return parameter[...]
    axes = _axes(parameter)
    return constrain(jnp.repeat(constrain(parameter[...], *axes), copies, axis=dimension), *axes)


def _spread(bias: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast a bias [*outputs] to the shape and dtype of an array [..., *outputs].

    It goes through float32, in which its gradient is then accumulated: XLA for GPUs and CPUs would round each sum of
    two to bfloat16.
    """
    wide = bias.astype(np.promote_types(bias.dtype, jnp.float32))
    return jnp.broadcast_to(wide, like.shape).astype(like.dtype)


def norm(
    operation: Callable[..., Any],
    x: jax.Array,
    axes: Axes,
    vectors: Sequence[nnx.Param | None],
    residual: jax.Array | None = None,
    dimensions: int = 1,
    **options: Any,
) -> Any:
    """Return a norm of x, an operation of `kernels_pallas`, over its last `dimensions`.

    Where devices share one of these, XLA computes the norm, with a sum over the devices.

    Args:
      operation: `rms_norm` or `layer_norm`, with its `options`.
      axes: the logical axes of x.
      vectors: the gain, and the bias where the operation has one, of the shape of these dimensions. Those of key/value
        heads are copied as the heads are.
      residual: where it is given the result is (x + residual, its norm), by one kernel.
    """
    normalised = axes[-dimensions:]
    if is_recording():
        given = [(v[...], normalised) for v in vectors if v is not None]
        results = [(x, axes)] * (1 if residual is None else 2)
        made = mark(
            operation.__name__, [(x, axes), *given, (residual, axes)], results, dimensions=dimensions, **options
        )
        return made[0] if residual is None else tuple(made)

    def normalise(x: jax.Array, residual: jax.Array | None, *vectors: jax.Array | None, **options: Any) -> Any:
        rows = x.shape[:-dimensions]
        flat = [v if v is None else v.reshape(-1) for v in vectors]
        total = residual if residual is None else residual.reshape(*rows, width)
        made = operation(x.reshape(*rows, width), *flat, residual=total, **options)
        return jax.tree.map(lambda y: y.reshape(*rows, *shape), made)

    shape = x.shape[-dimensions:]
    width = math.prod(shape)
    of_heads = [v if v is None else _copied(v, 0, shape[0] // v[...].shape[0]) for v in vectors]
    if any(axis and shards_of(axis, size) > 1 for axis, size in zip(normalised, shape, strict=True)):
        return normalise(x, residual, *of_heads, implementation="xla", **options)
    return kernels.run(normalise, (x, axes), (residual, axes), *((v, normalised) for v in of_heads), **options)


def rope(x_BTNH: jax.Array, axes: Axes, table: RopeTable | None) -> jax.Array:
    """Rotate the pairs (x[i], x[i + R/2]) of x, which has these logical axes, by the table's angles; float32 inside.

    Channels from R on pass. Without a table it is x.
    """
    if table is None:
        return x_BTNH
    angles = *axes[:2], None
    if is_recording():
        return mark("rope", [(x_BTNH, axes), (table.cos, angles), (table.sin, angles)], [(x_BTNH, axes)])[0]
    width = 2 * table.cos.shape[-1]
    first = x_BTNH if width == x_BTNH.shape[-1] else x_BTNH[..., :width]
    rotated = kernels.run(rotary_embedding, (first, axes), (table.cos, angles), (table.sin, angles))
    return rotated if first is x_BTNH else jnp.concatenate([rotated, x_BTNH[..., width:]], axis=-1)


def named_heads(query_BTNH: jax.Array, key_BTKH: jax.Array, value_BTKH: jax.Array) -> tuple[jax.Array, ...]:
    """Return the operands of attention, sharded by heads and named "query", "key" and "value"."""
    arrays = (query_BTNH, HEADS, "query"), (key_BTKH, KV_HEADS, "key"), (value_BTKH, KV_HEADS, "value")
    return tuple(checkpoint_name(constrain(x, *axes), name) for x, axes, name in arrays)


def attention(
    query_BTNH: jax.Array,
    view: CacheView | PagedView,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
) -> jax.Array:
    """Return softmax(cap(scale · q·kᵀ)) · v over the keys in range, [B, T, N, H] (`kernels_pallas.flash_attention`,
    or `paged_attention` where they lie in pages).

    Args:
      view: has a `key` and a `value`, [B, S, K, H], or pages of them.
      window: the most keys that a token sees, which the key range of the view holds already; for recordings.
    """

    def operation(query: Any, key: Any, value: Any, start: Any, end: Any, **options: Any) -> Any:
        return flash_attention(query, key, value, key_range=(start, end), **options)

    if isinstance(view, PagedView):
        return constrain(_paged_attention(query_BTNH, view, scale=scale, soft_cap=soft_cap), *HEADS)
    assert view.key_range is not None, "the cache is updated before attention reads it"
    arrays = (query_BTNH, HEADS), (view.arrays["key"], KV_HEADS), (view.arrays["value"], KV_HEADS)
    intervals = [(x_BT, HEADS[:2]) for x_BT in view.key_range]
    options = {"is_causal": view.is_causal, "scale": scale, "soft_cap": soft_cap}
    if is_recording():
        shape = jax.ShapeDtypeStruct((*query_BTNH.shape[:3], view.arrays["value"].shape[-1]), query_BTNH.dtype)
        (attended,) = mark("attention", [*arrays, *intervals], [(shape, HEADS)], window=window, **options)
        return checkpoint_name(attended, "attention")
    attended = kernels.run(operation, *arrays, *intervals, **options)
    return constrain(attended, *HEADS)


def _paged_attention(query_R1NH: jax.Array, view: PagedView, **options: Any) -> jax.Array:
    """Return attention by the rows of each section, [R, 1, N, H]."""
    key, value = view.pages_of("key", tokens_last=True), view.pages_of("value", tokens_last=False)
    attended, at = [], 0
    for section in view.sections:
        table_QM, rows = section.table, section.rows
        Q = len(table_QM)
        part = slice(at, at + Q * rows)
        query_QTNH = query_R1NH[part].reshape(Q, rows, *query_R1NH.shape[2:])
        seen = KeyRange(*(x_R1[part].reshape(Q, rows) for x_R1 in view.key_range))
        made_QTNH = paged_attention(query_QTNH, key, value, table_QM, key_range=seen, **options)
        attended.append(made_QTNH.reshape(Q * rows, 1, *made_QTNH.shape[2:]))
        at += Q * rows
    return jnp.concatenate(attended)


def activation(name: str, x: jax.Array) -> jax.Array:
    """Return an activation of each number of x (`kernels_pallas.core.activations`), in its dtype."""
    if is_recording():
        return mark("activation", [(x, HIDDEN)], [(x, HIDDEN)], name=name)[0]
    return slopes.activation(name, x)


def gated(name: str, gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    """Return activation(gate) ⊙ up (arXiv:2002.05202, equation 5)."""
    if is_recording():
        return mark("gated_activation", [(gate_BTF, HIDDEN), (up_BTF, HIDDEN)], [(up_BTF, HIDDEN)], name=name)[0]
    return kernels.run(gated_operation, (gate_BTF, HIDDEN), (up_BTF, HIDDEN), activation=name)


def add(x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
    """Return the sum of a stream and what a block adds to it."""
    if is_recording():
        return mark("add", [(x_BTD, STREAM), (y_BTD, STREAM)], [(x_BTD, STREAM)])[0]
    return x_BTD + y_BTD


def scale(x: jax.Array, factor: float, axes: Axes = STREAM) -> jax.Array:
    """Return an array with these logical axes times a number, computed in float32; x itself for 1."""
    if factor == 1.0:
        return x
    if is_recording():
        return mark("scale", [(x, axes)], [(x, axes)])[0]
    return (x.astype(np.promote_types(x.dtype, jnp.float32)) * factor).astype(x.dtype)


class Dropout(NamedTuple):
    """Inverted dropout (Srivastava et al. 2014); a `key` of None drops nothing, as in evaluation."""

    rate: float = 0.0
    key: jax.Array | None = None

    def __call__(self, x: jax.Array, site: int) -> jax.Array:
        """Zero each element of x with probability `rate`, another mask per site."""
        if self.key is None or self.rate == 0.0:
            return x
        if is_recording():
            return mark("dropout", [(x, STREAM)], [(x, STREAM)])[0]
        keep = jax.random.bernoulli(jax.random.fold_in(self.key, site), 1.0 - self.rate, x.shape)
        return jnp.where(keep, x / (1.0 - self.rate), jnp.zeros_like(x))

    def at(self, layer: jax.Array | int) -> "Dropout":
        """Return the dropout of one layer."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, layer))


def logits(hidden_BTD: jax.Array, table: nnx.Param, soft_cap: float | None) -> jax.Array:
    """Unembed the normalised stream [B, T, D] to float32 logits [B, T, V], between −cap and cap where there is one.

    The table is an unembedding [D, V], or a tied embedding [V, D].
    """
    options = {"soft_cap": soft_cap, "flat": not is_sharded("residual")}
    hidden_BTD = gathered(hidden_BTD)
    with scope(table):
        if is_recording():
            size = table.shape[table.axes.index("vocab")]
            shape = jax.ShapeDtypeStruct((*hidden_BTD.shape[:2], size), jnp.float32)
            operands, results = [(hidden_BTD, WHOLE), (table[...], table.axes)], [(shape, (*WHOLE[:2], "act_vocab"))]
            return mark("logits", operands, results, soft_cap=soft_cap)[0]
        logits_BTV = xla.logits(hidden_BTD, table[...], _is_tied(table), **options)
    return constrain(logits_BTV, *WHOLE[:2], "act_vocab")


def cross_entropy(
    hidden_BTD: jax.Array,
    table: nnx.Param,
    targets_BT: jax.Array,
    counted_BT: jax.Array,
    soft_cap: float | None,
    z_loss: float = 0.0,
) -> dict[str, jax.Array]:
    """Return the terms of the objective, each summed over the targets that count, in nats: `loss`, the cross-entropy,
    and `z_loss`, that factor times log² Z. Their sum has the objective's gradient; each term alone has not.

    Logits are held or not, as the operation of `kernels_pallas` chooses.

    Args:
      hidden_BTD: the normalised stream.
      table: as in `logits`.
      targets_BT: int32 token ids.
      counted_BT: bool.
    """
    hidden_BTD = gathered(hidden_BTD)
    if is_recording():
        with scope(table):
            operands = [(hidden_BTD, WHOLE), (table[...], table.axes), (targets_BT, WHOLE[:2])]
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            (total,) = mark("cross_entropy", operands, [(shape, ())], soft_cap=soft_cap)
        return {"loss": total, "z_loss": jnp.zeros_like(total)}
    total, log_z_BT = _cross_entropy(
        hidden_BTD, table, targets_BT, counted_BT, soft_cap, z_loss=z_loss, reduction="sum", return_log_z=True
    )
    z = jnp.sum(jnp.where(counted_BT, z_loss * jnp.square(log_z_BT), 0.0)) if z_loss else jnp.zeros_like(total)
    return {"loss": total - z, "z_loss": z}


def token_losses(
    hidden_BTD: jax.Array, table: nnx.Param, targets_BT: jax.Array, counted_BT: jax.Array, soft_cap: float | None
) -> jax.Array:
    """Return the cross-entropy of each target in nats, float32 [B, T], 0 for those that do not count. The arguments are
    those of `cross_entropy`, which costs less where their sum is all that is asked for."""
    return _cross_entropy(gathered(hidden_BTD), table, targets_BT, counted_BT, soft_cap, reduction="none")


def _cross_entropy(
    hidden_BTD: jax.Array,
    table: nnx.Param,
    targets_BT: jax.Array,
    counted_BT: jax.Array,
    soft_cap: float | None,
    **options: Any,
) -> Any:
    mesh, specs = mesh_around(), None
    if not mesh.empty:
        rules = rules_around()
        specs = partition(WHOLE, hidden_BTD.shape, mesh, rules), partition(table.axes, table.shape, mesh, rules)
    with scope(table):
        return linear_cross_entropy(
            hidden_BTD,
            table[...],
            jnp.where(counted_BT, targets_BT, -1),
            transposed=_is_tied(table),
            soft_cap=soft_cap,
            partition=specs,
            implementation=kernels.implementation(),
            **options,
        )


def _is_tied(table: nnx.Param) -> bool:
    """Return whether a table of the unembedding is an embedding [V, D]."""
    return table.axes[0] == "vocab"
