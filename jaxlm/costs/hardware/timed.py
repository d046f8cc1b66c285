"""Microbenchmarks of the parts of a training step, timed alternately on JAX's default device.

Each round runs every program once. All programs therefore see the same load of the machine, and none finds its operands
in a cache, because the others have run in between.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.costs.hardware.sustained import Curve
from kernels_pallas import flash_attention, rms_norm
from kernels_pallas.flash_attention import causal, causal_chunks

# Typical sizes: tokens of a batch, tokens of a row in the batched products of attention, and heads.
_TOKENS, _ROW, _HEADS = 2048, 256, 32
_SMALLEST, _WIDEST_HEAD = 16, 128
_LONG_ENOUGH_S = 0.05  # a program of this duration hides its dispatch
_KERNELS = 64


@dataclass
class Microbenchmark:
    """A blocking call, its `work` (FLOPs, or bytes read and written), and the `size` at which a curve has it."""

    call: Callable[[], Any]
    work: float
    size: float = 1.0
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Work per second of the fastest call."""
        return self.work / min(self.seconds)

    @property
    def undisturbed(self) -> float:
        """Seconds of a call that other programs on the machine do not disturb: the first decile. A short call is either
        disturbed or not, so that its median is that of a busy machine."""
        ordered = sorted(self.seconds)
        return ordered[len(ordered) // 10]

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of call times, as a share of their median."""
        first, median, third = statistics.quantiles(self.seconds, n=4)
        return (third - first) / 2 / median

    def run(self) -> float:
        began = time.perf_counter()
        self.call()
        return time.perf_counter() - began


def alternate(programs: list[Microbenchmark], rounds: int, max_seconds: float) -> None:
    """Time every program at least twice, and at most `rounds` times or for `max_seconds` in total."""
    for program in programs:
        program.run()  # compiles
    ends = time.perf_counter() + max_seconds
    for done in range(max(2, rounds)):
        if done >= 2 and time.perf_counter() > ends:
            return
        for program in programs:
            program.seconds.append(program.run())


def empty_call() -> Microbenchmark:
    """Return a call that computes almost nothing; its work is one call."""
    add = jax.jit(lambda x: x + 1.0)
    return Microbenchmark(_blocking(add, add(0.0)), 1.0)


def change_in_place(size: int) -> Microbenchmark:
    """Read and write each byte of an array of `size` bytes. The array is donated, so that no memory is allocated:
    otherwise the first touch of new pages would be measured."""
    change = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    x = jnp.zeros(size // 4, jnp.float32)

    def once() -> None:
        nonlocal x
        x = change(x).block_until_ready()

    return Microbenchmark(once, 2 * x.nbytes)


def kernels() -> Microbenchmark:
    """Return a program of kernels that compute almost nothing, one after the other; its work is their number."""

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(_KERNELS):
            x = x @ x
        return x

    return Microbenchmark(_blocking(chain, jnp.zeros((_SMALLEST, _SMALLEST))), _KERNELS)


def passes(numbers: int) -> list[Microbenchmark]:
    """Return the passes of a layer between its products and of the loss, over arrays of about `numbers` float32
    numbers, forward and backward: two norms that add to the residual, gated and plain activations, logits.

    Their work is the bytes that a plan counts for them (`jaxlm.models.doors`): each loop on its own, without what XLA
    fuses. Their rate therefore includes the fusion, and their arithmetic.
    """
    width = 256
    x = jnp.ones((max(1, numbers // width), width))
    targets = jnp.zeros(len(x), jnp.int32)
    size = 4 * x.size

    def normed(x: jax.Array, residual: jax.Array, scale: jax.Array) -> Any:
        return rms_norm(x, scale, residual=residual, implementation="xla")

    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate) * up

    def loss(logits: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(len(targets)), targets])

    once = [
        (normed, (x, x, jnp.ones(width)), (x, x), 15),
        (normed, (x, x, jnp.ones(width)), (x, x), 15),
        (gated, (x, x), x, 8),
        (jax.nn.gelu, (x,), x, 6),
        (loss, (x,), jnp.ones(()), 4),
    ]
    return [
        Microbenchmark(_blocking(_with_gradients(function), operands, gradients), loops * size, 3 * size)
        for function, operands, gradients, loops in once
    ]


def update(numbers: int) -> Microbenchmark:
    """Return the norm of gradients and an update of AdamW in place, over about `numbers` float32 numbers of several
    parameters. Work: gradients read twice, parameters and two moments read and written."""
    arrays = 8
    zeros = [jnp.zeros(max(1, numbers // arrays)) for _ in range(arrays)]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, gradients: Any) -> Any:
        factor = jnp.minimum(1.0, 1.0 / (jnp.sqrt(sum(jnp.sum(g * g) for g in gradients)) + 1e-6))

        def one(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
            m, v = 0.9 * m + 0.1 * factor * g, 0.95 * v + 0.05 * (factor * g) ** 2
            return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v

        return [one(*each, g) for each, g in zip(state, gradients, strict=True)]

    state = [tuple(jnp.zeros_like(z) for _ in range(3)) for z in zeros]

    def once() -> None:
        nonlocal state
        state = jax.block_until_ready(step(state, zeros))

    moved = 32 * sum(z.size for z in zeros)
    return Microbenchmark(once, moved, moved)


def weights(size: int) -> Microbenchmark:
    """Return the product of one row with a float32 matrix of about `size` bytes, which it reads."""
    side = max(_SMALLEST, int((size / 4) ** 0.5))
    w = jnp.full((side, side), 1e-3)
    return Microbenchmark(_blocking(_product, w[:1], w), w.nbytes, w.nbytes)


def attention(head_dim: int, sequence: int, dtype: str, training: bool, xla: bool) -> Microbenchmark:
    """Return causal attention over about a batch of tokens, with its gradients in `training`. Work: FLOPs of the scores
    that are visible, or with `xla` of those that it computes."""
    batch, heads = max(1, _TOKENS // sequence), max(1, 512 // head_dim)
    x = jnp.full((batch, sequence, heads, head_dim), 1e-3, dtype)

    key_range = tuple(jnp.asarray(bound) for bound in causal(sequence))  # known only at run time, as in a step

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, key_range: Any) -> jax.Array:
        return flash_attention(q, k, v, key_range=key_range, is_causal=True, deterministic=False)

    scores = sequence * (sequence + 1) // 2
    if xla:
        chunks = causal_chunks.bounds(sequence)
        scores = sum((end - first) * end for first, end in chunks)
    once = 2 * batch * heads * scores * head_dim
    if not training:
        return Microbenchmark(_blocking(jax.jit(attend), x, x, x, key_range), 2 * once, sequence)
    products = 6 if xla else 7  # a kernel computes the scores again
    return Microbenchmark(_blocking(_with_gradients(attend), (x, x, x), x, key_range), products * once, sequence)


def curve(programs: Iterable[list[Microbenchmark]], dispatch_s: float) -> Curve:
    """Return the rate of each list of programs, which run one after the other, at the mean of their sizes. The time in
    which a call is dispatched is no part of it: in a step these are operations of one program."""
    rates = {}
    for each in programs:
        seconds = sum(max(program.undisturbed - dispatch_s, program.undisturbed / 10) for program in each)
        rates[statistics.fmean(program.size for program in each)] = sum(program.work for program in each) / seconds
    return tuple(sorted(rates.items()))


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function together with the gradients of its operands, given that of its result; others follow."""

    @jax.jit
    def both(operands: Any, gradient: Any, *others: Any) -> Any:
        result, pull_back = jax.vjp(lambda *each: function(*each, *others), *operands)
        return result, pull_back(gradient)

    return both


def products(dtype: str, largest: int) -> tuple[list[Microbenchmark], Microbenchmark]:
    """Return products of a batch of tokens with a matrix twice as wide together with both its gradients, by smallest
    side up to a program of sufficient duration; and the product of two square matrices of the last side."""
    in_training, side = [], min(2 * _SMALLEST, largest)
    while True:
        x, w = jnp.full((max(_TOKENS, side), side), 1e-3, dtype), jnp.full((side, 2 * side), 1e-3, dtype)
        gradient = jnp.full((len(x), 2 * side), 1e-3, dtype)
        in_training.append(Microbenchmark(_blocking(_matrix, x, w, gradient), 12 * len(x) * side * side, side))
        in_training[-1].run()
        if in_training[-1].run() > _LONG_ENOUGH_S or 2 * side > largest:
            square = jnp.full((side, side), 1e-3, dtype)
            return in_training, Microbenchmark(_blocking(_product, square, square), 2 * side**3, side)
        side *= 2


def heads(dtype: str, largest: int) -> list[Microbenchmark]:
    """Return a list by head dim: the scores of queries and keys together with both their gradients, for many heads."""
    benchmarks, width = [], min(_SMALLEST, largest)
    while width <= min(_WIDEST_HEAD, largest):
        x = jnp.full((_HEADS, _ROW, width), 1e-3, dtype)
        call = _blocking(_scores, x, x, jnp.full((_HEADS, _ROW, _ROW), 1e-3, dtype))
        benchmarks.append(Microbenchmark(call, 6 * _HEADS * _ROW**2 * width, width))
        width *= 2
    return benchmarks


@jax.jit
def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return x @ y


@jax.jit
def _matrix(x_TD: jax.Array, w_DF: jax.Array, grad_TF: jax.Array) -> tuple[jax.Array, ...]:
    return x_TD @ w_DF, grad_TF @ w_DF.T, x_TD.T @ grad_TF


@jax.jit
def _scores(q_NTH: jax.Array, k_NSH: jax.Array, grad_NTS: jax.Array) -> tuple[jax.Array, ...]:
    return (
        jnp.einsum("NTH,NSH->NTS", q_NTH, k_NSH),
        jnp.einsum("NTS,NSH->NTH", grad_NTS, k_NSH),
        jnp.einsum("NTS,NTH->NSH", grad_NTS, q_NTH),
    )


def _blocking(function: Callable[..., Any], *arguments: jax.Array) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(function(*arguments))
