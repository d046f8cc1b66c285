"""What ends a command with one line and without a traceback."""

import errno


class InputError(ValueError):
    """Bad input: the message is one line that says what is wrong and what would be right.

    The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))  # what it quotes may have lines of its own


class RunFailed(RuntimeError):
    """A run that cannot go on: the message is one line that says why, and what would let it.

    The command line prints it without a traceback and exits with status 1.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def in_one_line(error: Exception) -> str | None:
    """What to say of an error in place of its traceback: of the two above, and of a full disk; None of any other."""
    if isinstance(error, InputError | RunFailed):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}: {error.filename or 'what was to be written'}; make room"
    return None
