"""Attention of a sequence that several devices share, each with some of its tokens (`mesh.context`).

There are three ways, which give the same numbers. "gather": each device gathers all keys and values. "heads": tokens
are exchanged for heads, so that each device has all tokens of some heads (DeepSpeed Ulysses, arXiv:2309.14509).
"ring": keys and values travel from device to device, while each computes attention over those that it has (Liu et al.
2023, arXiv:2310.01889). Tokens lie in `jaxlm.parallel.columns.balanced_columns`, and masks are intervals of columns.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlm.core.errors import InputError
from jaxlm.models import kernels
from jaxlm.models.doors.cost import Exchange, LocalArray
from jaxlm.models.execution_config import ContextParallel
from jaxlm.models.logical_axes import HEADS, KEYS, KV_HEADS, Axes
from jaxlm.parallel.collectives import axes_over, on_each_device
from jaxlm.parallel.columns import in_column_order
from jaxlm.parallel.partition import shards_of
from kernels_pallas.flash_attention import KeyRange, flash_attention, gradients_over_part, over_part

# With at least so many queries on a device for each key head, a block takes longer to compute than the next to come:
# causality leaves half of its 4 FLOPs · queries · channels for each key and value of 4 bytes · channels, and a chip has
# 2,200 (H100) to 4,400 (TPU v5e) FLOPs in the time of a byte over a link: twice as many queries in bfloat16, rounded.
_HIDING_QUERIES = 8192

Part = tuple[jax.Array, jax.Array]
_ROWS = HEADS[:2]


class SharedSequence(NamedTuple):
    """The sizes of attention on one device of those that share a sequence.

    `shards`: these devices. `tokens`: of the device. `heads`, `kv_heads`: of the device, of queries and of keys.
    `reach`: the keys at most that a token sees, itself the last; None sets no limit.
    """

    shards: int
    tokens: int
    heads: int
    kv_heads: int
    reach: int | None

    @property
    def hops(self) -> list[int]:
        """The distances, along the ring, of the devices whose keys some device sees: its own first."""
        n, chunk = self.shards, self.tokens // 2
        nearest = (min(hop, n - hop) for hop in range(n))
        return [
            hop
            for hop, chunks in enumerate(nearest)
            if hop == 0 or self.reach is None or (chunks - 1) * chunk + 1 < self.reach
        ]

    @property
    def divides_heads(self) -> bool:
        """True if the devices can share the heads."""
        return self.heads % self.shards == 0 and self.kv_heads % self.shards == 0

    @property
    def hides_ring(self) -> bool:
        """True if the computation of a block hides the sending of the next one."""
        return self.tokens * (self.heads // self.kv_heads) >= _HIDING_QUERIES

    def exchanges(self, way: ContextParallel, query: LocalArray, key: LocalArray, value: LocalArray) -> list[Exchange]:
        """Return the collectives of one use of attention. The arrays are a device's own."""
        of_keys = functools.partial(Exchange, 1, KV_HEADS)
        if way == "gather":
            whole = [self.shards * x.bytes for x in (key, value)]
            return [of_keys("all-gather", n, forward=1) for n in whole] + [
                of_keys("reduce-scatter", n, backward=1) for n in whole
            ]
        if way == "heads":
            attended = query.bytes // query.shape[-1] * value.shape[-1]
            sizes = query.bytes, key.bytes, value.bytes, attended
            return [of_keys("all-to-all", n, forward=1, backward=1) for n in sizes]
        permuted, last = functools.partial(of_keys, "collective-permute", is_hidden=self.hides_ring), len(self.hops) - 1
        sent = [permuted(x.bytes, forward=last, backward=last) for x in (key, value)]
        if not last:
            return []
        wide = [permuted(4 * x.numbers, backward=last) for x in (key, value)]  # gradients on their way, and home
        return sent + wide + [of_keys("collective-permute", x.bytes, backward=1) for x in (key, value)]

    def way(self, wanted: ContextParallel) -> ContextParallel:
        """Return the way that is wanted, or of "auto" the one with the least that computation does not hide: a ring
        where blocks are large enough to hide it, otherwise the one that sends fewer bytes.

        Raises InputError for heads that the devices cannot share.
        """
        if wanted == "heads" and not self.divides_heads:
            raise InputError(
                f'execution.context_parallel = "heads": mesh.context = {self.shards} does not divide the {self.heads} '
                f"heads of queries and the {self.kv_heads} of keys on a device; set gather or ring"
            )
        if wanted != "auto":
            return wanted
        if self.hides_ring:
            return "ring"
        exchanged, gathered = self.heads + self.kv_heads, self.kv_heads * self.shards
        return "heads" if self.divides_heads and exchanged < gathered else "gather"


