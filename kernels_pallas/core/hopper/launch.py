"""The call of a kernel for Hopper."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import interpretation
from kernels_pallas.core.hopper.memory import Barriers, SharedBuffer, allocation
from kernels_pallas.core.hopper.warpgroup import BLOCK, PREFIX, WARPGROUP, Warpgroup
from kernels_pallas.core.launch import KernelCost, call_warpgroups, differentiated_once, vary

_LANES = "lanes"


def may_be_zeroed(operand: jax.Array) -> bool:
    """Return whether outputs of a kernel with this operand may start at zero.

    They are references, and from JAX 0.12 on no kernel takes one that varies over a mesh (shard_map with check_vma).
    """
    return not jax.typeof(operand).manual_axis_type.varying


def run_kernel(
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

                @pl.when((jax.lax.axis_index(PREFIX + BLOCK) == 0) & (warpgroup.index() == 0))
                def _() -> None:
                    for key in zeroed:
                        named[key][...] = jnp.zeros(named[key].shape, named[key].dtype)

            for key, shape in counters.items():
                named[key] = _NoCounters() if interpret else pl.get_global(plgpu.SemaphoreType.REGULAR(shape))
            pl.run_scoped(
                lambda **buffers: body(warpgroup, named | buffers),
                **{key: allocation(buffer, interpret) for key, buffer in shared.items()},
                collective_axes=PREFIX + WARPGROUP,
            )

        results = call_warpgroups(
            kernel,
            arrays,
            list(shapes.values()),
            zeroed=0 if interpret else len(zeroed),
            blocks=(PREFIX + BLOCK, math.prod(grid.values())),
            warpgroups=(PREFIX + WARPGROUP, warpgroups),
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

        results = run_kernel(
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
