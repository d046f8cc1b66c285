"""Operations on rows: one body of mathematics, launched by Triton, by Mosaic and by Mosaic GPU, forward and backward.

A body is a function of whole rows in float32. The forward kernel applies it to blocks of rows. The backward kernel
applies its vector-Jacobian product, taken by JAX inside the kernel, to the same blocks: it reads a row once and
recomputes all that the derivative needs, which costs less than storing and reading it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from kernels_pallas.core.cases import KernelCase
from kernels_pallas.core.choice import choose
from kernels_pallas.core.eager import compiled_once
from kernels_pallas.core.launch import KernelCost, KernelCosts, size_of, vary
from kernels_pallas.core.measured import CallClass
from kernels_pallas.core.rows import mosaic_gpu, mosaic_tpu, triton
from kernels_pallas.core.target import TargetChip

# A row is held whole, in registers or VMEM, with its float32 intermediates.
MAX_WIDTH = 32_768

_DTYPES = ("float32", "bfloat16", "float16")
_RUN = {"triton": triton.run, "mosaic_gpu": mosaic_gpu.run, "mosaic_tpu": mosaic_tpu.run}
IMPLEMENTATIONS = tuple(_RUN)
# Triton's kernels have run on a GPU, and serve any width.
_WHERE_MEASURED = ("mosaic_gpu",)


class RowsBody(Protocol):
    """A frozen dataclass: its fields are the operation's static options.

    Attributes:
      name: of the operation.
      elementwise: whether columns are independent, so that a block may hold a part of a row.
      flops, transcendentals: per number of the first operand, forward and backward (which includes forward again).
    """

    name: ClassVar[str]
    elementwise: ClassVar[bool]
    flops: ClassVar[tuple[int, int]]
    transcendentals: ClassVar[tuple[int, int]]

    def __call__(
        self, inside: jax.Array | None, rows: tuple[jax.Array, ...], vectors: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Return results [r, W] of operands [r, W] and vectors [1, W], all float32; a mask among `rows` is 0 or 1.

        Operands hold zeros in columns and rows beyond the array. `inside`, bool [1, W], is True in the array's columns,
        and None where all columns are inside.
        """
        ...


def unsupported_reason(x: jax.Array, chip: TargetChip, max_width: int | None = MAX_WIDTH) -> str | None:
    """Return why no kernel on rows supports x [..., W] on a chip, or None."""
    if x.dtype not in _DTYPES:
        return f"{x.dtype} is none of {', '.join(_DTYPES)}"
    if x.dtype == jnp.float16 and chip.platform == "tpu":
        return "TPUs have no float16"
    if max_width is not None and x.shape[-1] > max_width:
        return f"rows of {x.shape[-1]} numbers are wider than {max_width}"
    return None


def choose_kernel(
    body: type[RowsBody], x: jax.Array, implementation: str | None, tuned_for_xla: bool = False
) -> str | None:
    """Return the implementation that runs on operands like x [..., W], or None for the reference.

    `tuned_for_xla`: the operation has an implementation "xla", which None takes where no kernel serves.
    """
    serves = functools.partial(unsupported_reason, x, max_width=None if body.elementwise else MAX_WIDTH)
    reasons = dict.fromkeys(IMPLEMENTATIONS, serves) | ({"xla": lambda chip: None} if tuned_for_xla else {})
    reasons["mosaic_gpu"] = lambda chip: serves(chip) or mosaic_gpu.unsupported_reason(x, body.elementwise)
    chosen = choose(body.name, implementation, reasons, by_name=_WHERE_MEASURED, call=CallClass.of_rows(x))
    # Empty operands have the same result in every implementation.
    return None if chosen == "reference" or x.size == 0 else chosen


def serves(body: type[RowsBody], implementation: str, case: KernelCase, dtype: str) -> bool:
    """Return whether an implementation supports a case in a dtype: `serves` of the `KernelOperation` of a body."""
    x = next(iter(case.structs(dtype).values()))
    return implementation != "mosaic_gpu" or mosaic_gpu.unsupported_reason(x, body.elementwise) is None


def apply(
    body: RowsBody,
    implementation: str,
    rows: Sequence[jax.Array],
    vectors: Sequence[jax.Array] = (),
) -> jax.Array:
    """Return the one result of body(rows, vectors), in the first operand's dtype, differentiable, by a kernel each way.

    Args:
      rows: arrays [..., W] of one shape, floating point or bool. vectors: arrays [W].
    """
    shape = rows[0].shape
    flat = tuple(x.reshape(-1, shape[-1]) for x in rows)
    operands = vary(*flat, *vectors)
    (y,) = _apply(body, implementation, operands[: len(rows)], operands[len(rows) :])
    return y.reshape(shape)


def apply_to_sum(
    body: RowsBody, implementation: str, x: jax.Array, residual: jax.Array, vectors: Sequence[jax.Array] = ()
) -> tuple[jax.Array, jax.Array]:
    """Return s = x + residual, rounded to x's dtype, and body(s), by one kernel each way: the sum is not read back.

    Args:
      body: has one operand and one result. x, residual: [..., W] of one dtype. vectors: arrays [W].
    """
    flat = tuple(a.reshape(-1, x.shape[-1]) for a in (x, residual))
    x_RW, residual_RW, *vectors = vary(*flat, *vectors)
    total, y = _apply_to_sum(body, implementation, x_RW, residual_RW, tuple(vectors))
    return total.reshape(x.shape), y.reshape(x.shape)


