"""The language of kernels for Hopper: the one file that knows the operations of Pallas's Mosaic GPU backend.

A block of the grid is several warpgroups of 128 threads that run one body, share memory and meet at barriers. A value
is spread over the registers of its warpgroup: a tile in wgmma's layout (PTX ISA, "asynchronous warpgroup level matrix
instructions"), a vector of its rows or columns in the layout of the tile's reductions.

Interpreted (on any platform), copies, barriers and warpgroups are those of Mosaic GPU's own interpreter, which detects
races and deadlocks at barriers; products, which not every version of it has, are those of `jax.numpy`. Warpgroups are
threads of JAX's CPU client, and a kernel under `jax.vmap` holds one more. With too few threads, which is refused, they
might wait for one another for ever (`JAX_NUM_CPU_DEVICES`).
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import interpretation
from kernels_pallas.core.launch import KernelCost, call_warpgroups, differentiated_once, vary

# Rows of a warpgroup's smallest product (wgmma.m64nNk16), and bytes of a row of a swizzled tile in shared memory.
ROWS = 64
SWIZZLE = 128
# Rows of a swizzled tile.
_TILE_ROWS = 8

# Of a warpgroup.
THREADS = 128

# This name tells axes of grids from those of a mesh of devices.
_PREFIX = "gpu_"
_WARPGROUP = "warpgroup"
_BLOCK = "block"
_LANES = "lanes"


class SharedBuffer(NamedTuple):
    """An array in shared memory. `tiled`: an operand of products, [..., rows, columns], columns a multiple of 64."""

    shape: tuple[int, ...]
    dtype: Any
    tiled: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class Barriers(NamedTuple):
    """A set of `count` barriers, each of which opens after `arrivals` arrivals, and closes again."""

    count: int
    arrivals: int = 1

    @property
    def bytes(self) -> int:
        return 8 * self.count


class AddingTurn(NamedTuple):
    """A block's turn to add to a sum: a counter, a semaphore in global memory, and how many blocks come before."""

    counter: Any
    order: jax.Array


