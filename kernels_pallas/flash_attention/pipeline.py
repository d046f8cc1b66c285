"""The ring of blocks in shared memory through which a producer warpgroup of the Hopper kernels feeds its consumers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.core import hopper, tuning
from kernels_pallas.core.hopper import ROWS, Barriers, SharedBuffer, Warpgroup
from kernels_pallas.flash_attention.operands import Operands

# Two-byte numbers in a row of a tile in shared memory: head dims are multiples.
TILE = 64
# Registers per thread of a consumer and of the producer, by the number of consumers: they divide the 65,536 of an SM. A
# tile of 64 × 128 numbers takes 64. A single consumer and its producer keep what they start with: two blocks then fit.
_REGISTERS = {2: (240, 24), 3: (160, 32)}
# Bytes of shared memory that a block may have, less those for barriers and the compiler.
SHARED_MEMORY = 232_448 - 6144
_MOST_STAGES = 4

References = Mapping[str, Any]


class Consumers(NamedTuple):
    """The warpgroups of a block that compute, each on ROWS queries or keys; one more loads."""

    count: int

    @property
    def rows(self) -> int:
        """Return the queries or keys of a block."""
        return self.count * ROWS

    @property
    def warpgroups(self) -> int:
        """Return the warpgroups of a block, with the one that loads."""
        return self.count + 1


TWO_CONSUMERS = Consumers(2)


class BlockOrder(NamedTuple):
    """The order in which a block of the grid visits its unmasked blocks, in `steps`.

    The `whole` blocks, which are fully unmasked, come first, then the partial ones, which need a mask; see
    `blocks.BlockRanges`.
    """

    first: jax.Array
    full: jax.Array
    full_end: jax.Array
    last: jax.Array

    @property
    def whole(self) -> jax.Array:
        return self.full_end - self.full

    @property
    def steps(self) -> jax.Array:
        return self.last - self.first

    def block(self, step: jax.Array) -> jax.Array:
        """Return the block of a step."""
        partial = self.first + step - self.whole
        partial = jnp.where(partial < self.full, partial, partial + self.whole)
        return jnp.where(step < self.whole, self.full + step, partial)

    def at_least_one(self) -> "BlockOrder":
        """Return the same order, or, if it is empty, one step on the first block, fully masked."""
        return self._replace(last=jnp.maximum(self.last, 1))

    def over(self, step: Callable[[jax.Array, Any, bool], Any], carry: Any, begin: int = 0) -> Any:
        """Run step(j, carry, masked) over the steps from `begin` on; return the last carry."""
        carry = lax.fori_loop(begin, self.whole, lambda j, carry: step(j, carry, False), carry)
        return lax.fori_loop(jnp.maximum(begin, self.whole), self.steps, lambda j, carry: step(j, carry, True), carry)


class PipelineBlocks(NamedTuple):
    """Sizes of a pipeline: blocks of `rows` rows, `stages` of them in shared memory."""

    rows: int
    stages: int


class BlockPipeline(NamedTuple):
    """A ring of blocks of several arrays, `stages` of each in shared memory at a time.

    A slot is ready once the producer has filled it, and free once all consumers have released it.

    Attributes:
      blocks: their sizes.
      buffers: one block of each array.
      together: whether one barrier serves all blocks of a step; otherwise each has its own.
      late: the buffers whose blocks consumers need after the other blocks of the next step. They are loaded in that
        order.
      consumers: those that release the slots.
    """

    blocks: PipelineBlocks
    buffers: Mapping[str, SharedBuffer]
    together: bool = False
    late: tuple[str, ...] = ()
    consumers: Consumers = TWO_CONSUMERS

    @classmethod
    def of(
        cls,
        kernel: str,
        operands: Operands,
        rows: int,
        buffers: Callable[[int], Mapping[str, SharedBuffer]],
        own: Mapping[str, SharedBuffer],
        together: bool = False,
        late: tuple[str, ...] = (),
        consumers: Consumers = TWO_CONSUMERS,
    ) -> "BlockPipeline":
        """Return the pipeline of a kernel that also has arrays of its `own` in shared memory.

        It has the tuned blocks, or else blocks of `rows` rows (0 for no choice) and the stages that fit in memory.
        """
        default = PipelineBlocks(rows, min(_MOST_STAGES, stages_that_fit(own, buffers(rows))))
        _, T, S, _, _, H, V = operands.sizes
        kernel = f"flash_attention_{kernel}"
        blocks = tuning.blocks(kernel, "mosaic_gpu", (T, S, H, V), operands.query.dtype, default)
        # The measured sizes may come from other widths, or no bias: registers hold only `rows`.
        blocks = blocks._replace(rows=min(blocks.rows, rows))
        blocks = blocks._replace(stages=min(blocks.stages, stages_that_fit(own, buffers(blocks.rows))))
        chosen = blocks if blocks.stages else default
        return cls(chosen, buffers(chosen.rows), together, late, consumers)

    @property
    def stages(self) -> int:
        return self.blocks.stages

    def shared(self) -> dict[str, SharedBuffer | Barriers]:
        """Return its buffers and barriers in shared memory, by name."""
        allocations: dict[str, SharedBuffer | Barriers] = {
            f"{name}_ring": buffer._replace(shape=(self.stages, *buffer.shape)) for name, buffer in self.buffers.items()
        }
        for group, members in self._groups.items():
            allocations[f"{group}_ready"] = Barriers(self.stages, arrivals=len(members))
            allocations[f"{group}_free"] = Barriers(self.stages, arrivals=self.consumers.count)
        return allocations

    @property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        """The buffers that share barriers, by the name of the barriers."""
        return {"ring": tuple(self.buffers)} if self.together else {name: (name,) for name in self.buffers}

    def _groups_of(self, names: tuple[str, ...]) -> list[str]:
        """Return the groups of these buffers; raise ValueError where they are not whole groups."""
        groups = [group for group, members in self._groups.items() if set(members) <= set(names)]
        if {member for group in groups for member in self._groups[group]} != set(names):
            raise ValueError(
                f"{', '.join(self.buffers)} share a barrier; wait for all of them, not {', '.join(names)} alone"
            )
        return groups

    def producer_loop(
        self,
        warpgroup: Warpgroup,
        ref: References,
        steps: Any,
        sources: Callable[[jax.Array], Mapping[str, Any]],
        others: Sequence["BlockPipeline"] = (),
        trailing: Callable[[jax.Array, Callable[[], None]], None] | None = None,
    ) -> None:
        """Run the producer's loop: load `sources(step)` of each buffer, of this pipeline and `others`, for all steps.

        Args:
          trailing: trailing(step, load_next) is called once the slots hold the steps after `step`, and has to call
            load_next; consumers may wait for it three steps later. Then no buffer is `late`.
        """

        def load(step: jax.Array, late: bool = False) -> None:
            coming = sources(step)
            for pipeline in (self, *others):
                slot = lax.rem(step, pipeline.stages)
                for group, members in pipeline._groups.items():
                    if (group in pipeline.late) != late:
                        continue
                    free = ref[f"{group}_free"].at[slot]
                    pl.when(step >= pipeline.stages)(lambda free=free: warpgroup.wait(free))
                    for name in members:
                        warpgroup.tma_load(coming[name], ref[f"{name}_ring"].at[slot], ref[f"{group}_ready"].at[slot])

        # A slot of another pipeline is released in a step that starts when the trailing work three steps before ends.
        ahead = 1 + min([self.stages, *(pipeline.stages + 2 for pipeline in others if pipeline.buffers)])

        def load_and_trail(step: jax.Array) -> None:
            load_next = functools.partial(pl.when(step < steps), lambda: load(step))
            pl.when(step < ahead)(load_next)
            pl.when(step >= ahead)(lambda: trailing(step - ahead, load_next))

        def load_in_order(step: jax.Array) -> None:
            pl.when(step < steps)(lambda: load(step))
            pl.when(step > 0)(lambda: load(step - 1, late=True))

        count, body = (steps + 1, load_in_order) if trailing is None else (steps + ahead, load_and_trail)
        lax.fori_loop(0, count, lambda step, _: body(step), None)

    def consumer_wait(self, warpgroup: Warpgroup, ref: References, step: jax.Array, *names: str) -> tuple:
        """Wait for the blocks of this step; return their slots."""
        for group in self._groups_of(names):
            warpgroup.wait(ref[f"{group}_ready"].at[lax.rem(step, self.stages)])
        return self.slots(ref, step, *names)

    def slots(self, ref: References, step: jax.Array, *names: str) -> tuple:
        """Return the slots of this step, after `consumer_wait`."""
        return tuple(ref[f"{name}_ring"].at[lax.rem(step, self.stages)] for name in names)

    def consumer_release(
        self, warpgroup: Warpgroup, ref: References, step: jax.Array, steps: Any, *names: str, loaded: bool = False
    ) -> None:
        """Release the slots of this step if later steps need them; `loaded`: registers were loaded from them too."""

        @pl.when(step + self.stages < steps)
        def _() -> None:
            if loaded:
                warpgroup.commit()
            for group in self._groups_of(names):
                warpgroup.arrive(ref[f"{group}_free"].at[lax.rem(step, self.stages)])


class KeyBlocks(NamedTuple):
    """The blocks of keys that a block of queries loops over, with their values and the bias of both."""

    operands: Operands
    queries: int = TWO_CONSUMERS.rows

    def buffers(self, keys: int) -> dict[str, SharedBuffer]:
        """Return the buffers of a pipeline."""
        H, V = self.operands.sizes[5:]
        dtype, bias = self.operands.query.dtype, self.operands.bias
        buffers = {"key": SharedBuffer((keys, H), dtype, tiled=True)}
        if bias is not None:
            shape = (self.queries, keys) if self.biased else (keys,)
            buffers["bias"] = SharedBuffer(shape, bias.dtype, tiled=self.biased)
        return buffers | {"value": SharedBuffer((keys, V), dtype, tiled=True)}

    @property
    def biased(self) -> bool:
        """Return whether each query has its own bias."""
        return self.operands.bias is not None and self.operands.bias.shape[2] > 1

    def inputs(self, keys: int) -> dict[str, jax.Array]:
        """Return the arrays of a kernel."""
        operands = self.operands
        inputs = {
            name: padded(x, hopper.extent(x.shape[1], keys))
            for name, x in (("key", operands.key), ("value", operands.value))
        }
        if operands.bias is not None:
            inputs["bias"] = bias_of(operands, self.queries, keys)
        return inputs

    def sources(self, ref: References, b: jax.Array, n: jax.Array, i: jax.Array, block: jax.Array, keys: int) -> dict:
        """Return the arrays to load for a block of queries and a block of keys."""
        N, K = self.operands.sizes[3:5]
        at, k = pl.ds(block * keys, keys), lax.div(n, N // K)
        sources = {"key": ref["key"].at[b, at, k]}
        if self.operands.bias is not None:
            sources["bias"] = of_bias(ref, b, n).at[pl.ds(i * self.queries, self.queries) if self.biased else 0, at]
        return sources | {"value": ref["value"].at[b, at, k]}

    def bias(
        self,
        warpgroup: Warpgroup,
        ref: References,
        pipeline: BlockPipeline,
        step: jax.Array,
        steps: Any,
    ) -> jax.Array | None:
        """Return the bias of this warpgroup's scores [ROWS, keys], from a slot of the pipeline, then released."""
        if self.operands.bias is None:
            return None
        (slot,) = pipeline.consumer_wait(warpgroup, ref, step, "bias")
        if self.biased:
            bias = warpgroup.load_tile(slot.at[pl.ds(warpgroup.index() * ROWS, ROWS)])
        else:
            bias = warpgroup.broadcast_by_column(warpgroup.load_by_column(slot), ROWS)
        pipeline.consumer_release(warpgroup, ref, step, steps, "bias", loaded=True)
        return bias


