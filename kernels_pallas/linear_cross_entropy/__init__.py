"""Cross-entropy of a linear layer's logits, without the logits: memory for a chunk of tokens at a time.

At 32768 tokens, 4096 channels and 128256 labels one product of hidden and unembedding is 34 TFLOP: 35 ms at the peak of
an H200, against 7 ms to write and read float32 logits at the peak of its memory. So the number of products decides, and
who computes them:

- XLA does (on a GPU by cuBLAS or its own tuned Triton), on chunks of tokens with all labels: a product in Pallas would
  at best be as fast. The kernels do what XLA does less well, over a chunk of float32 logits: the softmax statistics in
  one reading where XLA's take two, and the logits' gradient, rounded to the products' dtype as it is written.
- The unfused loss takes three products. Chunks lose their logits, so a backward pass that knows each token's cotangent
  takes four. With `reduction="sum"` every token's is one number times its weight: the gradients are made in the forward
  pass while a chunk's logits are at hand (as in Liger: Hsu et al. 2024, arXiv:2410.10989, section 3), three products in
  all, and the backward pass multiplies by that number.
- Chunks of labels instead would save the float32 sum of the unembedding's gradient, but take a second forward product:
  no gradient of a logit is known before all labels were seen.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kernels_pallas.core import checks
from kernels_pallas.core.choice import choose
from kernels_pallas.core.eager import compiled_once
from kernels_pallas.core.interpretation import requested
from kernels_pallas.core.launch import vary
from kernels_pallas.core.measured import CallClass
from kernels_pallas.core.target import TargetChip
from kernels_pallas.linear_cross_entropy import chunks, loop, reference, xla
from kernels_pallas.linear_cross_entropy.costs import costs as costs
from kernels_pallas.linear_cross_entropy.loop import KERNELS, CrossEntropyPlan
from kernels_pallas.linear_cross_entropy.results import finish
from kernels_pallas.linear_cross_entropy.sharding import ALONE, CrossEntropySharding, sharding_of

_DTYPES = ("float32", "bfloat16", "float16")


def linear_cross_entropy(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    transposed: bool = False,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    reduction: Literal["none", "sum"] = "none",
    return_log_z: bool = False,
    partition: tuple[PartitionSpec, PartitionSpec] | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """weight · (−log softmax(hidden · unembedding)[target] + z_loss · log² Z) of each token, in nats.

    Z = Σ exp(logits); its term keeps it near one (PaLM, arXiv:2204.02311, section 5).

    Args:
      hidden: [..., D] in float32, bfloat16 or float16. Logits are float32; their gradient is rounded to this dtype.
        Where one number is not finite no gradient of the unembedding is, whether its token counts or not.
      unembedding: [D, V], or [V, D] where `transposed`, as a tied embedding is; in hidden's dtype.
      targets: integers [...] in [0, V). The loss of a negative one is 0, whatever its weight; of one ≥ V it is NaN,
        which gradients need not show.
      weights: float [...], a factor for each token (for a factor per label: `factors[targets]`); None is 1.
      soft_cap: of the logits, cap · tanh(logits / cap); positive.
      reduction: "none" gives each token's loss; "sum" their sum, with gradients a quarter cheaper.
      return_log_z: also return log Z.
      partition: how hidden and unembedding lie on the mesh in context: the operation then runs under its own
        `jax.shard_map`, its labels and tokens where they are. D of the unembedding may be sharded: it is gathered,
        and its gradient scattered. Without it, operands are whole, or shards of a surrounding shard_map's tokens.
      implementation: "reference" and "xla" (both hold all logits), "chunked" (XLA too), "triton" or "mosaic_tpu"; None
        chooses one of the last four by the chip being lowered for and the shape.

    Returns losses, float32 [...] or [], or (losses, log Z), log Z float32 [...]. Beside a sum log Z is a constant:
    what the sum owes to it is in the sum's gradient already.

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    soft_cap, z_loss = _check(
        hidden, unembedding, targets, weights, transposed, soft_cap, z_loss, reduction, return_log_z, partition
    )
    if targets.dtype.itemsize < 4:  # a narrow integer may not hold V, which it is compared with
        targets = targets.astype(jnp.int32)
    sharding = ALONE if partition is None else sharding_of(*partition, hidden, unembedding, transposed)
    chosen = _choose(hidden, unembedding, sharding, implementation)
    if chosen in ("reference", "xla"):
        options = dict(transposed=transposed, soft_cap=soft_cap, z_loss=z_loss)
        options |= dict(reduction=reduction, return_log_z=return_log_z)
        if chosen == "xla":
            return xla.linear_cross_entropy(hidden, unembedding, targets, weights, sharding, **options)
        return reference.linear_cross_entropy(hidden, unembedding, targets, weights, **options)
    plan = CrossEntropyPlan(chosen, transposed, soft_cap, sharding.labels)
    V = unembedding.shape[plan.table.index("V")]
    if reduction == "sum":
        weights = jnp.ones_like(targets, jnp.float32) if weights is None else weights.astype(jnp.float32)
    hidden, unembedding, targets, weights = vary(hidden, unembedding, targets, weights)
    if reduction == "sum":
        result, log_z = _summed(plan, sharding, V, z_loss, hidden, unembedding, targets, weights)
    else:
        cross_entropy, log_z = _per_token(plan, sharding, hidden, unembedding, targets)
        result = finish(cross_entropy, log_z, targets, weights, V, z_loss)
    return (result, log_z) if return_log_z else result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
