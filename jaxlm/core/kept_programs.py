"""Programs as XLA compiled them, kept in a folder: one that is found again is neither traced, lowered nor compiled.

JAX's compilation cache finds a program by its lowered module, so that each start traces and lowers it. Here a program
is found by what it is made from: its sizes and operands, the sources and versions of all that builds it, the devices,
and the settings of JAX and XLA. What differs in any of these is another program.

A file is named by its lowered module, so that a change of sources that leaves the module as it was costs no compiling;
symbolic links by what it is made from point to it. Programs are machine code, and their descriptions are pickles: the
folder must be one that its user alone may write to, as `compilation_cache.enable` makes it.
"""

import hashlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm.core import files, plugins
from jaxlm.core.cores import usable_cores

if TYPE_CHECKING:
    import jax

_FORMAT = 1  # of the files
_DIGEST = 32  # bytes at the start of a file, of what follows
_ENVIRONMENT = (
    "XLA_",
    "TF_",
    "TPU_",
    "LIBTPU",
    "CUDA_",
    "NVIDIA_",
    "TRITON_",
    "ROCM_",
)  # variables that compilers read
# Settings of JAX that change no program, by their first letters: where and what is cached, and what is logged.
_IRRELEVANT = ("jax_compilation_cache_", "jax_persistent_cache_", "jax_raise_persistent_cache_", "jax_log")
_HIT = "/jax/compilation_cache/cache_hits"
_NEVER_S = 1e9  # of compiling, that JAX's cache would take a program from


class KeptPrograms:
    """A folder of compiled programs, of which those that were used least recently are removed beyond `most_bytes`."""

    def __init__(self, folder: Path, most_bytes: int):
        self.folder, self._most_bytes = folder, most_bytes

    def compiled(
        self, made_from: str, devices: Sequence[Any], lower: "Callable[[], jax.stages.Lowered]"
    ) -> "jax.stages.Compiled":
        """Return a compiled program, from the folder where it is there, and keep it otherwise.

        A file that is damaged is replaced, and one that cannot be written is left out.

        Args:
          made_from: all that decides the program but for sources, versions, settings and devices; compiler options are
            part of it, which no lowered module tells.
          devices: in the order of the program's mesh.
        """
        known = f"{made_from}\n{_settings()}\n{_described(devices)}"
        link = self._file(f"{known}\n{_sources()}")
        if (compiled := self._loaded(link, devices)) is not None:
            return compiled
        lowered = lower()
        file = self._file(f"{known}\n{_operands_kept(lowered)}\n{lowered.as_text()}")
        compiled = self._loaded(file, devices)
        if compiled is None or (compiled.in_tree, compiled.out_tree) != (lowered.in_tree, lowered.out_tree):
            compiled, is_new = _compiled(lowered)
            if not is_new or not self._write(file, compiled):
                return compiled
        with suppress(OSError), files.replacing(link) as partial:
            partial.symlink_to(file.name)
        return compiled

    def _file(self, described: str) -> Path:
        return self.folder / hashlib.sha256(described.encode()).hexdigest()

    def _loaded(self, file: Path, devices: Sequence[Any]) -> "jax.stages.Compiled | None":
        """Return the program in a file; None where there is none that is whole."""
        from jax.experimental import serialize_executable

        try:
            data = memoryview(file.read_bytes())
            if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
                return None
            of = {"backend": devices[0].client, "execution_devices": devices}
            compiled = serialize_executable.deserialize_and_load(*pickle.loads(data[_DIGEST:]), **of)
        except Exception:  # whatever is wrong with a file, the program can be made again
            return None
        with suppress(OSError):
            os.utime(file)  # of what the link points to
        return compiled

    def _write(self, file: Path, compiled: "jax.stages.Compiled") -> bool:
        """Write a program, and return whether it could be."""
        from jax.experimental import serialize_executable

        try:
            payload = pickle.dumps(serialize_executable.serialize(compiled))
        except Exception:  # not every program can be: one that calls Python cannot
            return False
        try:
            with files.replacing(file) as partial:
                partial.write_bytes(hashlib.sha256(payload).digest() + payload)
            self._evict()
        except OSError:
            return False
        return file.exists()

    def _evict(self) -> None:
        """Remove the programs that were used least recently, and links to what is not there."""
        paths = [*self.folder.iterdir()]
        whole = []
        for path in paths:
            with suppress(FileNotFoundError):  # another process evicts too
                found = path.lstat()
                if not path.is_symlink():
                    whole.append((found.st_mtime_ns, found.st_size, path))
        left = sum(size for _, size, _ in whole)
        for _, size, path in sorted(whole):
            if left <= self._most_bytes:
                break
            path.unlink(missing_ok=True)
            left -= size
        for path in paths:
            if path.is_symlink() and not path.exists():
                path.unlink(missing_ok=True)


