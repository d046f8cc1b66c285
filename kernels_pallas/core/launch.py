"""The one file that knows Pallas's entry points: launches, compiler parameters, cost estimates and interpreters.

Kernels write their bodies with `pl` and, on Hopper, in the language of `hopper`.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import interpretation

# Pallas's backends are imported where a kernel is launched: commands that only count models start without them.

# Warned since JAX 0.11.0, each time a kernel is lowered. Triton is the only way to Ampere and Ada, and works through
# 0.12; tests/kernels/test_launch.py fails once it stops.
DEPRECATED = "The Pallas Triton backend is deprecated"
warnings.filterwarnings("ignore", DEPRECATED, DeprecationWarning)


@functools.cache
def has_triton() -> bool:
    """Return whether this JAX lowers Pallas to Triton: a coming version will not."""
    try:
        return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
    except ValueError:  # a module that `sys.modules` hides
        return False


class KernelCost(NamedTuple):
    """Work of one call: FLOPs (including one per transcendental), transcendentals, and bytes of HBM moved."""

    flops: int = 0
    transcendentals: int = 0
    bytes: int = 0


class KernelCosts(NamedTuple):
    """Costs of an operation, forward and additionally backward."""

    forward: KernelCost
    backward: KernelCost


def size_of(*arrays: Any) -> int:
    """Return the bytes of arrays, or of their shapes and dtypes."""
    return sum(x.size * x.dtype.itemsize for x in arrays if x is not None)


def triton(warps: int, stages: int = 2) -> Any:
    """Return parameters for Triton: `warps` of 32 threads, loops pipelined over `stages`."""
    from jax.experimental.pallas import triton as pltriton

    return pltriton.CompilerParams(num_warps=warps, num_stages=stages)


# Bytes of VMEM that Mosaic grants a kernel that asks for no more, whatever the chip has.
TPU_VMEM = 16 * 2**20


def mosaic_tpu(semantics: Sequence[str], vmem: int = TPU_VMEM) -> Any:
    """Return parameters for Mosaic on TPUs: each axis of the grid is "parallel" or "arbitrary" (in sequence).

    vmem: bytes that the kernel needs, where they are more than any kernel is granted.
    """
    from jax.experimental.pallas import tpu as pltpu

    limit = vmem if vmem > TPU_VMEM else None
    return pltpu.CompilerParams(dimension_semantics=tuple(semantics), vmem_limit_bytes=limit)


def vmem(shape: Sequence[int], dtype: Any) -> Any:
    """Return scratch memory of a Mosaic kernel, which persists from program to program."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.VMEM(tuple(shape), dtype)


def hbm() -> pl.BlockSpec:
    """Return the spec of an operand of a Mosaic kernel that stays in HBM, whole; the kernel copies parts of it."""
    from jax.experimental.pallas import tpu as pltpu

    return pl.BlockSpec(memory_space=pltpu.HBM)


def copy_semaphores(shape: Sequence[int]) -> Any:
    """Return scratch memory of a Mosaic kernel: semaphores that count the bytes which copies have brought."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.SemaphoreType.DMA(tuple(shape))


def copy(source: Any, destination: Any, semaphore: Any) -> Any:
    """Return a copy from one reference of a Mosaic kernel to another, with methods `start` and `wait`."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.make_async_copy(source, destination, semaphore)


def load(ref: Any, mask: jax.Array | None = None, other: float = 0) -> jax.Array:
    """Load from a Triton kernel's reference, `other` where the mask is False: those elements are not read."""
    from jax.experimental.pallas import triton as pltriton

    if ref.dtype == jnp.float8_e4m3fn:
        other = float(other)  # Triton casts no integer to it
    return pltriton.load(ref) if mask is None else pltriton.load(ref, mask=mask, other=other)


