"""The blocks of keys, values and biases that the Hopper kernels of attention loop over."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.core import tuning
from kernels_pallas.core.hopper.memory import ROWS, SharedBuffer, extent
from kernels_pallas.core.hopper.ring import (
    TWO_CONSUMERS,
    BlockPipeline,
    Consumers,
    PipelineBlocks,
    References,
    padded,
    stages_that_fit,
)
from kernels_pallas.core.hopper.warpgroup import Warpgroup
from kernels_pallas.flash_attention.operands import Operands

_MOST_STAGES = 4


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


def pipeline_of(
    kernel: str,
    operands: Operands,
    rows: int,
    buffers: Callable[[int], Mapping[str, SharedBuffer]],
    own: Mapping[str, SharedBuffer],
    together: bool = False,
    late: tuple[str, ...] = (),
    consumers: Consumers = TWO_CONSUMERS,
) -> BlockPipeline:
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
    return BlockPipeline(chosen, buffers(chosen.rows), together, late, consumers)


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
            name: padded(x, extent(x.shape[1], keys)) for name, x in (("key", operands.key), ("value", operands.value))
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


def bias_of(operands: Operands, queries: int, keys: int) -> jax.Array:
    """Return a bias [B or 1, N or 1, T or 1, S], T and S padded to whole blocks."""
    bias = padded(operands.bias, keys, 3)
    return bias if bias.shape[2] == 1 else padded(bias, queries, 2)


def of_bias(ref: References, b: jax.Array, n: jax.Array) -> Any:
    """Return the bias [T or 1, S] of a head."""
    many_b, many_n = (size > 1 for size in ref["bias"].shape[:2])
    return ref["bias"].at[b if many_b else 0, n if many_n else 0]


def tiled(x: jax.Array, multiple: int, rows: int = ROWS) -> jax.Array:
    """Reshape numbers per row, [..., T], to [..., tiles, rows]; T is padded to a multiple."""
    x = padded(x, multiple, x.ndim - 1)
    return x.reshape(*x.shape[:-1], -1, rows)
