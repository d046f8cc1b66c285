"""Attention that never holds its scores, exact in every mask."""

import contextlib
import functools
import itertools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from kernels_pallas.core import checks
from kernels_pallas.core.attention import reference
from kernels_pallas.core.attention.key_range import (
    KeyRange,
    array_module,
    causal,
    clipped,
    intersection,
    packed,
    prefix_lm,
    shifted,
    sliding_window,
    union,
)
from kernels_pallas.core.attention.scores import LOG2_E, FlashSettings, recomputed
from kernels_pallas.core.choice import cannot_lower, choose, fastest
from kernels_pallas.core.directions import by_direction
from kernels_pallas.core.eager import compiled_once
from kernels_pallas.core.interpretation import requested
from kernels_pallas.core.launch import KernelCost, KernelCosts, vary
from kernels_pallas.core.measured import CallClass
from kernels_pallas.core.target import TargetChip
from kernels_pallas.flash_attention import cudnn, mosaic_gpu, mosaic_gpu_backward, mosaic_tpu, triton, xla
from kernels_pallas.flash_attention.arguments import check
from kernels_pallas.flash_attention.operands import EVERY_GRADIENT, Gradients, Operands, unmasked_scores

__all__ = [
    "EVERY_GRADIENT",
    "Gradients",
    "KeyRange",
    "causal",
    "costs",
    "flash_attention",
    "gradients_over_part",
    "has_one_backward_kernel",
    "intersection",
    "kernel_of",
    "over_part",
    "packed",
    "prefix_lm",
    "shifted",
    "sliding_window",
    "union",
]

KERNELS = {"triton": triton, "mosaic_gpu": mosaic_gpu, "mosaic_tpu": mosaic_tpu}
IMPLEMENTATIONS = tuple(KERNELS)
# They are faster than "triton" on some chips for some shapes alone: None takes them where that was measured.
_WHERE_MEASURED = ("mosaic_gpu", "cudnn")