def store(ref: Any, value: jax.Array, mask: jax.Array | None = None) -> None:
    """Write a value through a Triton kernel's reference, where the mask is True."""
    from jax.experimental.pallas import triton as pltriton

    pltriton.store(ref, value.astype(ref.dtype), mask=mask)


def inline_ptx(ptx: str, *arguments: Any) -> jax.Array:
    """Apply PTX in a Triton kernel to each number of a tile: $0 is the result and $1 … the arguments, all float32.

    Args:
      arguments: the first is an array; others are arrays of its shape, or broadcast to it.
    """
    from jax.experimental.pallas import triton as pltriton

    shape = arguments[0].shape
    (result,) = pltriton.elementwise_inline_asm(
        ptx,
        args=[jnp.full(shape, x, jnp.float32) for x in arguments],
        constraints=",".join(["=f", *["f"] * len(arguments)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return result


def call(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    params: Any,
    grid: Sequence[int | jax.Array],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    cost: KernelCost,
    name: str,
    scratch: Sequence[Any] = (),
    prefetched: int = 0,
) -> list[jax.Array]:
    """Run a Pallas kernel; return its outputs.

    Args:
      params: the result of `triton` or `mosaic_tpu`.
      grid: on TPUs also of int32 scalars that are known only at run time.
      cost: of the whole call; XLA schedules by it on TPUs, and jaxlm counts it.
      prefetched: the number of leading operands that are scalars, which index maps take after the ids; on TPUs.
      The others are those of `pl.pallas_call`.

    Inside `interpreted` it runs as plain JAX instead, on any platform.
    """
    from jax.experimental.pallas import tpu as pltpu

    late = [size for size in grid if not isinstance(size, int)]
    arguments = vary(*map(_narrow, (*late, *operands)))
    varying = jax.typeof(arguments[0]).manual_axis_type
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying) for x in outputs]

    def run(*arguments: jax.Array) -> list[jax.Array]:
        sizes, operands = iter(arguments[: len(late)]), arguments[len(late) :]
        layout = dict(
            grid=tuple(size if isinstance(size, int) else next(sizes) for size in grid),
            in_specs=list(in_specs),
            out_specs=list(out_specs),
            scratch_shapes=tuple(scratch),
        )
        if prefetched:
            layout = dict(grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=prefetched, **layout))
        call = pl.pallas_call(
            kernel,
            out_shape=shapes,
            **layout,
            compiler_params=params,
            cost_estimate=_estimate(cost),
            name=name,
            interpret=_interpretation_of(params),
        )
        return call(*operands)

    def launched(*arguments: jax.Array) -> list[jax.Array]:
        return batched_first(run, len(late))(*arguments)

    # JAX drops an unused jitted function, but never an unused kernel: without jit, rematerialisation would launch
    # kernels again whose results are saved, and compute their operands.
    launched.__name__ = name
    # Index maps count in 32 bits, the only width that the chips' compilers take.
    with jax.enable_x64(False):
        return jax.jit(differentiated_once(launched))(*arguments)


def call_warpgroups(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    blocks: tuple[str, int],
    warpgroups: tuple[str, int],
    zeroed: int,
    cost: KernelCost,
    name: str,
    exact: bool,
) -> list[jax.Array]:
    """Run a Mosaic GPU kernel; return its outputs. The callers are kernels of `hopper`.

    Args:
      zeroed: how many of the outputs, from the first on, start at zero.
      blocks, warpgroups: axis name and size of the grid, and of the warpgroups of each block.
      cost: of the whole call.
      exact: see `hopper.launch.run_kernel`.

    Inside `interpreted` it runs in Mosaic GPU's interpreter instead, on any platform.
    """
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public since JAX 0.11
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (block_axis, grid), (warpgroup_axis, threads) = blocks, warpgroups
    mode = interpretation.current()
    call = pl.kernel(
        kernel,
        outputs[zeroed:],
        mesh=plgpu.Mesh(
            grid=(grid,),
            grid_names=(block_axis,),
            num_threads=threads,
            thread_name=warpgroup_axis,
            kernel_name=name,
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=not exact,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,  # the default since JAX 0.11
        ),
        cost_estimate=_estimate(cost),
        name=name,
        interpret=InterpretGPUParams(**dict(mode.emulator)) if mode else False,
    )
    if not zeroed:
        return call(*operands)

    def run(refs: list) -> None:
        results = call(*operands, *refs[:zeroed])  # references become arrays that are both operands and results
        for ref, result in zip(refs[zeroed:], results, strict=True):
            ref[...] = result

    return pl.run_state(run)([jnp.zeros(x.shape, x.dtype) for x in outputs])


