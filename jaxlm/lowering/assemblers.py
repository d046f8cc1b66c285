"""NVIDIA's assemblers: which are at hand, and the machine code that each makes of a kernel's PTX.

Two releases of CUDA may make very different code of the same kernel, and a machine uses the one that it has. pip
installs one `ptxas`; CUDA 13.0's assembler comes as a static library as well (nvidia-nvptxcompiler), which a C compiler
makes loadable.
"""

import ctypes
import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.core.extras import install


class Assembler(NamedTuple):
    """An assembler.

    Attributes:
      release: of CUDA, "13.5".
      run: returns the machine code of a PTX text for an architecture ("sm_90a"), and the assembler's messages. Raises
        RuntimeError if it rejects the text.
    """

    release: str
    run: Callable[[str, str], tuple[bytes, str]]


def tool(name: str) -> str:
    """Return the path of a CUDA tool: pip's, which XLA uses, or else the system's.

    Raises InputError if there is none.
    """
    for path in _of_pip(f"bin/{name}"):
        return str(path)
    if path := shutil.which(name):
        return path
    raise InputError(f"{name} is not installed: {install('compile')}")


@functools.cache
def assemblers() -> tuple[Assembler, ...]:
    """Return the assemblers at hand, one of each release, XLA's own `ptxas` first.

    Raises InputError if there is no `ptxas`.
    """
    by_release = {each.release: each for each in (_ptx_compiler(), ptxas()) if each}
    return tuple(reversed(by_release.values()))


def ptxas() -> Assembler:
    """Return the assembler that XLA compiles with here, the program `ptxas`.

    Raises InputError if there is none.
    """
    program = tool("ptxas")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+\.\d+)", version)[1]

    def run(ptx: str, architecture: str) -> tuple[bytes, str]:
        with tempfile.TemporaryDirectory(prefix="jaxlm-assembler-") as folder:
            source, binary = Path(folder, "kernels.ptx"), Path(folder, "kernels.cubin")
            source.write_text(_for_release(ptx, release))
            command = [program, f"-arch={architecture}", "-v", source, "-o", binary]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise _rejected(release, done.stderr)
            return binary.read_bytes(), done.stderr

    return Assembler(release, run)


def _ptx_compiler() -> Assembler | None:
    """Return the assembler of pip's static library; None without it, or without a C compiler to link it."""
    compiler, archives = shutil.which("cc"), _of_pip("lib/libnvptxcompiler_static.a")
    if not compiler or not archives:
        return None
    with tempfile.TemporaryDirectory(prefix="jaxlm-assembler-") as folder:
        shared = Path(folder, "ptxcompiler.so")
        whole = ["-Wl,--whole-archive", archives[0], "-Wl,--no-whole-archive"]
        subprocess.run([compiler, "-shared", "-o", shared, *whole, "-lpthread", "-lm", "-ldl"], check=True)
        library = ctypes.CDLL(str(shared))
    major, minor = ctypes.c_uint(), ctypes.c_uint()
    library.nvPTXCompilerGetVersion(ctypes.byref(major), ctypes.byref(minor))
    release = f"{major.value}.{minor.value}"

    def run(ptx: str, architecture: str) -> tuple[bytes, str]:
        text = _for_release(ptx, release).encode()
        compiler = ctypes.c_void_p()
        library.nvPTXCompilerCreate(ctypes.byref(compiler), ctypes.c_size_t(len(text)), text)
        try:
            options = (ctypes.c_char_p * 2)(f"--gpu-name={architecture}".encode(), b"--verbose")
            if library.nvPTXCompilerCompile(compiler, len(options), options):
                raise _rejected(release, _text(library, compiler, "ErrorLog"))
            return _read(library, compiler, "CompiledProgram"), _text(library, compiler, "InfoLog")
        finally:
            library.nvPTXCompilerDestroy(ctypes.byref(compiler))

    return Assembler(release, run)


def _read(library: ctypes.CDLL, compiler: ctypes.c_void_p, name: str) -> bytes:
    """Return one of the library's results."""
    size = ctypes.c_size_t()
    getattr(library, f"nvPTXCompilerGet{name}Size")(compiler, ctypes.byref(size))
    result = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvPTXCompilerGet{name}")(compiler, result)
    return result.raw


def _text(library: ctypes.CDLL, compiler: ctypes.c_void_p, name: str) -> str:
    return _read(library, compiler, name).rstrip(b"\0").decode()


def _for_release(ptx: str, release: str) -> str:
    """Return a PTX text that an assembler of CUDA 13 accepts: one of a later version of PTX names the assembler's own.

    CUDA 13.n reads PTX up to 9.n (PTX ISA, release notes).
    """
    cuda, minor = map(int, release.split("."))
    stated = re.search(r"^\.version (\d+)\.(\d+)", ptx, re.MULTILINE)
    if stated is None or tuple(map(int, stated.groups())) <= (cuda - 4, minor):
        return ptx
    return f"{ptx[: stated.start()]}.version {cuda - 4}.{minor}{ptx[stated.end() :]}"


def _rejected(release: str, messages: str) -> RuntimeError:
    return RuntimeError(f"the assembler of CUDA {release} rejects a kernel: {messages.strip().splitlines()[0]}")


def _of_pip(name: str) -> list[Path]:
    """Return the paths of a file in CUDA packages of pip's, by its path in them."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else ()
    return [path for folder in folders for path in sorted(Path(folder).glob(f"cu*/{name}"))]