class _SharedSettings(NamedTuple):
    """The settings of attention that are known while tracing. `axes`: the mesh axes that share the sequence."""

    axes: tuple[str, ...]
    sizes: SharedSequence
    scale: float | None
    soft_cap: float | None
    deterministic: bool
    implementation: str | None

    @property
    def index(self) -> jax.Array:
        """The place of this device among those that share its sequences."""
        return jax.lax.axis_index(self.axes)

    @property
    def options(self) -> dict[str, Any]:
        """The options of `flash_attention` among them."""
        named = "scale", "soft_cap", "deterministic", "implementation"
        return {name: getattr(self, name) for name in named}


def shared_attention(
    query_BTNH: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array,
    key_range: Any,
    sinks: jax.Array | None,
    *,
    reach: int | None,
    scale: float | None,
    soft_cap: float | None,
) -> jax.Array:
    """Return causal attention [B, T, N, V] over a sequence whose tokens several devices share.

    Args:
      key_range: the columns that each token sees, int [B, T] or [1, T]: start and end.
      sinks: [N], a score of each head that has no value.
      reach: a promise that no token sees more keys than so many, itself the last; None is none.
    """
    (_, T, N, _), K = query_BTNH.shape, key_BTKH.shape[2]
    shards = shards_of("sequence", T)
    heads, kv_heads = N // shards_of("act_heads", N), K // shards_of("act_kv_heads", K)
    sizes = SharedSequence(shards, T // shards, heads, kv_heads, reach)
    axes, deterministic = axes_over("sequence", T), kernels.deterministic()
    settings = _SharedSettings(axes, sizes, scale, soft_cap, deterministic, kernels.implementation())
    intervals = [jnp.asarray(x, jnp.int32) for x in key_range]
    way = sizes.way(kernels.context_parallel())
    if way == "ring":
        ring: Any = _ring
        attended_BTNV, log_sum_exp_BTN = ring(settings, query_BTNH, key_BTKH, value_BTKH, *intervals)
        if sinks is None:
            return attended_BTNV
        share_BTN = jax.nn.sigmoid(log_sum_exp_BTN - sinks.astype(jnp.float32)[None, None])
        return (attended_BTNV * share_BTN[..., None]).astype(query_BTNH.dtype)
    function, rows = (_by_heads, KEYS[:2]) if way == "heads" else (_by_gathering, _ROWS)
    arrays: list[tuple[jax.Array | None, Axes]] = [(query_BTNH, HEADS), (key_BTKH, KV_HEADS), (value_BTKH, KV_HEADS)]
    arrays += [(sinks, HEADS[2:3]), *((x, rows) for x in intervals)]
    return on_each_device(functools.partial(function, settings), *arrays)


def _by_gathering(settings: _SharedSettings, query: Any, key: Any, value: Any, sinks: Any, *key_range: Any) -> Any:
    """Return attention of a device's queries over all keys, which it gathers."""

    def gathered(x: jax.Array) -> jax.Array:
        return in_column_order(jax.lax.all_gather(x, settings.axes, axis=1, tiled=True), settings.sizes.shards)

    key, value = gathered(key), gathered(value)
    return flash_attention(query, key, value, key_range=key_range, sinks=sinks, **settings.options)


def _by_heads(settings: _SharedSettings, query: Any, key: Any, value: Any, sinks: Any, *key_range: Any) -> jax.Array:
    """Return attention of a device's queries, which it gives to others but for some heads, for those of others."""
    shards = settings.sizes.shards

    def exchanged(x: jax.Array, given: int, taken: int) -> jax.Array:
        return jax.lax.all_to_all(x, settings.axes, given, taken, tiled=True)

    query, key, value = (exchanged(x, 2, 1) for x in (query, key, value))
    key, value = (in_column_order(x, shards) for x in (key, value))
    if sinks is not None:
        sinks = jax.lax.dynamic_slice_in_dim(sinks, settings.index * query.shape[2], query.shape[2])
    attended: Any = flash_attention(query, key, value, key_range=key_range, sinks=sinks, **settings.options)
    return exchanged(attended, 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(settings: _SharedSettings, query: Any, key: Any, value: Any, start: Any, end: Any) -> Part:
    """Return attention [B, T, N, V] and the log-sum-exp [B, T, N], float32."""
    operands = (query, HEADS), (key, KV_HEADS), (value, KV_HEADS), (start, _ROWS), (end, _ROWS)
    return on_each_device(functools.partial(_ring_forward, settings), *operands, results=[HEADS, HEADS[:3]])


def _ring_saving(settings: _SharedSettings, *operands: Any) -> tuple[Part, tuple]:
    ring: Any = _ring
    out, log_sum_exp = (checkpoint_name(x, "attention") for x in ring(settings, *operands))
    return (out, log_sum_exp), (*operands, out, log_sum_exp)


def _ring_gradients(settings: _SharedSettings, saved: tuple, cotangents: Part) -> tuple:
    query, key, value, start, end, out, log_sum_exp = saved
    # Otherwise XLA keeps from the forward pass the first block's scores, and the result before it was rounded.
    key, value, out = jax.lax.optimization_barrier((key, value, out))
    d_out, d_log_sum_exp = cotangents
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1) - d_log_sum_exp
    operands = (query, HEADS), (key, KV_HEADS), (value, KV_HEADS), (d_out, HEADS)
    operands += (log_sum_exp, HEADS[:3]), (delta, HEADS[:3]), (start, _ROWS), (end, _ROWS)
    backward = functools.partial(_ring_backward, settings)
    return *on_each_device(backward, *operands, results=[HEADS, KV_HEADS, KV_HEADS]), None, None


_ring.defvjp(_ring_saving, _ring_gradients)


def _ring_forward(settings: _SharedSettings, query: Any, key: Any, value: Any, *key_range: Any) -> Part:
    """Return a device's part of the results, from keys and values that come one block after the other."""
    options, hops = _options_of_parts(settings), settings.sizes.hops
    shifts = [b - a for a, b in itertools.pairwise(hops)]

    def attended(block: Part, hop: Any) -> Part:
        first, second = (
            (out.astype(jnp.float32), log_sum_exp)
            for chunk, seen in _chunks(settings, block, key_range, hop)
            for out, log_sum_exp in [over_part(query, *chunk, key_range=seen, **options)]
        )
        return _joined(first, second)

    def step(carry: tuple, hop: jax.Array, shift: int) -> tuple[tuple, None]:
        part, block = carry
        following = _sent(settings, block, shift)  # while the block below is computed
        return (_joined(part, attended(block, hop)), following), None

    part, block = attended((key, value), hops[0]), (key, value)
    if hops[1:]:
        carry = part, _sent(settings, block, shifts[0])
        for shift, some in _runs(hops[1:-1], shifts[1:]):
            carry, _ = jax.lax.scan(functools.partial(step, shift=shift), carry, some)
        part, block = carry
        part = _joined(part, attended(block, hops[-1]))
    out, log_sum_exp = part
    return out.astype(query.dtype), log_sum_exp


def _ring_backward(
    settings: _SharedSettings,
    query: Any,
    key: Any,
    value: Any,
    d_out: Any,
    log_sum_exp: Any,
    delta: Any,
    *key_range: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of a device's queries, keys and values. Those of a block travel behind it in float32, and
    from its last device home."""
    # Blocks travel the other way round: XLA would merge the first sends with those of the forward pass, and keep them.
    options, hops = _options_of_parts(settings), [-hop for hop in settings.sizes.hops]
    shifts = [b - a for a, b in itertools.pairwise(hops)]

    def gradients(block: Part, hop: Any) -> tuple[jax.Array, Part]:
        rows = d_out, log_sum_exp, delta
        chunks = _chunks(settings, block, key_range, hop)
        each = [gradients_over_part(query, *chunk, *rows, key_range=seen, **options) for chunk, seen in chunks]
        (d_query, *d_first), (of_second, *d_second) = (tuple(x.astype(jnp.float32) for x in of) for of in each)
        d_key, d_value = (jnp.concatenate(pair, axis=1) for pair in zip(d_first, d_second, strict=True))
        return d_query + of_second, (d_key, d_value)

    def added(carry: tuple, block: Part, hop: Any) -> tuple[jax.Array, Part]:
        return jax.tree.map(jnp.add, carry, gradients(block, hop))

    def step(carry: tuple, hop: jax.Array, shifts: tuple[int, int]) -> tuple[tuple, None]:
        (d_query, d_block), block = carry
        arrived, following = _sent(settings, d_block, shifts[0]), _sent(settings, block, shifts[1])
        return (added((d_query, arrived), block, hop), following), None

    sums, block = gradients((key, value), hops[0]), (key, value)
    if hops[1:]:
        carry = sums, _sent(settings, block, shifts[0])
        for pair, some in _runs(hops[1:-1], list(itertools.pairwise(shifts))):
            carry, _ = jax.lax.scan(functools.partial(step, shifts=pair), carry, some)
        (d_query, d_block), block = carry
        sums = added((d_query, _sent(settings, d_block, shifts[-1])), block, hops[-1])
    d_query, d_block = sums
    d_key, d_value = (x.astype(key.dtype) for x in d_block)
    d_key, d_value = _sent(settings, (d_key, d_value), -hops[-1])
    return d_query.astype(query.dtype), d_key, d_value


def _options_of_parts(settings: _SharedSettings) -> dict[str, Any]:
    """Return the options of attention over parts, which XLA computes as the reference does."""
    name = settings.implementation
    return {**settings.options, "implementation": "reference" if name == "xla" else name}


def _runs(hops: Sequence[int], shifts: Sequence[Any]) -> Iterator[tuple[Any, jax.Array]]:
    """Yield hops that follow one another with equal shifts, for one loop, with these."""
    for shift, some in itertools.groupby(zip(hops, shifts, strict=True), key=lambda each: each[1]):
        yield shift, jnp.asarray([hop for hop, _ in some], jnp.int32)


def _sent(settings: _SharedSettings, block: Part, shift: int) -> Part:
    """Return the arrays of the device that is `shift` places before this one."""
    n = settings.sizes.shards
    if shift % n == 0:
        return block
    pairs = [(i, (i + shift) % n) for i in range(n)]
    return jax.lax.ppermute(block, settings.axes, pairs)


def _chunks(
    settings: _SharedSettings, block: Part, key_range: Sequence[jax.Array], hop: Any
) -> Iterator[tuple[Part, KeyRange]]:
    """Yield the two chunks of a block, which comes from the device `hop` places before this one, each with the keys of
    it that this device's tokens see."""
    n, chunk = settings.sizes.shards, settings.sizes.tokens // 2
    source = (settings.index - hop) % n
    for i, first in enumerate((source * chunk, (2 * n - 1 - source) * chunk)):
        key, value = (jax.lax.slice_in_dim(x, i * chunk, (i + 1) * chunk, axis=1) for x in block)
        yield (key, value), KeyRange(*(jnp.clip(x - first, 0, chunk) for x in key_range))


def _joined(one: Part, other: Part) -> Part:
    """Return attention over the keys of two parts, float32, and the log-sum-exp."""
    (out, log_sum_exp), (more, of_more) = one, other
    total = jnp.logaddexp(log_sum_exp, of_more)
    finite = jnp.where(total == -jnp.inf, 0.0, total)
    share, of_other = (jnp.exp(x - finite)[..., None] for x in (log_sum_exp, of_more))
    return share * out + of_other * more, total
