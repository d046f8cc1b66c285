"""Folders of compiled programs, so that a command that was run before starts without compiling."""

import hashlib
import os
import platform
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlm.core import kept_programs
from jaxlm.core.files import default_cache

_MAX_BYTES = 1 << 30  # of each folder: the programs that were used least recently are removed
_WORTHWHILE_S = 0.1  # of compiling: smaller programs are compiled as fast as they are read


def enable(say: Callable[[str], None]) -> None:
    """Let JAX keep compiled programs in `$XDG_CACHE_HOME/jaxlm/programs`, and beside them the engine keep its own so
    that they need not be traced (`kept_programs`): 1 GiB of each at most.

    Nothing is changed where the user chose a folder (JAX_COMPILATION_CACHE_DIR) or switched the cache off
    (JAX_ENABLE_COMPILATION_CACHE=0). Programs are code: a folder that others may write to is not used, and `say` takes
    a line about it.
    """
    import jax

    settings: Any = jax.config  # which declares them as it starts
    if settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache:
        return
    folder = Path(default_cache(), "programs", _machine()).expanduser()
    own = folder / "whole"
    try:
        _private(folder.parent, folder, own)
        for program in folder.glob("*-cache"):
            # JAX's eviction fails at a program without a time of use: its process was killed while it wrote.
            if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                program.unlink(missing_ok=True)
    except OSError as error:
        say(f"compiled programs are not kept: {folder} {error.strerror or error}")
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTHWHILE_S)
    kept_programs.keep_in(own, _MAX_BYTES)


def _private(*folders: Path) -> None:
    """Make folders, each inside the one before it, that their user alone may read and write. Raise OSError if they
    cannot be, or if others may write."""
    folders[0].parent.mkdir(parents=True, exist_ok=True)
    for path in folders:
        path.mkdir(exist_ok=True, mode=0o700)
        found = path.stat()
        if found.st_uid != os.geteuid():
            raise OSError(f"belongs to another user: {path}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError(f"may be written by others; run: chmod go-w {path}")


def _machine() -> str:
    """Return a name for the instructions of this machine's CPU: a home folder may be shared by several kinds, and a
    program compiled for one may crash on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
