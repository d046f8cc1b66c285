"""How the warpgroups of the Hopper kernels share blocks: a ring in shared memory, and the order in which it is filled."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.hopper import ROWS, Barriers, Shared, Warpgroup

# Of the warpgroups of a block two compute, and one fetches for them. Of the 504 registers per thread that the three can
# have together, these are theirs: a tile of 64 × 128 numbers takes 64.
COMPUTING = 2
_COMPUTING_REGISTERS, _FETCHING_REGISTERS = 240, 24
# Bytes of shared memory that a block may have, less what barriers and the compiler take.
SHARED_MEMORY = 232_448 - 6144
_MOST_STAGES = 4

References = Mapping[str, Any]


class Order(NamedTuple):
    """In which order a block goes through those that it sees, `steps` in all: the `whole` ones first, of which it sees
    everything, then those beside them, which have a mask; see `blocks.Ranges`."""

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
        """Which it is."""
        beside = self.first + step - self.whole
        beside = jnp.where(beside < self.full, beside, beside + self.whole)
        return jnp.where(step < self.whole, self.full + step, beside)

    def over(self, step: Callable[[jax.Array, Any, bool], Any], carry: Any) -> Any:
        """step(j, carry, masked) over all steps."""
        carry = lax.fori_loop(0, self.whole, lambda j, carry: step(j, carry, False), carry)
        return lax.fori_loop(self.whole, self.steps, lambda j, carry: step(j, carry, True), carry)


class Ring(NamedTuple):
    """Blocks of several arrays, of each `stages` in shared memory at a time. A place is ready once it has been filled,
    and free again once all that compute have left it.

    Attributes:
      parts: one block of each array.
    """

    stages: int
    parts: Mapping[str, Shared]

    @classmethod
    def filling(cls, parts: Mapping[str, Shared], *others: Shared) -> "Ring":
        """With as many stages as shared memory holds besides the others."""
        room = SHARED_MEMORY - sum(other.bytes for other in others)
        return cls(min(_MOST_STAGES, room // sum(part.bytes for part in parts.values())), parts)

    def shared(self) -> dict[str, Shared | Barriers]:
        """What it takes in shared memory."""
        held: dict[str, Shared | Barriers] = {}
        for name, part in self.parts.items():
            held[f"{name}_ring"] = part._replace(shape=(self.stages, *part.shape))
            held[f"{name}_ready"] = Barriers(self.stages)
            held[f"{name}_free"] = Barriers(self.stages, arrivals=COMPUTING)
        return held

    def fill(
        self, warpgroup: Warpgroup, ref: References, steps: Any, sources: Callable[[jax.Array], Mapping[str, Any]]
    ) -> None:
        """Fetch `sources(step)` of each part, for all steps; what the fetching warpgroup does."""

        def fetch(step: jax.Array, _: None) -> None:
            slot = lax.rem(step, self.stages)
            for name, source in sources(step).items():
                place, ready, free = (ref[f"{name}_{what}"].at[slot] for what in ("ring", "ready", "free"))
                pl.when(step >= self.stages)(lambda free=free: warpgroup.wait(free))
                warpgroup.fetch(source, place, ready)

        lax.fori_loop(0, steps, fetch, None)

    def take(self, warpgroup: Warpgroup, ref: References, name: str, step: jax.Array) -> Any:
        """The block of this step, once it is there."""
        slot = lax.rem(step, self.stages)
        warpgroup.wait(ref[f"{name}_ready"].at[slot])
        return ref[f"{name}_ring"].at[slot]

    def leave(self, warpgroup: Warpgroup, ref: References, step: jax.Array, steps: Any, *names: str) -> None:
        """Free the places of this step, where others are to follow in them."""

        @pl.when(step + self.stages < steps)
        def _() -> None:
            if not all(self.parts[name].tiled for name in names):
                warpgroup.commit()
            for name in names:
                warpgroup.arrive(ref[f"{name}_free"].at[lax.rem(step, self.stages)])


def roles(warpgroup: Warpgroup, fetch: Callable[[], None], compute: Callable[[], None]) -> None:
    """Have each warpgroup do its part."""

    @pl.when(warpgroup.index() == COMPUTING)
    def _() -> None:
        warpgroup.registers(_FETCHING_REGISTERS, more=False)
        fetch()

    @pl.when(warpgroup.index() < COMPUTING)
    def _() -> None:
        warpgroup.registers(_COMPUTING_REGISTERS, more=True)
        compute()


def padded(x: jax.Array, multiple: int, axis: int = 1) -> jax.Array:
    """With zeros to a multiple along an axis: whole blocks are copied."""
    lacking = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, lacking if i == axis else 0) for i in range(x.ndim)]) if lacking else x


def tiled(x: jax.Array, multiple: int) -> jax.Array:
    """What belongs to rows, [..., rows], as [..., tiles, 64]; so many rows are a block."""
    x = padded(x, multiple, x.ndim - 1)
    return x.reshape(*x.shape[:-1], -1, ROWS)
