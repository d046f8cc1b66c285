"""Standard output and error: what they cannot encode, and what happens when their reader is gone."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

# Errors of writing to a pipe without a reader, and to a closed terminal.
_NO_READER = (errno.EPIPE, errno.EIO)
# Error handlers that Python chooses: it raises, writes other bytes, or writes escapes that break a table.
_PYTHONS_OWN = ("strict", "surrogateescape", "backslashreplace")
_NAMES = {"stdout": "standard output", "stderr": "standard error"}


class _ReaderlessFile(io.FileIO):
    """A file that redirects to the null device once its reader is gone."""

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NO_READER:
                raise
            redirect_to_null(self.fileno())
            return super().write(data)


def replace_unencodable() -> None:
    """Let standard output and error replace the characters that their encoding lacks, unless Python was told how."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _PYTHONS_OWN:
            stream.reconfigure(errors="replace")


@contextmanager
def ignoring_closed_output() -> Iterator[None]:
    """Run a block that continues silently if the reader of its output goes away."""
    before = sys.stdout, sys.stderr
    for name in _NAMES:
        stream = getattr(sys, name)
        with suppress(AttributeError, io.UnsupportedOperation):  # None, closed from the start, or not a file
            setattr(sys, name, _readerless(stream, stream.fileno()))
    try:
        with flushed_output():
            yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def flushed_output() -> Iterator[None]:
    """Run a block, and flush its output at the end.

    Raise OSError, once, if output cannot be written; Python would print a traceback at exit. An error of the block
    itself takes precedence.
    """
    ending = None
    try:
        yield
    except BaseException as error:
        ending = error
        raise
    finally:
        for name, description in _NAMES.items():
            stream: TextIO | None = getattr(sys, name)
            if stream is None:
                continue
            try:
                stream.flush()
            except OSError as error:
                redirect_to_null(stream.fileno())
                if ending is None or isinstance(ending, SystemExit):
                    raise OSError(error.errno, error.strerror, description) from None


def native_output_to_stderr() -> None:
    """Redirect native output to standard error: Gloo reports connections on standard output, reserved for commands."""
    if sys.stdout is not None:
        ours = os.dup(1)
        sys.stdout = _readerless(sys.stdout, ours)
        os.dup2(2, 1)


def redirect_to_null(*files: int) -> None:
    """Redirect file descriptors to the null device."""
    with open(os.devnull, "wb") as nowhere:
        for file in files:
            os.dup2(nowhere.fileno(), file)


def _readerless(stream: TextIO, file: int) -> TextIO:
    """Return a replacement for a stream, with its encoding and buffering, that survives the loss of its reader."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_ReaderlessFile(file, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        # PYTHONUNBUFFERED lets it write through.
        line_buffering=bool(stream.line_buffering or getattr(stream, "write_through", False)),
    )
