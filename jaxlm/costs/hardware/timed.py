"""Microbenchmarks of the parts of a training step, timed alternately on JAX's default device.

Each round runs every program once. All programs therefore see the same load of the machine, and none finds its operands
in a cache, because the others have run in between.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

# Typical sizes: tokens of a batch, tokens of a row in the batched products of attention, and heads.
_TOKENS, _ROW, _HEADS = 2048, 256, 32
_SMALLEST, _WIDEST_HEAD = 16, 128
_LONG_ENOUGH_S = 0.05  # a program of this duration hides its dispatch
_LOOPS = 20


@dataclass
class Microbenchmark:
    """A blocking call, and its `work`: FLOPs, or bytes read and written."""

    call: Callable[[], Any]
    work: float
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Work per second of the fastest call."""
        return self.work / min(self.seconds)

    @property
    def sustained(self) -> float:
        """Work per second at the third quartile of call times: three calls in four reach it."""
        return self.work / statistics.quantiles(self.seconds, n=4)[2]

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


def elementwise(size: int) -> Microbenchmark:
    """Return elementwise operations on `size` numbers that may fit into a cache: as in a softmax, one in six is an
    exponential."""

    @jax.jit
    def change(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _LOOPS, lambda _, y: (jnp.exp(y * 0.5 - 1.0) + y) * 0.25 - 0.125, x)

    return Microbenchmark(_blocking(change, jnp.zeros(size, jnp.float32)), 6 * _LOOPS * size)


def passes(numbers: int) -> list[Microbenchmark]:
    """Return the passes of a step between its products, over about `numbers` numbers and with little arithmetic: a
    transpose of heads and sequence, a reduction of rows, a product of two arrays."""
    rows = max(1, numbers // (_ROW * 256))
    heads_BTNH, rows_XS = jnp.ones((rows, _ROW, 8, 32)), jnp.ones((rows * _ROW * 2, 128))
    wide = jnp.ones((rows * _ROW, 256))
    moved = jax.jit(lambda x: jnp.transpose(x, (0, 2, 1, 3)))
    reduced = jax.jit(lambda x: jnp.max(x, axis=-1))
    joined = jax.jit(lambda x, y: x * y)
    return [
        Microbenchmark(_blocking(moved, heads_BTNH), 2 * heads_BTNH.nbytes),
        Microbenchmark(_blocking(reduced, rows_XS), rows_XS.nbytes),
        Microbenchmark(_blocking(joined, wide, wide + 1.0), 3 * wide.nbytes),
    ]


def products(dtype: str, largest: int) -> tuple[dict[int, Microbenchmark], dict[int, Microbenchmark]]:
    """Return two tables by smallest side, up to a program of sufficient duration: the product of a batch of tokens with
    a square matrix together with both its gradients, and the product of two square matrices."""
    in_training, square, side = {}, {}, min(2 * _SMALLEST, largest)
    while True:
        x, w = jnp.full((max(_TOKENS, side), side), 1e-3, dtype), jnp.full((side, side), 1e-3, dtype)
        in_training[side] = Microbenchmark(_blocking(_matrix, x, w, x), 6 * len(x) * side * side)
        square[side] = Microbenchmark(_blocking(_product, w, w), 2 * side**3)
        in_training[side].run()
        if in_training[side].run() > _LONG_ENOUGH_S or 2 * side > largest:
            return in_training, square
        side *= 2


def heads(dtype: str, largest: int) -> dict[int, Microbenchmark]:
    """Return a table by head dim: the scores of queries and keys together with both their gradients, for many heads."""
    benchmarks, width = {}, min(_SMALLEST, largest)
    while width <= min(_WIDEST_HEAD, largest):
        x = jnp.full((_HEADS, _ROW, width), 1e-3, dtype)
        benchmarks[width] = Microbenchmark(
            _blocking(_scores, x, x, jnp.full((_HEADS, _ROW, _ROW), 1e-3, dtype)), 6 * _HEADS * _ROW**2 * width
        )
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
