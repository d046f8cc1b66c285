"""Assemble a program's kernels for NVIDIA GPUs without a GPU, and read the machine code's figures.

These are registers and spills, the width of memory accesses, the matrix-multiply instructions, and the work of the
hot loop.
"""

import contextlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from jaxlm.lowering.assemblers import Assembler, ptxas, tool
from jaxlm.lowering.sass import HotLoop, hot_loops

_KERNEL = re.compile(r"\.entry (\w+)\((.*?)(?=\.entry |\Z)", re.DOTALL)
_THREADS = re.compile(r"\.(?:reqntid|maxntid) (\d+)")
# ld.global.v4.b32, st.global.L1::evict_last.v2.b64, cp.async.cg.shared.global [a], [b], 0x10
_ACCESS = re.compile(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]* \[[^]]*\], \[[^]]*\], (\w+)")
_BULK_COPY = re.compile(r"\bcp\.async\.bulk\.tensor[\w.:]*\.(shared|global)\b")
# Remarks on wgmma: products are serialised (C7513 and its neighbours, by cause), or waits are injected (C7517, C7519).
_REMARK = re.compile(r"\((C75\d\d)\).*? in (?:the )?function '(\w+)'")
# Matrix-multiply instructions, newest generation first: Blackwell, Hopper, Ampere.
_PRODUCTS = ("tcgen05.mma", "wgmma", "mma.sync")
_TILE_BYTES = 2**10  # stands for an access of the copy engine (TMA), which moves whole tiles


class AssembledKernel(NamedTuple):
    """An assembled kernel.

    Attributes:
      assembler: the release of CUDA whose assembler it is from.
      threads: per block.
      registers: per thread, at most 255.
      spilled: bytes per thread that spill from registers to memory.
      reads, writes: bytes that one instruction of a thread reads from or writes to device memory, as the byte-weighted
        median of all such instructions: at most 16, more for the copy engine (TMA), 0 if there are none.
      products: the matrix-multiply instruction: "tcgen05.mma" (Blackwell), "wgmma" (Hopper), "mma.sync" (Ampere and
        later), "" if there is none.
      remarks: numbers of the assembler's remarks on wgmma: each waits for the previous one ("C7513"), or the assembler
        injects waits ("C7517 C7519"); "" if there are none.
      hot: the work of one warp in one iteration of the hot loop.
      needed: the matrix multiply-adds that a warp has to do in that iteration, as `hot` counts them; 0 where there are
        none or it is unknown.
    """

    name: str
    assembler: str
    threads: int
    registers: int
    spilled: int
    reads: int
    writes: int
    products: str
    remarks: str
    hot: HotLoop
    needed: int = 0

    @property
    def done_to_needed(self) -> float | None:
        """Matrix multiply-adds done in relation to those needed, None where either is unknown."""
        return self.hot.multiply_adds / self.needed if self.hot.multiply_adds and self.needed else None


def compile_to_ptx(lowered: jax.stages.Lowered) -> list[str]:
    """Compile a program for NVIDIA GPUs and return the PTX of its kernels, Pallas's and XLA's own.

    Mosaic GPU compiles a kernel once per process, so a kernel that was compiled before is missing.

    Raises XLA's error if it rejects the program.
    """
    with tempfile.TemporaryDirectory(prefix="jaxlm-assembly-") as folder:
        dump(lowered, Path(folder))
        texts = [path.read_text() for path in sorted(Path(folder).glob("*.ptx"))]
    return [text for text in texts if _KERNEL.search(text)]


def dump(lowered: jax.stages.Lowered, folder: Path) -> None:
    """Compile a program for NVIDIA GPUs, and write its kernels' PTX to the folder as `*.ptx`.

    Mosaic GPU's kernels are also written after each compiler pass, as `*.mlir-passes.log`.
    """
    options = {
        "xla_dump_to": str(folder),
        # XLA's default: tests set a lower level, whose machine code differs from production's.
        "xla_backend_optimization_level": 3,
    }
    if jax.__version_info__ >= (0, 11):
        # PTX is written on request only; 0.10 always writes it, and the request makes compiling far slower.
        options["xla_dump_emitter_re"] = "ptx"
    with _mosaic_writes_to(str(folder)):
        lowered.compile(compiler_options=options)


def assemble(ptx: str, assembler: Assembler | None = None) -> list[AssembledKernel]:
    """Assemble the kernels of a PTX text for the chip that it names, by default with XLA's own assembler.

    Raises InputError if the assembler or disassembler is not installed, RuntimeError if it rejects a kernel.
    """
    assembler = assembler or ptxas()
    architecture = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    binary, messages = assembler.run(ptx, architecture)
    with tempfile.NamedTemporaryFile(prefix="jaxlm-assembly-", suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [tool("nvdisasm"), "-c", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    statistics = dict(re.findall(r"entry function '(\w+)'(.*?Used \d+ registers)", messages, re.DOTALL))
    remarks: dict[str, set[str]] = {}
    for remark, name in _REMARK.findall(messages):
        remarks.setdefault(name, set()).add(remark)
    loops = hot_loops(listing)
    return [
        _assembled(
            name, assembler.release, text, statistics[name], " ".join(sorted(remarks.get(name, ()))), loops[name]
        )
        for name, text in _KERNEL.findall(ptx)
    ]


def _assembled(name: str, release: str, ptx: str, statistics: str, remarks: str, hot: HotLoop) -> AssembledKernel:
    spilled, registers = (
        int(re.search(pattern, statistics)[1]) for pattern in (r"(\d+) bytes spill stores", r"Used (\d+) registers")
    )
    accesses = Counter((way, int(bits) // 8 * int(lanes or 1)) for way, lanes, bits in _ACCESS.findall(ptx))
    accesses.update(("ld", int(size, 0)) for size in _COPY.findall(ptx))
    accesses.update(("ld" if to == "shared" else "st", _TILE_BYTES) for to in _BULK_COPY.findall(ptx))
    products = next((name for name in _PRODUCTS if name in ptx), "")
    threads = int(_THREADS.search(ptx)[1])
    reads, writes = (_typical(accesses, way) for way in ("ld", "st"))
    return AssembledKernel(name, release, threads, registers, spilled, reads, writes, products, remarks, hot)


def _typical(accesses: Counter, way: str) -> int:
    """Return the median access size, weighted by bytes."""
    sizes = sorted((size, size * times) for (kind, size), times in accesses.items() if kind == way)
    left = sum(moved for _, moved in sizes) / 2
    for size, moved in sizes:
        left -= moved
        if left <= 0:
            return size
    return 0


@contextlib.contextmanager
def _mosaic_writes_to(folder: str) -> Iterator[None]:
    """Make Mosaic GPU, which compiles apart from XLA, write its output to the folder."""
    name = "MOSAIC_GPU_DUMP_TO"
    before = os.environ.get(name)
    os.environ[name] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