@compiled_once(static=2)
def _per_token(
    plan: CrossEntropyPlan, sharding: CrossEntropySharding, hidden: Any, unembedding: Any, targets: Any
) -> tuple[jax.Array, jax.Array]:
    """(cross-entropy, log Z), float32 [...] each."""

    def local(hidden: jax.Array, unembedding: jax.Array, targets: jax.Array) -> tuple:
        found = loop.forward(plan, _flat(hidden), sharding.gathered(unembedding), targets.reshape(-1))
        return tuple(x.reshape(targets.shape) for x in found)

    return sharding.run(local, "hut", "tt")(hidden, unembedding, targets)


def _per_token_fwd(plan, sharding, hidden, unembedding, targets):
    cross_entropy, log_z = _per_token(plan, sharding, hidden, unembedding, targets)
    return (cross_entropy, log_z), (hidden, unembedding, targets, log_z)


@compiled_once(static=2)
def _per_token_bwd(plan, sharding, saved, cotangents):
    def local(hidden, unembedding, targets, log_z, of_cross_entropy, of_log_z) -> tuple:
        d_hidden, d_unembedding, _ = loop.gradients(
            plan,
            _flat(hidden),
            sharding.gathered(unembedding),
            targets.reshape(-1),
            tuple(x.reshape(-1) for x in (log_z, of_cross_entropy + of_log_z, of_cross_entropy)),
            lambda look, *numbers: (numbers, ()),
        )
        d_unembedding = sharding.reduced(d_unembedding, unembedding.dtype)
        return d_hidden.reshape(hidden.shape), d_unembedding.astype(unembedding.dtype)

    return *sharding.run(local, "hutttt", "hu")(*saved, *cotangents), None


