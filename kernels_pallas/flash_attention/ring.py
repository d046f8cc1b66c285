"""How the warpgroups of the Hopper kernels share blocks: a ring in shared memory, and in which order it is filled."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.core import tuning
from kernels_pallas.core.hopper import ROWS, Barriers, SharedBuffer, Warpgroup
from kernels_pallas.flash_attention.operands import Operands

# Of the warpgroups of a block two compute, and one fetches for them. Of the 504 registers per thread that the three can
# have together, these are theirs: a tile of 64 × 128 numbers takes 64.
COMPUTING = 2
QUERIES = COMPUTING * ROWS
# A row of a tile in shared memory is so many numbers of two bytes: widths of heads are multiples.
TILE = 64
_COMPUTING_REGISTERS, _FETCHING_REGISTERS = 240, 24
# Bytes of shared memory that a block may have, less what barriers and the compiler take.
SHARED_MEMORY = 232_448 - 6144
_MOST_STAGES = 4

References = Mapping[str, Any]


class BlockOrder(NamedTuple):
    """In which order a block goes through those that it sees, `steps` in all: the `whole` ones first, of which it sees
    everything, then those beside them, which have a mask; see `blocks.BlockRanges`."""

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

    def at_least_one(self) -> "BlockOrder":
        """The same, or where nothing is seen, from 0 up to 0, the first block, of which a mask hides everything."""
        return self._replace(last=jnp.maximum(self.last, 1))

    def over(self, step: Callable[[jax.Array, Any, bool], Any], carry: Any, begin: int = 0) -> Any:
        """step(j, carry, masked) over the steps from `begin` on."""
        carry = lax.fori_loop(begin, self.whole, lambda j, carry: step(j, carry, False), carry)
        return lax.fori_loop(jnp.maximum(begin, self.whole), self.steps, lambda j, carry: step(j, carry, True), carry)


class RingBlocks(NamedTuple):
    """What a kernel goes through: blocks of so many rows, `stages` of them in shared memory."""

    rows: int
    stages: int


class Ring(NamedTuple):
    """Blocks of several arrays, of each `stages` in shared memory at a time. A place is ready once it has been filled,
    and free again once all that compute have left it.

    Attributes:
      blocks: their sizes.
      parts: one block of each array.
      together: whether all blocks of a step are waited for and left at once, by one barrier; else each by its own.
    """

    blocks: RingBlocks
    parts: Mapping[str, SharedBuffer]
    together: bool

    @classmethod
    def of(
        cls,
        kernel: str,
        operands: Operands,
        rows: int,
        parts: Callable[[int], Mapping[str, SharedBuffer]],
        own: Mapping[str, SharedBuffer],
        together: bool = False,
    ) -> "Ring":
        """Of a kernel that has arrays of its `own` besides: with blocks that were measured to be fastest, or of so many
        rows (0 for no choice) and with as many stages as shared memory holds."""
        default = RingBlocks(rows, min(_MOST_STAGES, fit(own, parts(rows))))
        _, T, S, _, _, H, V = operands.sizes
        kernel = f"flash_attention_{kernel}"
        blocks = tuning.blocks(kernel, "mosaic_gpu", (T, S, H, V), operands.query.dtype, default)
        # They may have been measured with other widths, or without a bias: `rows` are what registers hold.
        blocks = blocks._replace(rows=min(blocks.rows, rows))
        blocks = blocks._replace(stages=min(blocks.stages, fit(own, parts(blocks.rows))))
        chosen = blocks if blocks.stages else default
        return cls(chosen, parts(chosen.rows), together)

    @property
    def stages(self) -> int:
        return self.blocks.stages

    def shared(self) -> dict[str, SharedBuffer | Barriers]:
        """What it takes in shared memory."""
        held: dict[str, SharedBuffer | Barriers] = {
            f"{name}_ring": part._replace(shape=(self.stages, *part.shape)) for name, part in self.parts.items()
        }
        for group, members in self._groups.items():
            held[f"{group}_ready"] = Barriers(self.stages, arrivals=len(members))
            held[f"{group}_free"] = Barriers(self.stages, arrivals=COMPUTING)
        return held

    @property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        """By the name of its barriers, which parts come and go at once."""
        return {"ring": tuple(self.parts)} if self.together else {name: (name,) for name in self.parts}

    def _groups_of(self, names: tuple[str, ...]) -> list[str]:
        """Those that parts are the members of; ValueError where they are not all members of one."""
        groups = [group for group, members in self._groups.items() if set(members) <= set(names)]
        if {member for group in groups for member in self._groups[group]} != set(names):
            raise ValueError(f"{', '.join(self.parts)} come and go together, not {', '.join(names)} alone")
        return groups

    def fill(
        self,
        warpgroup: Warpgroup,
        ref: References,
        steps: Any,
        sources: Callable[[jax.Array], Mapping[str, Any]],
        beside: Sequence["Ring"] = (),
        behind: Callable[[jax.Array, Callable[[], None]], None] | None = None,
    ) -> None:
        """Fetch `sources(step)` of each part, its own and of the rings `beside` it, for all steps; what the fetching
        warpgroup does. behind(step, fetch_next) is called once some steps more have been fetched, as many as there are
        places, and has to call fetch_next; those who compute may wait for it three steps later."""

        def fetch(step: jax.Array) -> None:
            coming = sources(step)
            for ring in (self, *beside):
                slot = lax.rem(step, ring.stages)
                for group, members in ring._groups.items():
                    free = ref[f"{group}_free"].at[slot]
                    pl.when(step >= ring.stages)(lambda free=free: warpgroup.wait(free))
                    for name in members:
                        warpgroup.fetch(coming[name], ref[f"{name}_ring"].at[slot], ref[f"{group}_ready"].at[slot])

        # A place beside is left in a step that begins only when what was behind the step three before is done.
        ahead = 1 + min([self.stages, *(ring.stages + 2 for ring in beside if ring.parts)])

        def both(step: jax.Array) -> None:
            fetch_next = functools.partial(pl.when(step < steps), lambda: fetch(step))
            pl.when(step < ahead)(fetch_next)
            pl.when(step >= ahead)(lambda: behind(step - ahead, fetch_next))

        count, turn = (steps, fetch) if behind is None else (steps + ahead, both)
        lax.fori_loop(0, count, lambda step, _: turn(step), None)

    def take(self, warpgroup: Warpgroup, ref: References, step: jax.Array, *names: str) -> tuple:
        """Blocks of this step, once they are there."""
        for group in self._groups_of(names):
            warpgroup.wait(ref[f"{group}_ready"].at[lax.rem(step, self.stages)])
        return self.places(ref, step, *names)

    def places(self, ref: References, step: jax.Array, *names: str) -> tuple:
        """Blocks of this step, which have been taken."""
        return tuple(ref[f"{name}_ring"].at[lax.rem(step, self.stages)] for name in names)

    def leave(
        self, warpgroup: Warpgroup, ref: References, step: jax.Array, steps: Any, *names: str, loaded: bool = False
    ) -> None:
        """Free the places of this step, where others are to follow in them; `loaded` says that not only wgmma read."""

        @pl.when(step + self.stages < steps)
        def _() -> None:
            if loaded:
                warpgroup.commit()
            for group in self._groups_of(names):
                warpgroup.arrive(ref[f"{group}_free"].at[lax.rem(step, self.stages)])


class KeyBlocks(NamedTuple):
    """The blocks of keys that a block of queries goes through, with their values and the bias of both."""

    operands: Operands

    def parts(self, keys: int) -> dict[str, SharedBuffer]:
        """Of a ring."""
        H, V = self.operands.sizes[5:]
        dtype, bias = self.operands.query.dtype, self.operands.bias
        parts = {"key": SharedBuffer((keys, H), dtype, tiled=True)}
        if bias is not None:
            shape = (QUERIES, keys) if self.biased else (keys,)
            parts["bias"] = SharedBuffer(shape, bias.dtype, tiled=self.biased)
        return parts | {"value": SharedBuffer((keys, V), dtype, tiled=True)}

    @property
    def biased(self) -> bool:
        """Whether each query has a bias of its own."""
        return self.operands.bias is not None and self.operands.bias.shape[2] > 1

    def inputs(self, keys: int) -> dict[str, jax.Array]:
        """Arrays of a kernel."""
        operands = self.operands
        inputs = {"key": padded(operands.key, keys), "value": padded(operands.value, keys)}
        if operands.bias is not None:
            inputs["bias"] = bias_of(operands, QUERIES, keys)
        return inputs

    def sources(self, ref: References, b: jax.Array, n: jax.Array, i: jax.Array, block: jax.Array, keys: int) -> dict:
        """What is fetched for a block of queries and one of keys."""
        N, K = self.operands.sizes[3:5]
        at, k = pl.ds(block * keys, keys), lax.div(n, N // K)
        sources = {"key": ref["key"].at[b, at, k]}
        if self.operands.bias is not None:
            sources["bias"] = of_bias(ref, b, n).at[pl.ds(i * QUERIES, QUERIES) if self.biased else 0, at]
        return sources | {"value": ref["value"].at[b, at, k]}

    def bias(self, warpgroup: Warpgroup, ref: References, ring: Ring, step: jax.Array, steps: Any) -> jax.Array | None:
        """Of this warpgroup's scores [ROWS, keys], taken from a ring and left."""
        if self.operands.bias is None:
            return None
        (place,) = ring.take(warpgroup, ref, step, "bias")
        if self.biased:
            bias = warpgroup.load_tile(place.at[pl.ds(warpgroup.index() * ROWS, ROWS)])
        else:
            bias = warpgroup.down(warpgroup.load_by_column(place), ROWS)
        ring.leave(warpgroup, ref, step, steps, "bias", loaded=True)
        return bias


def fit(own: Mapping[str, SharedBuffer], parts: Mapping[str, SharedBuffer]) -> int:
    """How many places a ring of these parts may have in what shared memory is left of."""
    held, taken = (sum(x.bytes for x in arrays.values()) for arrays in (own, parts))
    return (SHARED_MEMORY - held) // taken


def bias_of(operands: Operands, queries: int, keys: int) -> jax.Array:
    """A bias [B or 1, N or 1, T or 1, S], T and S padded to whole blocks."""
    bias = padded(operands.bias, keys, 3)
    return bias if bias.shape[2] == 1 else padded(bias, queries, 2)


def of_bias(ref: References, b: jax.Array, n: jax.Array) -> Any:
    """The bias [T or 1, S] of a head."""
    many_b, many_n = (size > 1 for size in ref["bias"].shape[:2])
    return ref["bias"].at[b if many_b else 0, n if many_n else 0]


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


def tiled(x: jax.Array, multiple: int, rows: int = ROWS) -> jax.Array:
    """What belongs to rows, [..., T], as [..., tiles, rows]; T is padded to a multiple."""
    x = padded(x, multiple, x.ndim - 1)
    return x.reshape(*x.shape[:-1], -1, rows)