_kept: KeptPrograms | None = None
_at_start = ""


def keep_in(folder: Path | None, most_bytes: int = 0) -> None:
    """Let `compiled` keep programs in a folder; None: in none. It has to be called before JAX starts a backend, which
    reads its variables once, and notes these and the sources as they are now."""
    global _kept, _at_start
    _kept = None if folder is None else KeptPrograms(folder, most_bytes)
    if folder is not None:
        _at_start = _variables()
        _sources()


def compiled(
    made_from: str, devices: Sequence[Any], lower: "Callable[[], jax.stages.Lowered]"
) -> "jax.stages.Compiled":
    """Return a compiled program as `KeptPrograms.compiled`. It is not kept where there is no folder, where it runs on
    several processes, which have to agree on what is compiled, or with plug-ins, which may change any part of it."""
    import jax

    if _kept is None or jax.process_count() > 1 or plugins.are_imported():
        return lower().compile()
    return _kept.compiled(made_from, devices, lower)


def _settings() -> str:
    """Return the settings of JAX, also those of this thread, and the variables that compilers read."""
    import jax

    values: dict[str, Any] = jax.config.values
    of_jax = {key: repr(value) for key, value in sorted(values.items()) if not key.startswith(_IRRELEVANT)}
    # XLA divides the work of a CPU's program among as many threads as it may use.
    return f"{of_jax}\n{_at_start}\n{_variables()}\n{os.cpu_count()} {usable_cores()}"


def _variables() -> str:
    """Return the variables that compilers read, with the flags of XLA that a file holds."""
    found = {key: value for key, value in sorted(os.environ.items()) if key.startswith(_ENVIRONMENT)}
    flags = found.get("XLA_FLAGS", "").strip()
    with suppress(OSError):
        if flags and not flags.startswith("-"):
            found["XLA_FLAGS"] = f"{flags}: {Path(flags).read_text()}"
    return str(found)


def _operands_kept(lowered: "jax.stages.Lowered") -> str:
    """Return the numbers of the operands that a program reads: the module of one that reads others may be the same.
    Where JAX does not tell, what is no other program's."""
    arguments = getattr(getattr(lowered, "_lowering", None), "compile_args", {})
    return str(arguments["kept_var_idx"]) if "kept_var_idx" in arguments else _sources()


def _described(devices: Sequence[Any]) -> str:
    """Return what programs for these devices depend on."""
    kinds = [(device.id, device.platform, device.device_kind) for device in devices]
    return f"{devices[0].client.platform_version} {kinds} of {devices[0].client.device_count()}"


@cache
def _sources() -> str:
    """Return the versions of what builds a program, and a digest of this project's own files."""
    import flax
    import jax
    import jaxlib
    import numpy

    digest = hashlib.sha256()
    for package in ("jaxlm", "kernels_pallas"):
        found = find_spec(package)
        assert found and found.origin, package
        root = os.path.dirname(found.origin)
        for name in sorted(os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names):
            if not name.endswith(".pyc"):
                try:
                    with open(name, "rb") as file:
                        content = hashlib.sha256(file.read()).digest()
                except OSError:  # such as the lock of an editor, a link to nothing
                    content = b""
                digest.update(f"{os.path.relpath(name, root)}\0".encode() + content)
    versions = [module.__version__ for module in (jax, jaxlib, flax, numpy)]
    return f"{_FORMAT} {sys.version} {versions} {digest.hexdigest()}"


_compiling = threading.Lock()
_under_way = 0
_before = 0.0  # the least time of compiling that JAX's cache takes a program from
_found_by_jax = threading.local()


def _compiled(lowered: "jax.stages.Lowered") -> "tuple[jax.stages.Compiled, bool]":
    """Return a compiled program, and whether it is new: XLA writes one incompletely that JAX's cache had."""
    _listen()
    _found_by_jax.programs = 0
    with _unknown_to_jax():
        compiled = lowered.compile()
    return compiled, not _found_by_jax.programs


@contextmanager
def _unknown_to_jax() -> Iterator[None]:
    """Let JAX's cache take no program that is compiled inside, in any thread."""
    import jax

    global _under_way, _before
    name = "jax_persistent_cache_min_compile_time_secs"
    with _compiling:
        if not _under_way:
            _before = getattr(jax.config, name)
            jax.config.update(name, _NEVER_S)
        _under_way += 1
    try:
        yield
    finally:
        with _compiling:
            _under_way -= 1
            if not _under_way:
                jax.config.update(name, _before)


@cache
def _listen() -> None:
    """Count the programs that JAX's cache has, in each thread."""
    import jax

    def count(event: str, **_: Any) -> None:
        if event == _HIT:
            _found_by_jax.programs = getattr(_found_by_jax, "programs", 0) + 1

    jax.monitoring.register_event_listener(count)