_per_token.defvjp(_per_token_fwd, _per_token_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
@compiled_once(static=4)
def _summed(plan, sharding, V, z_loss, hidden, unembedding, targets, weights) -> tuple[jax.Array, jax.Array]:
    """(Σ weight · (cross-entropy + z_loss · log² Z), log Z [...])."""
    cross_entropy, log_z = _per_token(plan, sharding, hidden, unembedding, targets)
    return jnp.sum(finish(cross_entropy, log_z, targets, weights, V, z_loss)), log_z


@compiled_once(static=4)
def _summed_fwd(plan, sharding, V, z_loss, hidden, unembedding, targets, weights):
    def local(hidden, unembedding, targets, weights) -> tuple:
        def cotangents(look, counted_C):
            cross_entropy, log_z = look()
            return (log_z, counted_C * (1.0 + 2.0 * z_loss * log_z), counted_C), (cross_entropy, log_z)

        counted = jnp.where((targets < 0) | (targets >= V), 0.0, weights)
        d_hidden, d_unembedding, terms = loop.gradients(
            plan, _flat(hidden), sharding.gathered(unembedding), targets.reshape(-1), (counted.reshape(-1),), cotangents
        )
        terms = (x.reshape(targets.shape) for x in terms)
        d_unembedding = sharding.reduced(d_unembedding, unembedding.dtype)
        # The whole gradient, as large as all logits of a chunk, is not to wait until the layers' backward pass is done.
        d_hidden, d_unembedding = jax.lax.optimization_barrier((d_hidden, d_unembedding))
        return d_hidden.reshape(hidden.shape), d_unembedding, *terms

    d_hidden, d_unembedding, cross_entropy, log_z = sharding.run(local, "hutt", "hutt")(
        hidden, unembedding, targets, weights
    )
    unweighted = finish(cross_entropy, log_z, targets, None, V, z_loss)
    # An empty array remembers the unembedding's dtype; its gradient stays float32 until it is scaled.
    kept = d_hidden, d_unembedding, unweighted, jnp.zeros((0,), unembedding.dtype)
    return (jnp.sum(finish(cross_entropy, log_z, targets, weights, V, z_loss)), log_z), kept


def _summed_bwd(plan, sharding, V, z_loss, kept, cotangents):
    d_hidden, d_unembedding, unweighted, like = kept
    of_sum, _ = cotangents  # log Z is a constant here
    return (
        (d_hidden * of_sum).astype(d_hidden.dtype),
        (d_unembedding * of_sum).astype(like.dtype),
        None,
        unweighted * of_sum,
    )


_summed.defvjp(_summed_fwd, _summed_bwd)


def _flat(hidden: jax.Array) -> jax.Array:
    return hidden.reshape(-1, hidden.shape[-1])


def _choose(
    hidden: jax.Array, unembedding: jax.Array, sharding: CrossEntropySharding, implementation: str | None
) -> str:
    D = hidden.shape[-1]
    logits = hidden.size // max(D, 1) * (unembedding.size // max(D, 1)) // sharding.shards

    def unsupported_reason(chip: TargetChip) -> str | None:
        if hidden.dtype not in _DTYPES:
            return f"{hidden.dtype} is none of {', '.join(_DTYPES)}"
        return None

    def on_tpu(chip: TargetChip) -> str | None:
        return (
            "TPUs have no float16"
            if hidden.dtype == jnp.float16 and chip.platform == "tpu"
            else unsupported_reason(chip)
        )

    reasons = {"triton": unsupported_reason, "mosaic_tpu": on_tpu, "chunked": unsupported_reason}
    assert reasons.keys() == KERNELS.keys()
    few = requested(implementation) is None and logits < chunks.WORTHWHILE
    reasons = ({} if few else reasons) | {"xla": unsupported_reason}
    call, manual = CallClass.of_rows(hidden), bool(sharding.specs)
    return choose("linear_cross_entropy", implementation, reasons, manual=manual, call=call)


def _check(
    hidden, unembedding, targets, weights, transposed, soft_cap, z_loss, reduction, return_log_z, partition
) -> tuple:
    """Check all arguments; return soft_cap and z_loss as Python numbers."""
    name = "linear_cross_entropy"
    checks.array(name, hidden=hidden, unembedding=unembedding, targets=targets)
    checks.floating(name, hidden=hidden, unembedding=unembedding, weights=weights)
    checks.boolean(name, transposed=transposed, return_log_z=return_log_z)
    specs = partition if isinstance(partition, tuple) and len(partition) == 2 else (None,)
    if partition is not None and not all(isinstance(spec, PartitionSpec) for spec in specs):
        raise ValueError(f"{name}: partition = {partition}; it must be two PartitionSpecs, hidden's and unembedding's")
    if hidden.ndim == 0 or unembedding.ndim != 2 or unembedding.shape[transposed] != hidden.shape[-1]:
        wanted = "[V, D]" if transposed else "[D, V]"
        raise ValueError(
            f"{name}: hidden is {list(hidden.shape)} and unembedding {list(unembedding.shape)}; they must be [..., D] "
            f"and {wanted}"
        )
    if unembedding.dtype != hidden.dtype:
        raise ValueError(f"{name}: unembedding is {unembedding.dtype}; it must be {hidden.dtype} like hidden")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"{name}: targets is {targets.dtype}; it must hold integers")
    for what, x in (("targets", targets), ("weights", weights)):
        if x is not None and x.shape != hidden.shape[:-1]:
            raise ValueError(f"{name}: {what} has shape {list(x.shape)}; it must be {list(hidden.shape[:-1])}")
    if unembedding.size == 0:
        raise ValueError(
            f"{name}: unembedding is {list(unembedding.shape)}; it must have at least one label and one channel"
        )
    if not isinstance(reduction, str) or reduction not in ("none", "sum"):
        raise ValueError(f"{name}: reduction = {reduction!r}; it must be 'none' or 'sum'")
    z_loss = checks.number(name, "z_loss", z_loss)
    if not 0 <= z_loss <= float(jnp.finfo(jnp.float32).max):
        raise ValueError(f"{name}: z_loss = {z_loss}; it must be 0 or positive, and finite in float32")
    return checks.positive_or_none(name, soft_cap=soft_cap)[0], z_loss
