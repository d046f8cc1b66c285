"""A run continues when the reader of its output is gone."""

import os
import subprocess
import sys

import pytest

TALKS = """
import os, sys
from jaxlm.core import output
with output.ignoring_closed_output():
    output.native_output_to_stderr()
    os.write(1, NATIVE)
    print("out", flush=True)
    print("said", file=sys.stderr, flush=True)
    sys.stdin.readline()
    for stream in (sys.stdout, sys.stderr):
        print("to nobody", file=stream, flush=True)
        print("nor this", file=stream)
open(sys.argv[1], "w").write("done")
"""


def start(tmp_path, native=b"", **streams):
    command = [sys.executable, "-c", TALKS.replace("NATIVE", repr(native)), str(tmp_path / "done")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, **streams)


def test_a_closed_pipe_does_not_end_it(tmp_path):
    process = start(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (process.stdout.readline(), process.stderr.readline()) == ("out\n", "said\n")
    process.stdout.close()
    process.stderr.close()
    process.communicate("\n", timeout=60)
    assert process.returncode == 0 and (tmp_path / "done").exists()


def test_a_closed_terminal_does_not_end_it(tmp_path):
    ours, its = os.openpty()
    process = start(tmp_path, stdout=its, stderr=its)
    os.close(its)
    assert os.read(ours, 3) == b"out"
    os.close(ours)
    process.communicate("\n", timeout=60)
    assert process.returncode == 0 and (tmp_path / "done").exists()


def test_native_output_is_not_among_what_is_printed(tmp_path):
    process = start(tmp_path, native=b"native\n", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, errors = process.communicate("\n", timeout=60)
    assert out.splitlines() == ["out", "to nobody", "nor this"]
    assert errors.splitlines() == ["native", "said", "to nobody", "nor this"]


def printed(stdout, *call) -> tuple[int, str]:
    """Run a command whose output is buffered to its end. Return its status and standard error."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *(call or ("-m", "jaxlm", "--version"))]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=kept)
    return done.returncode, done.stderr


FAILS = """
from jaxlm.core import output
with output.flushed_output():
    print("some")
    raise KeyError("why")
"""


@pytest.fixture
def full():
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no device that is always full")
    with open("/dev/full", "w") as file:
        yield file


def test_output_that_has_no_room_is_one_line(full):
    status, said = printed(full)
    assert status == 1 and said.count("\n") == 1 and "standard output; make room" in said


def test_output_that_has_no_room_hides_no_error(full):
    _, said = printed(full, "-c", FAILS)
    assert said.endswith("KeyError: 'why'\n") and "No space" not in said


def test_a_reader_that_left_is_told_nothing():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert printed(writer) == (1, "")
    finally:
        os.close(writer)


def test_lines_of_both_streams_keep_their_order_without_buffers():
    code = (
        "import sys\nfrom jaxlm.core import output\nwith output.ignoring_closed_output():\n"
        "    for i in range(4): print(i, file=(sys.stdout, sys.stderr)[i % 2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert done.stdout.split() == [b"0", b"1", b"2", b"3"]


def ascii_only(*arguments: str) -> subprocess.CompletedProcess:
    """Run a command in a locale that has ASCII alone."""
    environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "jaxlm", *map(os.fsencode, arguments)]
    return subprocess.run(command, capture_output=True, env=environment)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["eval", "--help"],
        ["config", "training"],
        ["hardware", "h100-sxm5"],
        ["plan", "configs/models/llama3.1-8b.toml", "--on", "h200-sxm:8", "training.sequence=4096"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_ascii_lacks_is_replaced(arguments):
    done = ascii_only(*arguments)
    assert done.returncode == 0 and done.stderr == b""
    assert done.stdout.isascii() and (b"?" in done.stdout or arguments == ["--help"])


def test_an_error_that_ascii_lacks_is_one_line():
    done = ascii_only("config", "größe")
    assert done.returncode == 2 and done.stderr.startswith(b"jaxlm: there is no key gr") and done.stderr.isascii()


def test_a_path_that_the_locale_lacks_is_one_line():
    done = ascii_only("plan", "größe.toml", "--on", "h200-sxm")
    assert done.returncode == 2 and b"is no path in this locale; set PYTHONUTF8=1" in done.stderr
    done = ascii_only("train", "configs/quickstart.toml", "data.text=größe.txt")
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
