"""The operations of a warpgroup on Hopper."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core.hopper.memory import ROWS, AddingTurn

# This name tells axes of grids from those of a mesh of devices.
PREFIX = "gpu_"
WARPGROUP = "warpgroup"
BLOCK = "block"


class Warpgroup:
    """The operations of one warpgroup. A kernel's body takes it, and its arrays by name."""

    def __init__(self, interpret: bool, grid: Mapping[str, int]):
        self.interpret, self._grid = interpret, grid

    def index(self, axis: str = WARPGROUP) -> jax.Array:
        """Return the index of this block along an axis of the grid, or of this warpgroup in its block."""
        if axis == WARPGROUP:
            return jax.lax.axis_index(PREFIX + axis)
        # CUDA has three axes, of which all but the first are limited to 65,535: all are folded into the first.
        names = list(self._grid)
        before = math.prod(self._grid[name] for name in names[: names.index(axis)])
        return jax.lax.rem(jax.lax.div(jax.lax.axis_index(PREFIX + BLOCK), before), self._grid[axis])

    def setmaxnreg(self, count: int, more: bool) -> None:
        """Set the registers per thread to `count`: `more`, or fewer, than at launch."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plgpu.set_max_registers(count, action="increase" if more else "decrease")

    def tma_load(self, source: Any, destination: Any, barrier: Any) -> None:
        """Start a copy into shared memory by TMA, which arrives at the barrier when the copy is complete."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plgpu.copy_gmem_to_smem(source, destination, barrier)

    def tma_store(self, *copies: tuple[jax.Array, Any, Any]) -> None:
        """Write values through buffers in shared memory to global memory: (value, buffer, destination) each.

        Of a buffer with more rows than the destination only the first are written.
        """
        from jax.experimental.pallas import mosaic_gpu as plgpu

        for value, buffer, _ in copies:
            buffer[...] = value.astype(buffer.dtype)
        self.commit()
        for _, buffer, destination in copies:
            rows = destination.shape[0]
            plgpu.copy_smem_to_gmem(buffer if rows == buffer.shape[0] else buffer.at[pl.ds(0, rows)], destination)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the buffers are free again

    def tma_store_rows(self, value: jax.Array, buffer: Any, destination: Any, begin: jax.Array, end: jax.Array) -> None:
        """Write rows `begin` to before `end` of a value [ROWS, columns] through a buffer to global memory.

        The buffer is not `tiled`. A copy's size is known to the compiler: there is one of each power of two that the
        number of rows has, so that any other row of the destination [ROWS or fewer, columns] is left as it is.
        """
        from jax.experimental.pallas import mosaic_gpu as plgpu

        buffer[...] = value.astype(buffer.dtype)
        self.commit()
        row, size = begin, 1 << (min(ROWS, destination.shape[0]).bit_length() - 1)
        while size:
            at = pl.ds(row, size)
            has = (end - begin) & size
            pl.when(has != 0)(lambda at=at: plgpu.copy_smem_to_gmem(buffer.at[at], destination.at[at]))
            row, size = row + has, size // 2
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def tma_add(
        self,
        copies: Sequence[tuple[Any, Any]],
        release: Callable[[], None],
        meanwhile: Callable[[], None],
        turn: AddingTurn | None = None,
    ) -> None:
        """Add float32 in shared memory to global memory by TMA, (buffer, destination) each.

        `release` is called when the buffers are free again, and `meanwhile` while global memory is still being written.
        Without a turn, blocks add in any order to an output of `run` that starts at zero. The block whose turn is the
        first starts the sum, and each other one waits until those before it have added.

        A block may only wait for blocks before it in the grid, which start first. Interpreted, they also end first. No
        fence for the copy engine stands between the wait and the copy, and none does in FlashAttention-3's
        deterministic mode.
        """
        if self.interpret:
            for buffer, destination in copies:
                before = destination[...] if turn is None else jnp.where(turn.order > 0, destination[...], 0)
                destination[...] = before + buffer[...]
            self.commit()
            release()
            meanwhile()
            return
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def add() -> None:
            for buffer, destination in copies:
                plgpu.copy_smem_to_gmem(buffer, destination, reduction_op="add")

        if turn is None:
            add()
        else:

            @pl.when(turn.order == 0)
            def _() -> None:
                for buffer, destination in copies:
                    plgpu.copy_smem_to_gmem(buffer, destination)

            @pl.when(turn.order > 0)
            def _() -> None:
                plgpu.semaphore_wait(turn.counter, turn.order, decrement=False, memory_scope="gpu")
                add()

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        release()
        meanwhile()
        if turn is not None:
            plgpu.wait_smem_to_gmem(0)
            plgpu.semaphore_signal(turn.counter, memory_scope="gpu")

    def commit(self) -> None:
        """Order this warpgroup's reads and writes of shared memory before accesses by the copy engine and wgmma."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plgpu.commit_smem()

    def wait(self, barrier: Any) -> None:
        """Wait until the barrier has opened once more than this warpgroup has waited for."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plgpu.barrier_wait(barrier)

    def arrive(self, barrier: Any) -> None:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plgpu.barrier_arrive(barrier)

    def wgmma(self, *pairs: tuple[Any, Any], meanwhile: Callable[[], None] = lambda: None) -> tuple[jax.Array, ...]:
        """Return a · bᵀ in float32 of each pair a [64, k] and b [n, k] in shared memory; `meanwhile` runs during the
        products.
        """
        if self.interpret:
            products = tuple(self._interpreted_product(a[...], b, 1) for a, b in pairs)
            meanwhile()
            return products
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def multiply(*refs: Any) -> tuple[jax.Array, ...]:
            *product_refs, _ = refs
            for product_ref, (a, b) in zip(product_refs, pairs, strict=True):
                plgpu.wgmma(product_ref, a, b.transpose((1, 0)))
            meanwhile()
            return tuple(product_ref[...] for product_ref in product_refs)

        products = (plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32) for a, b in pairs)
        # LLVM takes one of the last registers as the source of all zeros. It belongs to no accumulator, so the
        # assembler still knows the initial values of the others, and leaves out 32 moves for each 64 × 64.
        return pl.run_scoped(multiply, *products, plgpu.ACC((ROWS, 8), jnp.float32))

    def wgmma_by_columns(self, a: Any, b: Any) -> jax.Array:
        """Return a · b in float32 of a [64, k] and b [k, n] in shared memory."""
        if self.interpret:
            return self._interpreted_product(a[...], b, 0)
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def multiply(product_ref: Any) -> jax.Array:
            plgpu.wgmma(product_ref, a, b)
            return product_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))

    def wgmma_accumulate(self, *terms: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, ...]:
        """Return total + a · b in float32 of each (total, a, b), of values a [64, k] and b [k, n] in shared memory."""
        if self.interpret:
            return tuple(total + self._interpreted_product(a, b, 0) for total, a, b in terms)
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def add(sum_refs: tuple) -> None:
            for sum_ref, (_, a, b) in zip(sum_refs, terms, strict=True):
                plgpu.wgmma(sum_ref, a, b)

        return pl.run_state(add)(tuple(plgpu.ACC.init(total) for total, _, _ in terms))

    def wgmma_sum(
        self,
        steps: Any,
        columns: int,
        operands: Callable[[jax.Array], tuple[Any, Any]],
        contracted: tuple[int, int],
        release: Callable[[jax.Array], None],
    ) -> jax.Array:
        """Return the sum of products over steps, [ROWS, columns] in float32: zeros of no steps.

        Args:
          operands: operands(step) waits for the operands of a step in shared memory, two or more of which are there at
            a time, and returns them.
          contracted: the axis of each that products contract.
          release: release(step) is called when the product of a step has been computed; not of the last one.
        """
        of_a, of_b = contracted
        if self.interpret:

            def added(step: jax.Array, total: jax.Array) -> jax.Array:
                a, b = operands(step)
                total += self._interpreted_product(a[...] if of_a else a[...].T, b, of_b)
                pl.when(step < steps - 1)(lambda: release(step))
                return total

            return jax.lax.fori_loop(0, steps, added, jnp.zeros((ROWS, columns), jnp.float32))
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def multiply(sum_ref: Any) -> jax.Array:
            def add(step: jax.Array, _: None) -> None:
                a, b = operands(step)
                # No instruction but a fence, which the assembler would put here itself (C7519).
                sum_ref[...] = plgpu.wgmma_accumulator_load(sum_ref, wait_n=None)
                plgpu.wgmma(sum_ref, a if of_a else a.transpose((1, 0)), b.transpose((1, 0)) if of_b else b)
                plgpu.wgmma_wait(1)  # the product of the step before has ended
                pl.when(step > 0)(lambda: release(step - 1))

            jax.lax.fori_loop(0, steps, add, None)
            return sum_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, columns), jnp.float32))

    def wgmma_overlapped(
        self,
        first: tuple[Any, Any],
        use: Callable[[jax.Array], None],
        *terms: tuple[jax.Array, jax.Array, Any],
    ) -> tuple[jax.Array, ...]:
        """Issue aᵀ · b of the `first`, a [k, 64] and b [k, n] in shared memory, then `wgmma_accumulate` of the terms.

        use(aᵀ · b) is called while the terms are multiplied.
        """
        a, b = first
        if self.interpret:
            use(self._interpreted_product(a[...].T, b, 0))
            return self.wgmma_accumulate(*terms)
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def multiply(first_ref: Any, *sum_refs: Any) -> tuple[jax.Array, ...]:
            for sum_ref, (total, _, _) in zip(sum_refs, terms, strict=True):
                sum_ref[...] = total
            plgpu.wgmma(first_ref, a.transpose((1, 0)), b)
            for sum_ref, (_, c, d) in zip(sum_refs, terms, strict=True):
                plgpu.wgmma(sum_ref, c, d)
            plgpu.wgmma_wait(len(terms))
            use(plgpu.wgmma_accumulator_load(first_ref, wait_n=None))
            totals = tuple(sum_ref[...] for sum_ref in sum_refs)
            return tuple(_held_until(x, c) for x, (_, c, _) in zip(totals, terms, strict=True))

        totals = (plgpu.ACC(total.shape, jnp.float32) for total, _, _ in terms)
        return pl.run_scoped(multiply, plgpu.ACC((a.shape[1], b.shape[1]), jnp.float32), *totals)

    def qk_with_pv(
        self,
        pair: tuple[Any, Any],
        total: jax.Array,
        weights: jax.Array,
        await_values: Callable[[], Any],
        softmax: Callable[[jax.Array], Any],
        meanwhile: Callable[[], None],
    ) -> tuple[Any, jax.Array]:
        """Multiply query and keys, a · bᵀ of the `pair`, and weights and values, total + weights · values, together.

        Returns softmax(a · bᵀ), computed during the second product, and the second product. await_values() returns the
        values in shared memory; it is called when the first product has been issued, and `meanwhile` when both have
        been.

        Where softmax ends with a wait at a barrier, all of it overlaps the second product: ptxas moves the wait for a
        product before arithmetic, but not before a wait at a barrier.
        """
        if self.interpret:
            (product,) = self.wgmma(pair)
            values = await_values()
            meanwhile()
            return softmax(product), *self.wgmma_accumulate((total, weights, values))
        from jax.experimental.pallas import mosaic_gpu as plgpu

        a, b = pair

        def multiply(product_ref: Any, sum_ref: Any) -> tuple[Any, jax.Array]:
            sum_ref[...] = total
            plgpu.wgmma(product_ref, a, b.transpose((1, 0)))
            plgpu.wgmma(sum_ref, weights, await_values())
            meanwhile()
            plgpu.wgmma_wait(1)
            result = softmax(plgpu.wgmma_accumulator_load(product_ref, wait_n=None))
            return result, _held_until(sum_ref[...], weights)

        product = plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32)
        return pl.run_scoped(multiply, product, plgpu.ACC(total.shape, jnp.float32))

    def tile(self, x: jax.Array) -> jax.Array:
        """Return a value [rows, columns] in the layout of products."""
        return self._laid(x, lambda tile: tile)

    def by_row(self, x: jax.Array) -> jax.Array:
        """Return a value [rows] in the layout of a tile's rows."""
        return self._laid(x, lambda tile: tile.reduce(1))

    def by_column(self, x: jax.Array) -> jax.Array:
        """Return a value [columns] in the layout of a tile's columns."""
        return self._laid(x, lambda tile: tile.reduce(0))

    def load_tile(self, ref: Any) -> jax.Array:
        """Load a whole `tiled` array from shared memory, in the layout of products."""
        return self.tile(ref[...])

    def load_transposed(self, ref: Any) -> jax.Array:
        """Load the transpose of a `tiled` array [columns, rows] from shared memory, in the layout of products."""
        if self.interpret:
            return ref[...].T
        from jax.experimental.pallas import mosaic_gpu as plgpu

        transposed = plgpu.layout_cast(self._load(ref.transpose((1, 0))), plgpu.Layout.WGMMA_TRANSPOSED)
        return self.tile(transposed)

    def load_by_row(self, ref: Any) -> jax.Array:
        """Load a whole array [rows] from global or shared memory."""
        return self.by_row(self._load(ref))

    def load_by_column(self, ref: Any) -> jax.Array:
        """Load a whole array [columns] from global or shared memory."""
        return self.by_column(self._load(ref))

    def load_strided(self, ref: Any, lanes: int) -> jax.Array:
        """Load a whole array [n] from global memory: each thread has `lanes` neighbours of every 128 · `lanes`."""
        return self.strided(self._load(ref), lanes)

    def strided(self, x: jax.Array, lanes: int) -> jax.Array:
        """Return a value [n] in the layout of `load_strided`."""
        if self.interpret:
            return x
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, vec_size=lanes))

    def broadcast_by_row(self, x: jax.Array, columns: int) -> jax.Array:
        """Return a value laid out by row, repeated over `columns`."""
        return jax.lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))

    def broadcast_by_column(self, x: jax.Array, rows: int) -> jax.Array:
        """Return a value laid out by column, repeated over `rows`."""
        return self.tile(jax.lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,)))

    def iota(self, shape: tuple[int, int], axis: int) -> jax.Array:
        """Return 0, 1, 2 … along an axis of a tile, int32."""
        return self.tile(jax.lax.broadcasted_iota(jnp.int32, shape, axis))

    def _interpreted_product(self, a: jax.Array, b: Any, axis: int) -> jax.Array:
        product = jax.lax.dot_general(a, b[...], (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
        self.commit()  # the reads were not wgmma's
        return product

    def _laid(self, x: jax.Array, of_tile: Callable[[Any], Any]) -> jax.Array:
        if self.interpret:
            return x
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.layout_cast(x, of_tile(plgpu.Layout.WGMMA))

    def _load(self, ref: Any) -> jax.Array:
        if self.interpret:
            return ref[...]
        from jax.experimental.pallas import mosaic_gpu as plgpu

        index = ((),) if jax.__version_info__ < (0, 11) else ()
        return plgpu.load(ref, *index, optimized=False)


def _held_until(result: jax.Array, operand: jax.Array) -> jax.Array:
    """Return the result; until it is ready the operand's registers hold nothing else.

    LLVM does not know that an asynchronous product still reads them, and may reuse them for the work in between.
    """
    return jax.lax.optimization_barrier((result, operand))[0]
