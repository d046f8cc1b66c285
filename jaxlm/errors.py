"""What ends a command with one line and without a traceback."""


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
