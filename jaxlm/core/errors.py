"""Errors that end a command with one line and no traceback."""

import errno
import re
import sys
import unicodedata
from pathlib import PurePath

from jaxlm.core.addresses import with_addresses

_MAX_LENGTH = 2000  # characters of a message
# Advice per error number of the system.
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "remove it, or choose another path"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change the permissions, or choose another path"),
}
# XLA's message when an array does not fit in memory, but not when a kernel exceeds its scratch memory.
_NO_ROOM = re.compile(r"RESOURCE_EXHAUSTED(?!.*(?:vmem|smem|shared memory)).*(?:out of memory|allocat)", re.IGNORECASE)
# JAX's message, at import, for an invalid environment variable.
_SETTING = re.compile(r"invalid .*\b(?:flag|environment) '?(jax_\w+)", re.IGNORECASE)


class InputError(ValueError):
    """Bad input. The message is one line that says what is wrong and what would be right.

    The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, message: str):
        super().__init__(_one_line(message))


def refuse_single(name: str, value: object) -> None:
    """Raise InputError for one string or path where a list is due, which would be read letter by letter."""
    if isinstance(value, str | PurePath):
        one = str(value)
        raise InputError(f"{name} = {one!r} is a single string, and has to be a list of strings: [{one!r}]")


class RunFailed(RuntimeError):
    """A run that cannot continue. The message is one line that says why, and how to resume it.

    The command line prints it without a traceback and exits with status 1.
    """

    def __init__(self, message: str):
        super().__init__(_one_line(message))


def _one_line(message: str) -> str:
    """Return a message as one line of bounded length, with control characters escaped and addresses for places."""
    line = " ".join(with_addresses(message).split())
    if len(line) > _MAX_LENGTH:
        line = f"{line[: _MAX_LENGTH // 2]} … {line[-_MAX_LENGTH // 2 :]}"
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in ("Cc", "Cs") else c for c in line)


def in_one_line(error: Exception) -> str | None:
    """Return the one line that replaces the traceback of an error; None if it needs its traceback.

    Covers the two errors above, invalid environment variables, a full or refusing disk, paths that the locale
    cannot name, and lack of memory.
    """
    if isinstance(error, InputError | RunFailed):
        return str(error)
    if refused := _setting(error):
        return _one_line(f"{error}; change {refused} in the environment, or unset it")
    if isinstance(error, OSError) and error.errno in _ADVICE:
        where = error.filename2 or error.filename or "the output"  # filename2: the target of a move
        return _one_line(f"{error.strerror}: {where}; {_ADVICE[error.errno]}")
    if isinstance(error, UnicodeEncodeError) and error.encoding == sys.getfilesystemencoding() != "utf-8":
        return _one_line(f"{error.object!r} is no path in this locale, of {error.encoding}; set PYTHONUTF8=1")
    said = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or type(error).__name__ == "JaxRuntimeError" and _NO_ROOM.search(said):
        return _one_line(
            f"out of memory ({said[:200] or 'of this machine'}); use more devices, or to train lower training.batch "
            "or training.sequence or raise training.microbatches, and otherwise lower inference.sequences, "
            "inference.context or inference.cache_memory"
        )
    return None


def exit_status(error: Exception) -> int:
    """Return the exit status: 2 for bad input, 1 for any other error."""
    return 2 if isinstance(error, InputError) or _setting(error) else 1


def _setting(error: Exception) -> str | None:
    """Return the name of the environment variable that JAX cannot parse; None for another error."""
    found = _SETTING.match(str(error)) if isinstance(error, ValueError) else None
    return found[1].upper() if found else None
