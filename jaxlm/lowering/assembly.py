"""What NVIDIA's assembler makes of a program's kernels, without a chip: registers and what does not fit in them, how
memory is read and written, by which instructions matrices are multiplied, and what the innermost loop asks of an SM."""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from jaxlm.core.errors import InputError
from jaxlm.lowering.sass import Hot, hottest

_KERNEL = re.compile(r"\.entry (\w+)\((.*?)(?=\.entry |\Z)", re.DOTALL)
_THREADS = re.compile(r"\.(?:reqntid|maxntid) (\d+)")
# ld.global.v4.b32, st.global.L1::evict_last.v2.b64, cp.async.cg.shared.global [a], [b], 0x10
_ACCESS = re.compile(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]* \[[^]]*\], \[[^]]*\], (\w+)")
_ENGINE = re.compile(r"\bcp\.async\.bulk\.tensor[\w.:]*\.(shared|global)\b")
# In the order of their generations: Blackwell, Hopper, Ampere.
_PRODUCTS = ("tcgen05.mma", "wgmma", "mma.sync")
_WHOLE_TILES = 2**10  # the copy engine moves tiles at a time


class Assembled(NamedTuple):
    """One kernel.

    Attributes:
      threads: of a block.
      registers: of a thread; 255 are the most that there are.
      spilled: bytes of each thread that are written to memory for want of registers.
      reads, writes: bytes that one instruction of a thread reads of device memory, and writes to it, at half of all
        bytes that these instructions name; 16 are the most, and more stand for the copy engine. 0 where none does.
      products: "tcgen05.mma" (Blackwell), "wgmma" (Hopper), "mma.sync" (Ampere and later), "" where there are none.
      hot: of one warp, once around the innermost loop.
    """

    name: str
    threads: int
    registers: int
    spilled: int
    reads: int
    writes: int
    products: str
    hot: Hot


def compile_to_ptx(lowered: jax.stages.Lowered) -> list[str]:
    """Compile a program for NVIDIA GPUs; returns the PTX of its kernels, Pallas's and XLA's own.

    Mosaic GPU compiles a kernel once in a process: of one that it had before there is none.

    Raises XLA's errors where it refuses the program.
    """
    with tempfile.TemporaryDirectory(prefix="jaxlm-assembly-") as folder:
        dump(lowered, Path(folder))
        texts = [path.read_text() for path in sorted(Path(folder).glob("*.ptx"))]
    return [text for text in texts if _KERNEL.search(text)]


def dump(lowered: jax.stages.Lowered, folder: Path) -> None:
    """Compile a program for NVIDIA GPUs; into the folder come its kernels in PTX, as `*.ptx`, and of those by Mosaic
    GPU what they are after each of its passes, as `*.mlir-passes.log`."""
    options = {
        "xla_dump_to": str(folder),
        # XLA's default: machine code that was made in a hurry, as in tests, says nothing of the real one.
        "xla_backend_optimization_level": 3,
    }
    if jax.__version_info__ >= (0, 11):
        # PTX is written only where it is asked for; in 0.10 it always is, and to ask makes compiling far slower.
        options["xla_dump_emitter_re"] = "ptx"
    with _mosaic_writes_to(str(folder)):
        lowered.compile(compiler_options=options)


def assemble(ptx: str) -> list[Assembled]:
    """The kernels of a text in PTX, assembled for the chip that it names.

    Raises InputError where the assembler or the disassembler is not installed, RuntimeError where it refuses a kernel,
    or makes wgmma wait for itself (each product at once for the one before, whatever the kernel says).
    """
    architecture = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory(prefix="jaxlm-assembly-") as folder:
        source, binary = Path(folder, "kernels.ptx"), Path(folder, "kernels.cubin")
        source.write_text(ptx)
        command = [_tool("ptxas"), f"-arch={architecture}", "-v", source, "-o", binary]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas refuses a kernel: {done.stderr.strip().splitlines()[-1]}")
        listing = subprocess.run([_tool("nvdisasm"), "-c", binary], capture_output=True, text=True, check=True).stdout
    if lost := re.search(r"wgmma\.mma_async instructions are serialized.*", done.stderr):
        raise RuntimeError(f"ptxas: {lost[0]}")
    said = dict(re.findall(r"entry function '(\w+)'(.*?Used \d+ registers)", done.stderr, re.DOTALL))
    loops = hottest(listing)
    return [_assembled(name, text, said[name], loops[name]) for name, text in _KERNEL.findall(ptx)]


def _assembled(name: str, ptx: str, said: str, hot: Hot) -> Assembled:
    spilled, registers = (
        int(re.search(pattern, said)[1]) for pattern in (r"(\d+) bytes spill stores", r"Used (\d+) registers")
    )
    accesses = Counter((way, int(bits) // 8 * int(lanes or 1)) for way, lanes, bits in _ACCESS.findall(ptx))
    accesses.update(("ld", int(size, 0)) for size in _COPY.findall(ptx))
    accesses.update(("ld" if to == "shared" else "st", _WHOLE_TILES) for to in _ENGINE.findall(ptx))
    products = next((name for name in _PRODUCTS if name in ptx), "")
    threads = int(_THREADS.search(ptx)[1])
    reads, writes = (_typical(accesses, way) for way in ("ld", "st"))
    return Assembled(name, threads, registers, spilled, reads, writes, products, hot)


def _typical(accesses: Counter, way: str) -> int:
    """The size below which half of the bytes are."""
    sizes = sorted((size, size * times) for (kind, size), times in accesses.items() if kind == way)
    left = sum(moved for _, moved in sizes) / 2
    for size, moved in sizes:
        left -= moved
        if left <= 0:
            return size
    return 0


def _tool(name: str) -> str:
    """Of CUDA: the one that pip has installed, with which XLA assembles, else the machine's."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        for path in sorted(Path(folder).glob(f"cu*/bin/{name}")):
            return str(path)
    if path := shutil.which(name):
        return path
    raise InputError(f"there is no {name} here; pip install -e '.[compile]' brings it")


@contextlib.contextmanager
def _mosaic_writes_to(folder: str) -> Iterator[None]:
    """Mosaic GPU compiles by itself; this is how it is asked for what it makes."""
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
