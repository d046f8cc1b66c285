"""Calls of Pallas kernels, compiled for an NVIDIA GPU that is absent and emulated."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from machine_code import machine, ptx
from machine_code.tensor_maps import TensorMap

from jaxlm.lowering.assembly import dump

_TRITON = re.compile(
    r"grid_x = (\d+) : i32, grid_y = (\d+) : i32, grid_z = (\d+) : i32.*?name = \"(\w+)\", num_stages", re.DOTALL
)


class KernelCall(NamedTuple):
    """A kernel and its launch.

    Attributes:
      results: shapes and dtypes.
      parameters: see `machine.run`.
      counters: number of counters that its blocks share, initially 0.
      sums: see `machine.run`.
    """

    kernel: ptx.PtxKernel
    grid: tuple[int, int, int]
    results: tuple[jax.ShapeDtypeStruct, ...]
    parameters: tuple[int | Mapping[int, TensorMap], ...] | None = None
    counters: int = 0
    sums: Mapping[int, int] = MappingProxyType({})

    def run(self, *operands: Any, late: bool = True) -> list[np.ndarray]:
        """Run the kernel and return its results; raises what `machine.run` does."""
        if self.counters:
            operands = (*operands, np.zeros(self.counters, np.int32))
        return machine.run(
            self.kernel,
            self.grid,
            operands,
            self.results,
            self.parameters,
            late,
            counters=int(self.counters > 0),
            sums=self.sums,
        )


def compile_call(lowered: jax.stages.Lowered) -> KernelCall:
    """Compile a program that is one call of a Pallas kernel, by Triton or Mosaic GPU, on the program's operands.

    Raises ValueError for any other program; the compiler's errors where it refuses the kernel; RuntimeError for a
    kernel by Mosaic GPU that this process compiled before other than by this function.
    """
    text = lowered.as_text()
    counters = _require_one_call(text)
    if text not in _BY_MOSAIC:
        call = _compile(lowered, counters)
        if call.parameters is None:
            return call
        _BY_MOSAIC[text] = call
    return _BY_MOSAIC[text]


_CALL = re.compile(r"%(\d+)(?::\d+)? = (?:call|stablehlo\.custom_call) @[\w$.]+\((.*?)\)")
# Counters that Mosaic GPU passes to its kernels.
_ZEROS = re.compile(
    r"^ *(%\w+) = stablehlo\.constant dense<0> : tensor<i32>.*\n"
    r" *(%\w+) = stablehlo\.broadcast_in_dim \1, dims = \[\] : \(tensor<i32>\) -> tensor<(\d+)xi32>.*\n",
    re.MULTILINE,
)
_OTHER = re.compile(r"^\s*(?:%\S+ = )?(?!call |stablehlo\.custom_call|return |func\.)([a-z]\w*\.\w+)", re.MULTILINE)


def _require_one_call(text: str) -> int:
    """Return how many counters a program passes to its kernel.

    Raises ValueError unless each function passes all its arguments to one call and returns its results.
    """
    text = re.sub(r'"[^"]*"', '""', text)  # drop the kernels themselves
    counters = 0
    if "@mosaic_gpu" in text and "output_operand_alias" in text and (zeros := _ZEROS.search(text)):
        text = text.replace(zeros[0], "").replace(f", {zeros[2]})", ")")
        counters = int(zeros[3])
    calls = [operands.split(", ") for _, operands in _CALL.findall(text)]
    if text.count("stablehlo.custom_call @") != 1 or text.count("func.func") != len(calls):
        raise ValueError("the program is not one call of a Pallas kernel")
    if other := set(_OTHER.findall(text)) - {"sdy.mesh"}:
        raise ValueError(f"the program does more than call a Pallas kernel: {', '.join(sorted(other))}")
    if any(operands != [f"%arg{i}" for i in range(len(operands))] for operands in calls):
        raise ValueError("the operands of the Pallas kernel are not those of the program, in their order")
    return counters


# Mosaic GPU compiles each kernel once in a process.
_BY_MOSAIC: dict[str, KernelCall] = {}


def _compile(lowered: jax.stages.Lowered, counters: int) -> KernelCall:
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(lowered.out_info))
    with tempfile.TemporaryDirectory(prefix="jaxlm-emulation-") as folder:
        dump(lowered, Path(folder))
        texts = [path.read_text() for path in Path(folder).glob("*.ptx")]
        logs = [path.read_text() for path in Path(folder).glob("*.mlir-passes.log")]
    kernels = [kernel for text in texts for kernel in ptx.kernels(text)]
    if logs:
        (kernel,) = (kernel for kernel in kernels if kernel.name.endswith("_mosaic_gpu_kernel"))
        operands = jax.tree.leaves(lowered.in_avals)
        count = [jax.ShapeDtypeStruct((counters,), np.int32)] if counters else []
        passed = [*operands, *count, *results, *count]
        grid, parameters = _launch(logs[0], [x.dtype for x in passed])
        aliases = _aliases(lowered.as_text())  # both an operand and a result, in one buffer
        sums = {result: operand for operand, result in aliases.items() if operand < len(operands)}
        buffers = {operand: len(operands) + len(count) + result for result, operand in sums.items()}
        if counters:
            buffers[len(passed) - 1] = len(operands)
        return KernelCall(kernel, grid, results, _with_buffers(parameters, buffers), counters, sums)
    launch = _TRITON.search(lowered.as_text())
    if launch is None:
        raise RuntimeError("Mosaic GPU compiled this kernel earlier in this process and wrote nothing now")
    *grid, name = launch.groups()
    (kernel,) = (kernel for kernel in kernels if kernel.name == name)
    return KernelCall(kernel, tuple(map(int, grid)), results)


def _aliases(text: str) -> dict[int, int]:
    """Return the operands of the program's call that are also results, by index."""
    pairs = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", text)
    return {int(operand): int(result or 0) for result, operand in pairs}