@compiled_once(static=3)
def forward(
    body: RowsBody, implementation: str, results: int, rows: Sequence[jax.Array], vectors: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Return `results` arrays [R, W], in the first operand's dtype, of rows [R, W] and vectors [W], by one kernel."""
    outputs = (jax.ShapeDtypeStruct(rows[0].shape, rows[0].dtype),) * results

    def step(inside: jax.Array | None, rows: tuple, vectors: tuple) -> tuple[tuple, tuple]:
        return body(inside, rows, vectors), ()

    arrays, _ = _RUN[implementation](
        step,
        rows,
        vectors,
        outputs,
        sums=0,
        elementwise=body.elementwise,
        cost=_cost(body, 0, *rows, *vectors, *outputs),
        name=body.name,
    )
    return arrays


@compiled_once(static=2)
def backward(
    body: RowsBody,
    implementation: str,
    rows: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
) -> tuple[tuple[jax.Array | None, ...], tuple[jax.Array, ...]]:
    """Return cotangents of the operands and of the vectors, in their dtypes, by one kernel; None for masks."""
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in rows]
    outputs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in itertools.compress(rows, floats))

    def step(inside: jax.Array | None, blocks: tuple, vectors: tuple) -> tuple[tuple, tuple]:
        rows, cotangents = blocks[: len(floats)], blocks[len(floats) :]

        def of_floats(chosen: tuple, vectors: tuple) -> tuple:
            return body(inside, _insert(chosen, rows, floats), vectors)

        _, pull_back = jax.vjp(of_floats, tuple(itertools.compress(rows, floats)), vectors)
        return pull_back(cotangents)

    results, sums = _RUN[implementation](
        step,
        (*rows, *cotangents),
        vectors,
        outputs,
        sums=len(vectors),
        elementwise=body.elementwise,
        cost=_cost(body, 1, *rows, *vectors, *cotangents, *outputs, *vectors),
        name=f"{body.name}_backward",
    )
    return (
        _insert(results, (None,) * len(rows), floats),
        tuple(s.astype(v.dtype) for s, v in zip(sums, vectors, strict=True)),
    )


def _insert(chosen: Sequence[Any], others: Sequence[Any], where: Sequence[bool]) -> tuple:
    """Merge two sequences: the next of `chosen` where `where` is True, otherwise the next of `others`."""
    left = iter(chosen)
    return tuple(next(left) if yes else other for other, yes in zip(others, where, strict=True))


def costs(body: RowsBody | type[RowsBody], rows: Sequence[Any], vectors: Sequence[Any] = ()) -> KernelCosts:
    """Return the costs of `apply` on arrays, or shapes and dtypes; a body's class may stand for the body."""
    y = rows[0]
    floats = [x for x in rows if jnp.issubdtype(x.dtype, jnp.floating)]
    return KernelCosts(_cost(body, 0, *rows, *vectors, y), _cost(body, 1, *rows, *vectors, y, *floats, *vectors))


def _cost(body: RowsBody | type[RowsBody], direction: int, first: Any, *others: Any) -> KernelCost:
    return KernelCost(
        flops=body.flops[direction] * first.size,
        transcendentals=body.transcendentals[direction] * first.size,
        bytes=size_of(first, *others),
    )


def _fwd(body, implementation, rows, vectors):
    return _apply(body, implementation, rows, vectors), (rows, vectors)


def _bwd(body, implementation, saved, cotangents):
    rows, vectors = saved
    return backward(body, implementation, rows, vectors, cotangents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(body, implementation, rows, vectors):
    return forward(body, implementation, 1, rows, vectors)


_apply.defvjp(_fwd, _bwd)


@dataclasses.dataclass(frozen=True)
class _WithSum:
    """A body that returns a sum s and body(s): s is the rounded sum of two operands, or the only operand."""

    body: RowsBody | type[RowsBody]
    dtype: str

    def __call__(self, inside: Any, rows: tuple, vectors: tuple) -> tuple:
        total, *others = rows
        for x in others:
            total = (total + x).astype(self.dtype).astype(jnp.float32)
        return (total, *self.body(inside, (total,), vectors))

    name = property(lambda self: f"add_{self.body.name}")
    elementwise = property(lambda self: self.body.elementwise)
    flops = property(lambda self: tuple(n + 1 for n in self.body.flops))
    transcendentals = property(lambda self: self.body.transcendentals)


def costs_of_sum(body: RowsBody | type[RowsBody], x: Any, vectors: Sequence[Any] = ()) -> KernelCosts:
    """Return the costs of `apply_to_sum` on x [..., W] and a residual of the same shape and dtype."""
    add = _WithSum(body, str(x.dtype))
    return KernelCosts(_cost(add, 0, x, x, *vectors, x, x), _cost(add, 1, x, *vectors, x, x, x, *vectors))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply_to_sum(body, implementation, x, residual, vectors):
    return forward(_WithSum(body, str(x.dtype)), implementation, 2, (x, residual), vectors)


def _sum_fwd(body, implementation, x, residual, vectors):
    total, y = _apply_to_sum(body, implementation, x, residual, vectors)
    return (total, y), (total, vectors)


def _sum_bwd(body, implementation, saved, cotangents):
    total, vectors = saved
    (d_total,), d_vectors = backward(_WithSum(body, str(total.dtype)), implementation, (total,), vectors, cotangents)
    return d_total, d_total, d_vectors


_apply_to_sum.defvjp(_sum_fwd, _sum_bwd)
