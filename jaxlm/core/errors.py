"""What ends a command with one line and without a traceback."""

import errno
import re
import unicodedata

_LONGEST = 2000  # characters of a message
# What to do where the system refuses.
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "remove what is in the way, or choose another place"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "allow it, or choose another place"),
}
# What XLA says where an array has no room, but not that a kernel has none.
_NO_ROOM = re.compile(r"RESOURCE_EXHAUSTED(?!.*(?:vmem|smem|shared memory)).*(?:out of memory|allocat)", re.IGNORECASE)
# What JAX says of a setting of the environment when it is imported.
_SETTING = re.compile(r"invalid .*\b(?:flag|environment) '?(jax_\w+)", re.IGNORECASE)


class InputError(ValueError):
    """Bad input: the message is one line that says what is wrong and what would be right.

    The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, message: str):
        super().__init__(_one_line(message))


class RunFailed(RuntimeError):
    """A run that cannot go on: the message is one line that says why, and what would let it.

    The command line prints it without a traceback and exits with status 1.
    """

    def __init__(self, message: str):
        super().__init__(_one_line(message))


def _one_line(message: str) -> str:
    """What a message quotes may have lines of its own, be long, and hold what no terminal should be sent."""
    line = " ".join(message.split())
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in ("Cc", "Cs") else c for c in line)


def in_one_line(error: Exception) -> str | None:
    """What to say of an error in place of its traceback: of the two above, of what the environment sets, of a disk that
    is full or refuses, and of too little memory; None of any other."""
    if isinstance(error, InputError | RunFailed):
        return str(error)
    if refused := _setting(error):
        return _one_line(f"{error}; change {refused} in the environment, or unset it")
    if isinstance(error, OSError) and error.errno in _ADVICE:
        where = error.filename2 or error.filename or "what was to be written"  # of a move its target
        return _one_line(f"{error.strerror}: {where}; {_ADVICE[error.errno]}")
    if type(error).__name__ == "JaxRuntimeError" and _NO_ROOM.search(said := str(error).partition("\n")[0]):
        return _one_line(
            f"out of memory ({said[:200]}); lower training.batch or training.sequence, or use more devices or, "
            "to train, more training.microbatches"
        )
    return None


def exit_status(error: Exception) -> int:
    """2 for bad input, 1 for whatever else went wrong."""
    return 2 if isinstance(error, InputError) or _setting(error) else 1


def _setting(error: Exception) -> str | None:
    """The variable of the environment that JAX cannot read."""
    found = _SETTING.match(str(error)) if isinstance(error, ValueError) else None
    return found[1].upper() if found else None