def _with_buffers(parameters: tuple, buffers: Mapping[int, int]) -> tuple:
    """Return parameters of `_launch` with other indices of arrays."""

    def of(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {offset: known._replace(array=buffers.get(known.array, known.array)) for offset, known in x.items()}
        return buffers.get(x, x)

    return tuple(map(of, parameters))


# Before this pass of Mosaic GPU, the host code of a launch is constants, pointers and tensor maps only.
_LAUNCH_IS_KNOWN = "// -----// IR Dump Before GpuLaunchLoweringPass"
_CONSTANT = re.compile(r"llvm\.mlir\.constant\((-?\d+) : \w+\)")
_POINTER = re.compile(r"llvm\.getelementptr (%\w+)\[(\d+)\]")
_STORE = re.compile(r"(?:llvm|memref)\.store (%\w+), (%\w+)(?:\[(%\w+)\])?")
_MAP = re.compile(r"call @mosaic_gpu_init_tma_desc\((.*?)\)")
_OPERAND = re.compile(r"%\w+")


class _HostAddress(NamedTuple):
    """An address in host memory: the number of the allocation, and an offset."""

    number: int
    offset: int


class _ArrayData(NamedTuple):
    """The data of an operand or a result."""

    index: int


class _PointerAddress(NamedTuple):
    """The address of the pointer to an operand or a result."""

    index: int


def _launch(log: str, dtypes: Sequence[np.dtype]) -> tuple[tuple[int, int, int], tuple]:
    """Return the grid and the parameters of a kernel by Mosaic GPU, read from its host function.

    dtypes: of the operands and results, in order.
    """
    host = log[log.index(_LAUNCH_IS_KNOWN) :]
    host = host[host.index("func.func @") :]
    stream, pointers = re.search(r"\((%\w+): .*?, (%\w+): ", host).groups()
    values: dict[str, Any] = {stream: None, pointers: _PointerAddress(0)}
    held: dict[_HostAddress, Any] = {}  # integers and tensor maps by address
    for line in host.splitlines():
        target, _, operation = line.strip().partition(" = ") if line.strip().startswith("%") else ("", "", line.strip())
        if found := _CONSTANT.match(operation):
            values[target] = int(found[1])
        elif operation.startswith(("llvm.alloca", "memref.alloca")):
            values[target] = _HostAddress(len(values), 0)
        elif found := _POINTER.match(operation):
            base, by = values[found[1]], int(found[2])
            values[target] = base._replace(index=by) if isinstance(base, _PointerAddress) else base._replace(offset=by)
        elif found := _STORE.match(operation):
            place = values[found[2]]
            held[place._replace(offset=values[found[3]]) if found[3] else place] = values[found[1]]
        elif found := _MAP.match(operation):
            place, data, _, rank, shape, strides, swizzle, box = (values[x] for x in _OPERAND.findall(found[1]))
            each = ([held[at._replace(offset=i)] for i in range(rank)] for at in (shape, strides, box))
            held[place] = TensorMap(data.index, dtypes[data.index], *map(tuple, each), swizzle)
        elif operation.startswith("gpu.launch_func"):
            blocks, arguments = re.search(r"blocks in \((.*?)\).* args\((.*)\)", operation).groups()
            passed = [values[x] for x in _OPERAND.findall(arguments)]
            return tuple(values[x] for x in _OPERAND.findall(blocks)), tuple(
                x.index
                if isinstance(x, _ArrayData)
                else {at.offset: known for at, known in held.items() if at.number == x.number}
                for x in passed
            )
        elif target:  # whatever is derived from a pointer starts where it points
            known = [values[x] for x in _OPERAND.findall(operation) if x in values]
            first = next((x for x in known if isinstance(x, _ArrayData | _PointerAddress | _HostAddress)), None)
            if first is None and operation.startswith(("builtin.unrealized_conversion_cast", "arith.index_cast")):
                first = known[0]
            values[target] = _ArrayData(first.index) if isinstance(first, _PointerAddress) else first
    raise RuntimeError("the dump of Mosaic GPU contains no launch")
