"""The ring of blocks in shared memory through which a producer warpgroup feeds its consumers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.core.hopper.memory import ROWS, SHARED_MEMORY, Barriers, SharedBuffer
from kernels_pallas.core.hopper.warpgroup import Warpgroup

# Registers per thread of a consumer and of the producer, by the number of consumers: they divide the 65,536 of an SM. A
# tile of 64 × 128 numbers takes 64. A single consumer and its producer keep what they start with: two blocks then fit.
_REGISTERS = {2: (240, 24), 3: (160, 32)}

References = Mapping[str, Any]


class Consumers(NamedTuple):
    """The warpgroups of a block that compute, each on ROWS rows; one more loads."""

    count: int

    @property
    def rows(self) -> int:
        """Return the rows of a block."""
        return self.count * ROWS

    @property
    def warpgroups(self) -> int:
        """Return the warpgroups of a block, with the one that loads."""
        return self.count + 1


TWO_CONSUMERS = Consumers(2)


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


def stages_that_fit(own: Mapping[str, SharedBuffer], buffers: Mapping[str, SharedBuffer]) -> int:
    """Return the stages that a pipeline of these buffers may have in the shared memory that `own` leaves."""
    held, taken = (sum(x.bytes for x in arrays.values()) for arrays in (own, buffers))
    return (SHARED_MEMORY - held) // taken


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