# A matrix unit's tile has sixteen rows: fewer queries than that are bound by the reading of keys and values, of scores
# there are few, and XLA reads as fast.
_FEW_QUERIES = 16
# Of the scores that the gradient of a bias holds at a time.
_SCORES_AT_ONCE = 2**25


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    key_range: KeyRange | tuple[Any, Any] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    return_log_sum_exp: bool = False,
    query_chunk: int | None = None,
    documents: int | None = None,
    deterministic: bool = True,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """softmax(cap · tanh(scale · q·kᵀ / cap) + bias) · v over the keys in range (Vaswani et al. 2017, equation 1), in
    blocks, with the memory of its operands (FlashAttention-2, arXiv:2307.08691).

    Args:
      query: [B, T, N, H] in float32, bfloat16 or float16; scores and softmax are float32.
      key: [B, S, K, H] like query, N a multiple of K: query heads n·G … n·G + G − 1 share key/value head n.
      value: [B, S, K, V] like query; V may differ from H. Keys and values that nobody sees must be finite too: they are
        multiplied by 0.
      key_range: query t sees the keys s with start ≤ s < end, int32 [B, T] or [1, T] each (numpy arrays of any integer
        dtype), or the union of several such intervals, with a leading axis: see `causal`, `sliding_window`,
        `prefix_lm`, `packed`, `intersection`, `union` and `shifted`. None sees all. The usual sliding window of w keys,
        the query's own the last, is sliding_window(T, w − 1). A query that sees nothing gives zeros.
      is_causal: a promise, with T = S, that no query's `key_range` has a key after the query's own. It masks nothing:
        where the range is not known while tracing, XLA on a CPU leaves out scores by it.
      scale: positive; 1 / √H where None.
      soft_cap: positive; scores stay between −cap and cap (Gemma 2, arXiv:2408.00118, section 2).
      sinks: [N], learned: a score in each row's sum that has no value (arXiv:2508.10925, section 2.2).
      bias: [B or 1, N or 1, T or 1, S], added to scores; −∞, or less than −1.2·10³⁸, hides a key. Its gradient is the
        reference's, in chunks, and is computed only where it is used.
      return_log_sum_exp: also return log Σ exp(scores) [B, T, N] in float32, with the sink; −∞ where nothing is seen.
      query_chunk: of how many queries the reference may hold the scores at a time; None is all of them. Kernels never
        hold more than a block.
      documents: a promise, with T = S, that `key_range` is the causal mask of rows of at most so many documents, which
        tile each row. It masks nothing: implementation="cudnn" finds the documents by it, and gives NaN for a row that
        breaks it.
      deterministic: gradients of two runs are bit-equal. Only without this promise is "cudnn" differentiated, and
        does "mosaic_gpu" add the gradient of a query in any order.
      implementation: "reference", "xla", "triton", "mosaic_tpu", "mosaic_gpu" or "cudnn"; None chooses by the shape and
        the chip being lowered for: the fastest where they were measured, of a forward pass alone or, where the call is
        differentiated, of both passes (`kernels_pallas.core.measured`). "xla" has neither bias, unions, chunks of
        queries nor the log-sum-exp. "mosaic_gpu" is for Hopper, and "cudnn" is NVIDIA's, and serves only what means
        the same there.

    Returns [B, T, N, V] in query's dtype; with return_log_sum_exp (output, log-sum-exp).

    Under a mesh of several devices the kernels live inside `jax.shard_map` with T and S whole; elsewhere None is
    "xla" or "reference". Results over chunks of the keys can be joined by their log-sum-exp. Both results are named
    "attention": under `jax.checkpoint` with a policy that saves it (`save_only_these_names`) a kernel's forward pass
    does not run again.

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    checks.boolean("flash_attention", is_causal=is_causal, deterministic=deterministic)
    checks.boolean("flash_attention", return_log_sum_exp=return_log_sum_exp)
    check(query, key, value, key_range, is_causal, scale, soft_cap, sinks, bias, query_chunk, documents)
    arrays: tuple = query, key, value, sinks, bias
    options = _Options(is_causal, scale, soft_cap, query_chunk, return_log_sum_exp, documents, deterministic)
    forward, training = _routes(implementation, options, key_range, *arrays)
    if forward == training:
        return _attend_by(forward, options, key_range, *arrays)
    if not any(isinstance(x, jax.core.Tracer) for x in key_range or ()):
        runs = [functools.partial(_attend_by, route, options, key_range) for route in (forward, training)]
    else:
        runs = [functools.partial(_attend_by, route, options) for route in (forward, training)]
        arrays = tuple(key_range), *arrays
    return by_direction(*runs, *arrays)


class _Options(NamedTuple):
    is_causal: bool
    scale: float | None
    soft_cap: float | None
    query_chunk: int | None
    return_log_sum_exp: bool
    documents: int | None
    deterministic: bool


class _Route(NamedTuple):
    """The implementation that runs, and the one whose precision XLA's products have: that of the kernel beside them.

    `refused`: why nothing runs.
    """

    implementation: str
    multiplied_as: str
    refused: str | None = None


def _routes(
    implementation: str | None, options: _Options, key_range: Any, query, key, value, sinks, bias
) -> tuple[_Route, _Route]:
    """Return how a call runs forward alone, and how it runs where it is differentiated."""
    operands = Operands(query, key, value, None, None, sinks, bias)
    soft_cap, log_sum_exp, deterministic = options.soft_cap, options.return_log_sum_exp, options.deterministic
    named = requested(implementation) is not None

    def by_cudnn(chip: Any) -> str | None:
        documents = options.documents if named else None  # packed rows were not measured
        return (
            cudnn.unsupported_reason(operands, key_range, soft_cap, log_sum_exp, documents, chip) or cudnn.is_absent()
        )

    def by_xla(chip: Any = None) -> str | None:
        return xla.unsupported_reason(operands, key_range, log_sum_exp, options.query_chunk)

    reasons = {name: functools.partial(_unsupported_reason, name, operands) for name in IMPLEMENTATIONS}
    reasons |= {"cudnn": by_cudnn, "xla": by_xla}
    pick = functools.partial(
        choose,
        "flash_attention",
        implementation,
        by_name=_WHERE_MEASURED,
        call=call_class(query, key, value, key_range),
    )
    chosen = pick(reasons, direction="forward")
    if 0 in query.shape or 0 in value.shape:  # of nothing there is one result
        return (_Route("reference", chosen),) * 2
    if not named and query.shape[1] < _FEW_QUERIES:
        return (_Route("reference" if by_xla() else "xla", chosen),) * 2
    if named:
        refused = cudnn.NOT_DETERMINISTIC if deterministic and chosen == "cudnn" else None
        return _Route(chosen, chosen), _Route(chosen, chosen, refused)
    if deterministic:
        reasons["cudnn"] = lambda chip: by_cudnn(chip) or cudnn.NOT_DETERMINISTIC
    trained = pick(reasons, direction="training")
    return _Route(chosen, chosen), _Route(trained, trained)


def _attend_by(route: _Route, options: _Options, key_range: Any, query, key, value, sinks, bias) -> Any:
    """Return attention by one implementation."""
    is_causal, scale, soft_cap, query_chunk, return_log_sum_exp, documents, deterministic = options
    name = route.implementation
    if route.refused is not None:
        raise NotImplementedError(f"flash_attention: {name} cannot serve this call: {route.refused}")
    if name in ("reference", "xla"):
        named: dict[str, Any] = dict(key_range=key_range, scale=scale, soft_cap=soft_cap, sinks=sinks)
        with _multiplied_as(route.multiplied_as, query.dtype):
            if name == "xla":
                results = xla.flash_attention(query, key, value, is_causal=is_causal, **named)
            else:
                named |= dict(bias=bias, query_chunk=query_chunk, return_log_sum_exp=return_log_sum_exp)
                results = reference.flash_attention(query, key, value, **named)
        return jax.tree.map(lambda x: checkpoint_name(x, "attention"), results)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    operands = Operands(query, key, value, None, None, sinks, bias)
    if name == "cudnn":
        return cudnn.flash_attention(operands, key_range, scale, documents)
    out, log_sum_exp = _attend(*_call(name, operands, key_range, scale, soft_cap, deterministic))
    return (out, jnp.swapaxes(log_sum_exp, 1, 2)) if return_log_sum_exp else out


def over_part(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    key_range: KeyRange | tuple[Any, Any],
    scale: float | None = None,
    soft_cap: float | None = None,
    deterministic: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return attention over a part of the keys, [B, T, N, V], and the log-sum-exp of their scores, float32 [B, T, N].

    Arguments are those of `flash_attention`. It has no derivative: `gradients_over_part` gives it for this part, and
    None chooses what is fastest in both.
    """
    check(query, key, value, key_range, scale=scale, soft_cap=soft_cap)
    options = _Options(False, scale, soft_cap, None, True, None, deterministic)
    route = _routes(implementation, options, key_range, query, key, value, None, None)[1]
    return _attend_by(route, options, key_range, query, key, value, None, None)