def extent(length: int, block: int, step: int | None = None) -> int:
    """Return the length that an array of this length needs along an axis of which blocks are copied whole.

    It is whole tiles and at least a block: beyond an array's end the copy engine reads zeros, and writes nothing. The
    interpreter needs whole blocks.

    step: blocks begin at multiples of it; of the block where None.
    """
    tiles = -(-length // _TILE_ROWS) * _TILE_ROWS
    if interpretation.current() is not None and length:
        step = step or block
        tiles = (length - 1) // step * step + block
    return max(tiles, block if length else 0)


class Warpgroup:
    """The operations of one warpgroup. A kernel's body takes it, and its arrays by name."""

    def __init__(self, interpret: bool, grid: Mapping[str, int]):
        self.interpret, self._grid = interpret, grid

    def index(self, axis: str = _WARPGROUP) -> jax.Array:
        """Return the index of this block along an axis of the grid, or of this warpgroup in its block."""
        if axis == _WARPGROUP:
            return jax.lax.axis_index(_PREFIX + axis)
        # CUDA has three axes, of which all but the first are limited to 65,535: all are folded into the first.
        names = list(self._grid)
        before = math.prod(self._grid[name] for name in names[: names.index(axis)])
        return jax.lax.rem(jax.lax.div(jax.lax.axis_index(_PREFIX + _BLOCK), before), self._grid[axis])

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


def may_be_zeroed(operand: jax.Array) -> bool:
    """Return whether outputs of a kernel with this operand may start at zero.

    They are references, and from JAX 0.12 on no kernel takes one that varies over a mesh (shard_map with check_vma).
    """
    return not jax.typeof(operand).manual_axis_type.varying


def run(
    body: Callable[[Warpgroup, Mapping[str, Any]], None],
    operands: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    grid: Mapping[str, int],
    warpgroups: int,
    shared: Mapping[str, SharedBuffer | Barriers],
    cost: KernelCost,
    name: str,
    counters: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    zeroed: Collection[str] = (),
    exact: bool = False,
) -> list[jax.Array]:
    """Run a kernel; return its outputs.

    Args:
      body: the program of each warpgroup of each block, on operands, outputs and shared memory by name.
      grid: axes and their sizes; the first is the one along which blocks start one after another.
      shared: arrays and barriers of each block.
      cost: of the whole call; jaxlm counts it.
      counters: shapes of counters that all blocks share, which start at 0; see `AddingTurn`.
      zeroed: the outputs that start at zero, where they may; see `tma_add`. All others hold anything at first.
      exact: whether exponentials, tanh and quotients are right to the last places of float32, not approximate.

    Inside `interpreted` it runs as plain JAX instead, on any platform.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    operands = dict(zip(operands, vary(*map(jnp.asarray, operands.values())), strict=True))
    names = list(operands)
    interpret = interpretation.current() is not None
    if interpret and len(jax.devices("cpu")) <= warpgroups:
        raise RuntimeError(
            f"{name}: interpreted, it needs {warpgroups + 1} CPU devices (JAX_NUM_CPU_DEVICES={warpgroups + 1}): "
            "warpgroups are their threads, and would wait for one another for ever"
        )
    warpgroup = Warpgroup(interpret, grid)
    varying = jax.typeof(next(iter(operands.values()))).manual_axis_type
    shapes = {
        key: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying)
        for key, x in sorted(outputs.items(), key=lambda item: item[0] not in zeroed)
    }

    @jax.custom_batching.custom_vmap
    def call(*arrays: jax.Array) -> list[jax.Array]:
        def kernel(*refs: Any) -> None:
            named = dict(zip((*names, *shapes), refs, strict=True))
            if interpret:  # the interpreter has no references; it runs blocks one after another

                @pl.when((jax.lax.axis_index(_PREFIX + _BLOCK) == 0) & (warpgroup.index() == 0))
                def _() -> None:
                    for key in zeroed:
                        named[key][...] = jnp.zeros(named[key].shape, named[key].dtype)

            for key, shape in counters.items():
                named[key] = _NoCounters() if interpret else pl.get_global(plgpu.SemaphoreType.REGULAR(shape))
            pl.run_scoped(
                lambda **buffers: body(warpgroup, named | buffers),
                **{key: _allocation(buffer, interpret) for key, buffer in shared.items()},
                collective_axes=_PREFIX + _WARPGROUP,
            )

        results = call_warpgroups(
            kernel,
            arrays,
            list(shapes.values()),
            zeroed=0 if interpret else len(zeroed),
            blocks=(_PREFIX + _BLOCK, math.prod(grid.values())),
            warpgroups=(_PREFIX + _WARPGROUP, warpgroups),
            cost=cost,
            name=name,
            exact=exact,
        )
        by_name = dict(zip(shapes, results, strict=True))
        return [by_name[key] for key in outputs]

    @call.def_vmap
    def batched(size: int, in_batched: Sequence[bool], *arrays: jax.Array) -> tuple:
        """Map over one more axis of the grid."""
        if size == 0:
            return [jnp.zeros((0, *x.shape), x.dtype) for x in outputs.values()], [True] * len(outputs)
        axis = f"{_LANES}{len(grid)}"
        many = {key for key, has in zip(names, in_batched, strict=True) if has} | {*outputs, *counters}

        def lane(warpgroup: Warpgroup, ref: Mapping[str, Any]) -> None:
            at = warpgroup.index(axis)
            body(warpgroup, {key: x.at[at] if key in many else x for key, x in ref.items()})

        results = run(
            lane,
            dict(zip(names, arrays, strict=True)),
            {key: jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for key, x in outputs.items()},
            grid=dict(grid) | {axis: size},
            warpgroups=warpgroups,
            shared=shared,
            counters={key: (size, *shape) for key, shape in counters.items()},
            zeroed=zeroed,
            cost=KernelCost(*(size * part for part in cost)),
            name=name,
            exact=exact,
        )
        return results, [True] * len(results)

    def launched(*arrays: jax.Array) -> list[jax.Array]:
        return call(*arrays)

    launched.__name__ = name
    with jax.enable_x64(False):  # indices are 32-bit
        return differentiated_once(launched)(*operands.values())


class _NoCounters:
    """Counters of an interpreted kernel, whose blocks run one after another."""

    @property
    def at(self) -> "_NoCounters":
        return self

    def __getitem__(self, index: Any) -> "_NoCounters":
        return self


def _allocation(buffer: SharedBuffer | Barriers, interpret: bool) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if isinstance(buffer, Barriers):
        return plgpu.Barrier(num_arrivals=buffer.arrivals, num_barriers=buffer.count)
    if not buffer.tiled or interpret:
        return plgpu.SMEM(buffer.shape, buffer.dtype)
    columns = SWIZZLE // jnp.dtype(buffer.dtype).itemsize
    transforms = (plgpu.TilingTransform((_TILE_ROWS, columns)), plgpu.SwizzleTransform(SWIZZLE))
    return plgpu.SMEM(buffer.shape, buffer.dtype, transforms=transforms)