def stages_that_fit(own: Mapping[str, SharedBuffer], buffers: Mapping[str, SharedBuffer]) -> int:
    """Return the stages that a pipeline of these buffers may have in the shared memory that `own` leaves."""
    held, taken = (sum(x.bytes for x in arrays.values()) for arrays in (own, buffers))
    return (SHARED_MEMORY - held) // taken


def bias_of(operands: Operands, queries: int, keys: int) -> jax.Array:
    """Return a bias [B or 1, N or 1, T or 1, S], T and S padded to whole blocks."""
    bias = padded(operands.bias, keys, 3)
    return bias if bias.shape[2] == 1 else padded(bias, queries, 2)


def of_bias(ref: References, b: jax.Array, n: jax.Array) -> Any:
    """Return the bias [T or 1, S] of a head."""
    many_b, many_n = (size > 1 for size in ref["bias"].shape[:2])
    return ref["bias"].at[b if many_b else 0, n if many_n else 0]


def warp_specialize(
    warpgroup: Warpgroup, consumers: Consumers, produce: Callable[[], None], consume: Callable[[], None]
) -> None:
    """Run `produce` on the last warpgroup and `consume` on the others, each with its share of the registers."""
    of_consumer, of_producer = _REGISTERS.get(consumers.count, (None, None))

    @pl.when(warpgroup.index() == consumers.count)
    def _() -> None:
        if of_producer:
            warpgroup.setmaxnreg(of_producer, more=False)
        produce()

    @pl.when(warpgroup.index() < consumers.count)
    def _() -> None:
        if of_consumer:
            warpgroup.setmaxnreg(of_consumer, more=True)
        consume()


def padded(x: jax.Array, multiple: int, axis: int = 1) -> jax.Array:
    """Pad with zeros to a multiple along an axis: whole blocks are copied."""
    lacking = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, lacking if i == axis else 0) for i in range(x.ndim)]) if lacking else x


def tiled(x: jax.Array, multiple: int, rows: int = ROWS) -> jax.Array:
    """Reshape numbers per row, [..., T], to [..., tiles, rows]; T is padded to a multiple."""
    x = padded(x, multiple, x.ndim - 1)
    return x.reshape(*x.shape[:-1], -1, rows)