def _estimate(cost: KernelCost) -> pl.CostEstimate:
    """Return a cost in XLA's terms, which do not count transcendentals among the FLOPs."""
    return pl.CostEstimate(
        flops=cost.flops - cost.transcendentals, transcendentals=cost.transcendentals, bytes_accessed=cost.bytes
    )


def _interpretation_of(params: Any) -> Any:
    """Return how Pallas interprets a kernel with these parameters, or False where it is compiled."""
    from jax.experimental.pallas import tpu as pltpu

    mode = interpretation.current()
    if mode and mode.emulator and isinstance(params, pltpu.CompilerParams):
        return pltpu.InterpretParams(**dict(mode.emulator))
    return mode is not None


def _narrow(x: Any) -> jax.Array:
    """Return an array, converted from float64 to float32: kernels have no float64."""
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if x.dtype == jnp.float64 else x


def widened(x: jax.Array) -> jax.Array:
    """Return an array in float32, or int32 for integers: TPU v4 compares no narrow ones."""
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def batched_first(run: Callable[..., Any], late: int = 0) -> Callable[..., Any]:
    """Return `run` with a rule for `jax.vmap` that moves mapped dimensions to the front, the only place where Mosaic
    takes them.

    If the first `late` operands, which are sizes of the grid, are mapped, the calls run one after the other.
    """
    call = jax.custom_batching.custom_vmap(run)

    @call.def_vmap
    def mapped(size: int, in_batched: Sequence[bool], *operands: jax.Array) -> tuple:
        if size == 0:  # Pallas maps over size zero only when compiled
            alone = (jax.typeof(x) for x in operands)
            one = [x.update(shape=x.shape[batched:]) for x, batched in zip(alone, in_batched, strict=True)]
            results = jax.tree.map(lambda y: jnp.zeros((0, *y.shape), y.dtype), jax.eval_shape(run, *one))
        elif any(in_batched[:late]):
            some = tuple(x for x, batched in zip(operands, in_batched, strict=True) if batched)

            def one(some: tuple) -> Any:
                left = iter(some)
                return call(*(next(left) if batched else x for x, batched in zip(operands, in_batched, strict=True)))

            results = jax.lax.map(one, some)
        else:
            over = jax.vmap(run, in_axes=[0 if batched else None for batched in in_batched], axis_size=size)
            results = batched_first(over, late)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return call


def differentiated_once(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel for use in an operation's first derivative, since Pallas has no second derivative to offer."""
    function = jax.custom_jvp(kernel)

    @function.defjvp
    def refuse(primals: tuple, tangents: tuple) -> None:
        raise NotImplementedError(
            f"{kernel.__name__}: kernels are differentiated once, in reverse mode; implementation='reference' has "
            "derivatives of any kind"
        )

    return function


def vary(*operands: jax.Array | None) -> tuple:
    """Return the operands, each varying over all axes of a surrounding shard_map over which any of them varies.

    JAX itself then sums gradients of replicated operands over those axes (`shard_map(check_vma=True)`).
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands if x is not None))

    def spread(x: jax.Array | None) -> jax.Array | None:
        lacking = () if x is None else tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return jax.lax.pcast(x, lacking, to="varying") if lacking else x

    return tuple(map(spread, operands))