def gradients_over_part(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    log_sum_exp: jax.Array,
    delta: jax.Array,
    *,
    key_range: KeyRange | tuple[Any, Any],
    scale: float | None = None,
    soft_cap: float | None = None,
    deterministic: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what a part of the keys gives to the gradient of the queries, and the gradients of its keys and values.

    Args:
      d_out: the gradient of attention over all keys, [B, T, N, V].
      log_sum_exp, delta: of all keys, float32 [B, T, N]: the log-sum-exp, and Σ output · d_out over V less the gradient
        of the log-sum-exp.
    """
    check(query, key, value, key_range, scale=scale, soft_cap=soft_cap)
    options = _Options(False, scale, soft_cap, None, True, None, deterministic)
    route = _routes(implementation, options, key_range, query, key, value, None, None)[1]
    rows = jnp.swapaxes(log_sum_exp, 1, 2), jnp.swapaxes(delta, 1, 2)
    if route.implementation == "reference":
        with _multiplied_as(route.multiplied_as, query.dtype):
            return reference.gradients(query, key, value, d_out, *rows, key_range, scale, soft_cap)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    operands = Operands(query, key, value, None, None, None, None)
    settings, operands = _call(route.implementation, operands, key_range, scale, soft_cap, deterministic)
    return _gradients_of_rows(settings, operands, d_out, *rows)


def _call(
    implementation: str,
    operands: Operands,
    key_range: Any,
    scale: float,
    soft_cap: float | None,
    deterministic: bool,
) -> tuple[tuple[FlashSettings, ...], Operands]:
    """Return the settings of each interval and the operands of a call of one of KERNELS."""
    start, end = clipped(key_range, *operands.query.shape[:2], operands.key.shape[1])
    operands = operands._replace(start=start, end=end)
    soft_cap = None if soft_cap is None else float(soft_cap)
    seen, known = unmasked_scores(key_range, *operands.sizes[:3]), [None] * len(operands.start)
    if array_module(*operands[3:5]) is np:
        known = itertools.starmap(KeyRange, zip(*operands[3:5], strict=True))
        operands = operands._replace(start=None, end=None)
    settings = tuple(
        FlashSettings(scale, soft_cap, *each, implementation, deterministic) for each in zip(seen, known, strict=True)
    )
    return settings, Operands(*vary(*operands))


def call_class(query: Any, key: Any, value: Any, key_range: Any) -> CallClass:
    """Return the class by which a call's measurements are found, of arrays or of shapes and dtypes."""
    (T, H), (S, V) = (query.shape[1], query.shape[3]), (key.shape[1], value.shape[3])
    masks = {True: "causal", False: "full", None: "intervals"}
    return CallClass(max(H, V), T * S, 8 * query.dtype.itemsize, masks[cudnn.is_causal(key_range, T, S)])


def kernel_of(
    chip: TargetChip,
    query: Any,
    key: Any,
    value: Any,
    *,
    training: bool,
    key_range: Any,
    deterministic: bool,
    sinks: Any = None,
    return_log_sum_exp: bool = False,
) -> str | None:
    """Return the kernel, or "cudnn", that None takes on a chip, which need not be here; None where XLA computes.

    Args:
      query, key, value, key_range, sinks: arrays, or shapes and dtypes; a mask of these is not known while tracing.
      training: the call is differentiated. deterministic, return_log_sum_exp: as of `flash_attention`.
    """
    if query.shape[1] < _FEW_QUERIES:
        return None
    operands = Operands(query, key, value, None, None, sinks, None)

    def unsupported_reason(name: str) -> str | None:
        if name == "cudnn":
            refused = cudnn.NOT_DETERMINISTIC if training and deterministic else None
            return cudnn.unsupported_reason(operands, key_range, None, return_log_sum_exp, None, chip) or refused
        return cannot_lower(name, chip) or _unsupported_reason(name, operands, chip)

    call, direction = call_class(query, key, value, key_range), "training" if training else "forward"
    names = *IMPLEMENTATIONS, "cudnn"
    pick = fastest("flash_attention", unsupported_reason, names, chip, _WHERE_MEASURED, call, direction)
    return pick.name if pick.name in names else None


def has_one_backward_kernel(implementation: str | None, query: Any, key: Any, value: Any, bias: Any = None) -> bool:
    """Return whether an implementation computes all gradients in one kernel, from scores that it computes once."""
    if implementation == "mosaic_gpu":
        return mosaic_gpu_backward.serves(Operands(query, key, value, None, None, None, bias))
    return implementation != "triton"


def costs(
    query: Any,
    key: Any,
    value: Any,
    *,
    key_range: Any = None,
    sinks: Any = None,
    bias: Any = None,
    implementation: str | None = None,
    gradients: Gradients = EVERY_GRADIENT,
    **_: Any,
) -> KernelCosts:
    """Return the kernels' costs on these arrays, or shapes and dtypes. `gradients`: those that are asked for.

    Counted are the unmasked scores where `key_range` is of numpy arrays, and all T·S otherwise. The gradient of a bias
    is not included. Backward, attention takes five products where scores are not stored; an implementation of two
    kernels computes the scores, and the gradients of their weights, twice.
    """
    seen = unmasked_scores(key_range, *query.shape[:2], key.shape[1])
    rows = (jax.ShapeDtypeStruct(query.shape[:2], jnp.int32),) * len(seen)
    calls = Operands(query, key, value, rows, rows, sinks, bias).by_interval()
    d_query_dtype = None
    if has_one_backward_kernel(implementation, query, key, value, bias):
        d_query_dtype = query.dtype if implementation == "mosaic_tpu" else jnp.dtype(jnp.float32)
    each = [call.costs(scores, d_query_dtype, gradients) for call, scores in zip(calls, seen, strict=True)]
    return KernelCosts(*(KernelCost(*map(sum, zip(*way, strict=True))) for way in zip(*each, strict=True)))


def _multiplied_as(implementation: str, dtype: Any) -> contextlib.AbstractContextManager:
    """Return the precision of XLA's products alongside or in place of a kernel: float32 as float32, as in `tiles.dot`.

    The reference, requested or as the only implementation that serves, keeps the precision that JAX is configured with.
    """
    as_kernels_do = implementation in IMPLEMENTATIONS and dtype == jnp.float32
    return jax.default_matmul_precision("highest") if as_kernels_do else contextlib.nullcontext()


def _unsupported_reason(name: str, operands: Operands, chip: Any) -> str | None:
    if operands.query.dtype not in ("float32", "bfloat16", "float16"):
        return f"{operands.query.dtype} is none of float32, bfloat16, float16"
    return KERNELS[name].unsupported_reason(operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@compiled_once(static=1)
def _attend(settings: tuple[FlashSettings, ...], operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, V] and log-sum-exp [B, N, T] over all intervals, with the settings of each."""
    kernels = KERNELS[settings[0].implementation]
    results = [kernels.forward(*call) for call in zip(settings, _whole(settings, operands).by_interval(), strict=True)]
    if len(results) == 1:
        return results[0]
    outs, sums = zip(*results, strict=True)
    log_sum_exp = jax.nn.logsumexp(jnp.stack(sums), axis=0)
    finite = jnp.where(jnp.isfinite(log_sum_exp), log_sum_exp, 0.0)
    shares = (jnp.swapaxes(jnp.exp(one - finite), 1, 2)[..., None] for one in sums)
    output = sum(share * out.astype(jnp.float32) for share, out in zip(shares, outs, strict=True))
    return output.astype(operands.query.dtype), log_sum_exp


def _whole(settings: tuple[FlashSettings, ...], operands: Operands) -> Operands:
    """With the intervals that are known while tracing, which are not differentiated and so stay numpy arrays."""
    if operands.start is not None:
        return operands
    start, end = zip(*(each.key_range for each in settings), strict=True)
    return operands._replace(start=np.stack(start), end=np.stack(end))


def _forward(settings: tuple[FlashSettings, ...], operands: Operands) -> tuple:
    # Who keeps what has this name for the backward pass (`jax.checkpoint`) does not run the kernel again.
    results = tuple(checkpoint_name(x, "attention") for x in _attend(settings, operands))
    return results, (operands, *results)


@compiled_once(static=1)
def _backward(settings: tuple[FlashSettings, ...], saved: tuple, cotangents: tuple) -> tuple[Operands]:
    operands, out, log_sum_exp = saved
    d_out, d_log_sum_exp = cotangents
    # Σ weights · their gradients per row, less the gradient of the row's sum: all that a score's gradient needs of
    # the other scores.
    products_BTNV = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    delta = jnp.swapaxes(jnp.sum(products_BTNV, axis=-1), 1, 2) - d_log_sum_exp
    d_query, d_key, d_value = _gradients_of_rows(settings, operands, d_out, log_sum_exp, delta)
    d_sinks = None
    if operands.sinks is not None:
        sums, delta = _finite(log_sum_exp, delta)
        of_sink = recomputed(jnp.exp(operands.sinks.astype(jnp.float32)[None, :, None] - sums))
        d_sinks = jnp.sum(-of_sink * delta, axis=(0, 2)).astype(operands.sinks.dtype)
    whole = _whole(settings, operands)
    d_bias = None if operands.bias is None else _bias_gradient(settings[0], whole, d_out, d_log_sum_exp)
    return (Operands(d_query, d_key, d_value, None, None, d_sinks, d_bias),)


_attend.defvjp(_forward, _backward)


def _gradients_of_rows(
    settings: tuple[FlashSettings, ...],
    operands: Operands,
    d_out: jax.Array,
    log_sum_exp: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of query, key and value by a kernel, of the log-sum-exp and delta [B, N, T] of each row."""
    kernels = KERNELS[settings[0].implementation]
    sums, delta = _finite(log_sum_exp, delta)
    calls = zip(settings, _whole(settings, operands).by_interval(), strict=True)
    gradients = zip(*[kernels.backward(*call, sums * LOG2_E, delta, d_out) for call in calls], strict=True)
    d_query, d_key, d_value = (functools.reduce(operator.add, each) for each in gradients)
    return d_query, d_key, d_value


def _finite(log_sum_exp: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both with zeros for rows that see nothing: exp2(−∞ − 0) is 0, whatever the cotangent of their −∞ is."""
    some = log_sum_exp != -jnp.inf
    return jnp.where(some, log_sum_exp, 0.0), jnp.where(some, delta, 0.0)


def _bias_gradient(
    settings: FlashSettings, operands: Operands, d_out: jax.Array, d_log_sum_exp: jax.Array
) -> jax.Array:
    """Return the reference's gradient, a chunk of queries at a time; XLA drops it where it is unused."""
    B, T, S, N, *_ = operands.sizes

    def attend(bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        return reference.flash_attention(
            *operands[:3],
            key_range=operands[3:5],
            scale=settings.scale,
            soft_cap=settings.soft_cap,
            sinks=operands.sinks,
            bias=bias,
            return_log_sum_exp=True,
            query_chunk=max(1, min(T, _SCORES_AT_ONCE // (B * N * S))),
        )

    with _multiplied_as(settings.implementation, operands.query.dtype):
        _, pull_back = jax.vjp(attend, operands.bias)
        return pull_back((d_out, jnp.swapaxes(d_log_sum_exp, 1, 2)))[0]
