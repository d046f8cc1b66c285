"""Small programs like the parts of a training step, timed in turns on JAX's default device.

Each round runs every program once. So all of them meet whatever else the machine does meanwhile, and none finds its
operands in a cache: the others have run since.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

# What most models multiply: a batch of tokens, and its rows of so many tokens in the batched products of attention.
_TOKENS, _ROW, _HEADS = 2048, 256, 32
_SMALLEST, _WIDEST_HEAD = 16, 128
_LONG_ENOUGH_S = 0.05  # a program that takes so long hides its dispatch
_LOOPS = 20


@dataclass
class Microbenchmark:
    """A call that waits for its end, and its `work`: FLOPs, or bytes read and written."""

    call: Callable[[], Any]
    work: float
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Work per second of the fastest call."""
        return self.work / min(self.seconds)

    @property
    def sustained(self) -> float:
        """Work per second that three calls in four reach."""
        return self.work / statistics.quantiles(self.seconds, n=4)[2]

    def run(self) -> float:
        began = time.perf_counter()
        self.call()
        return time.perf_counter() - began


def in_turns(programs: list[Microbenchmark], rounds: int, most_s: float) -> None:
    """Time every program at least twice, and as often as `rounds` and the seconds allow."""
    for program in programs:
        program.run()  # compiles
    ends = time.perf_counter() + most_s
    for done in range(max(2, rounds)):
        if done >= 2 and time.perf_counter() > ends:
            return
        for program in programs:
            program.seconds.append(program.run())


def call_of_nothing() -> Microbenchmark:
    """A call that computes next to nothing; its work is one call."""
    add = jax.jit(lambda x: x + 1.0)
    return Microbenchmark(_waited(add, add(0.0)), 1.0)


def change_in_place(size: int) -> Microbenchmark:
    """Each byte of an array of `size` bytes read and written. It is donated, so that no memory is allocated: the first
    touch of new pages would be measured in its place."""
    change = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    x = jnp.zeros(size // 4, jnp.float32)

    def once() -> None:
        nonlocal x
        x = change(x).block_until_ready()

    return Microbenchmark(once, 2 * x.nbytes)


def mixture(size: int) -> Microbenchmark:
    """Operations element by element on `size` numbers that a cache may hold: as in a softmax, an exponential in six."""

    @jax.jit
    def change(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _LOOPS, lambda _, y: (jnp.exp(y * 0.5 - 1.0) + y) * 0.25 - 0.125, x)

    return Microbenchmark(_waited(change, jnp.zeros(size, jnp.float32)), 6 * _LOOPS * size)


def passes(numbers: int) -> list[Microbenchmark]:
    """What a step does with about so many numbers between its products, with next to no arithmetic: heads moved in
    front of the sequence, rows reduced, two arrays made one."""
    rows = max(1, numbers // (_ROW * 256))
    heads_BTNH, rows_XS = jnp.ones((rows, _ROW, 8, 32)), jnp.ones((rows * _ROW * 2, 128))
    wide = jnp.ones((rows * _ROW, 256))
    moved = jax.jit(lambda x: jnp.transpose(x, (0, 2, 1, 3)))
    reduced = jax.jit(lambda x: jnp.max(x, axis=-1))
    joined = jax.jit(lambda x, y: x * y)
    return [
        Microbenchmark(_waited(moved, heads_BTNH), 2 * heads_BTNH.nbytes),
        Microbenchmark(_waited(reduced, rows_XS), rows_XS.nbytes),
        Microbenchmark(_waited(joined, wide, wide + 1.0), 3 * wide.nbytes),
    ]


def products(dtype: str, largest: int) -> tuple[dict[int, Microbenchmark], dict[int, Microbenchmark]]:
    """By their smallest side, up to one that takes long enough: the three products of a matrix in training, its own
    and those of both gradients, of a batch of tokens and a square matrix; and one product of two square matrices."""
    in_training, square, side = {}, {}, min(2 * _SMALLEST, largest)
    while True:
        x, w = jnp.full((max(_TOKENS, side), side), 1e-3, dtype), jnp.full((side, side), 1e-3, dtype)
        in_training[side] = Microbenchmark(_waited(_matrix, x, w, x), 6 * len(x) * side * side)
        square[side] = Microbenchmark(_waited(_product, w, w), 2 * side**3)
        in_training[side].run()
        if in_training[side].run() > _LONG_ENOUGH_S or 2 * side > largest:
            return in_training, square
        side *= 2


def heads(dtype: str, largest: int) -> dict[int, Microbenchmark]:
    """By the width of a head: scores of queries and keys and both their gradients, of many heads at once."""
    found, width = {}, min(_SMALLEST, largest)
    while width <= min(_WIDEST_HEAD, largest):
        x = jnp.full((_HEADS, _ROW, width), 1e-3, dtype)
        found[width] = Microbenchmark(
            _waited(_scores, x, x, jnp.full((_HEADS, _ROW, _ROW), 1e-3, dtype)), 6 * _HEADS * _ROW**2 * width
        )
        width *= 2
    return found


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


def _waited(function: Callable[..., Any], *arguments: jax.Array) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(function(*arguments))
