"""Standard output and standard error: shared with native libraries, and of no reader any more."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

# What writing to a pipe without a reader gives, and to a terminal that was closed.
_NOBODY = (errno.EPIPE, errno.EIO)
_NAMES = {"stdout": "standard output", "stderr": "standard error"}


class _Outliving(io.FileIO):
    """A file that leads nowhere from when its reader has gone."""

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NOBODY:
                raise
            lead_nowhere(self.fileno())
            return super().write(data)


@contextmanager
def outliving_readers() -> Iterator[None]:
    """A block that goes on in silence where nobody reads what it says any more."""
    before = sys.stdout, sys.stderr
    for name in _NAMES:
        stream = getattr(sys, name)
        with suppress(AttributeError, io.UnsupportedOperation):  # None, closed from the beginning, or no file
            setattr(sys, name, _outliving(stream, stream.fileno()))
    try:
        with written_out():
            yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def written_out() -> Iterator[None]:
    """A block at whose end all that was printed has been written: of what could not be an OSError tells, once, where
    Python would say so with a traceback as it ends. A block that fails is told of by its own error."""
    ending = None
    try:
        yield
    except BaseException as error:
        ending = error
        raise
    finally:
        for name, said in _NAMES.items():
            stream = getattr(sys, name)
            try:
                if stream is not None:
                    stream.flush()
            except OSError as error:
                lead_nowhere(stream.fileno())
                if ending is None or isinstance(ending, SystemExit):
                    raise OSError(error.errno, error.strerror, said) from None


def native_output_to_stderr() -> None:
    """Gloo reports its connections on standard output, which belongs to what the command prints."""
    if sys.stdout is not None:
        ours = os.dup(1)
        sys.stdout = _outliving(sys.stdout, ours)
        os.dup2(2, 1)


def lead_nowhere(*files: int) -> None:
    """Let what is written to these go nowhere."""
    with open(os.devnull, "wb") as nowhere:
        for file in files:
            os.dup2(nowhere.fileno(), file)


def _outliving(stream: TextIO, file: int) -> TextIO:
    """Written to in place of a stream, as that one was."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Outliving(file, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )
