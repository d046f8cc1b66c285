"""Errors that end a command are one line, whatever they quote."""

import errno
import os
import subprocess
import sys

import pytest

from jaxlm.core.errors import InputError, exit_status, in_one_line


def test_what_a_message_quotes_keeps_it_one_line_that_can_be_read():
    said = str(InputError("a\n  b\0\x1b[31m " + "[" * 5000 + " c"))
    assert said.startswith("a b\\x00\\x1b[31m [[") and said.endswith("[[ c") and len(said) < 2100 and said.isprintable()
    assert str(InputError("größer als 0, नमस्‍ते")) == "größer als 0, नमस्‍ते"


@pytest.mark.parametrize("number", [errno.EISDIR, errno.ENOTDIR, errno.EACCES])
def test_what_is_in_the_way_of_a_file_is_named(number):
    said = in_one_line(OSError(number, "what the system says", "run/lo\nss.png"))
    assert said.startswith("what the system says: run/lo ss.png; ")
    assert in_one_line(OSError(errno.EIO, "of the disk itself", "loss.png")) is None


@pytest.mark.parametrize("setting", ["JAX_NUM_CPU_DEVICES", "JAX_LOG_COMPILES", "JAX_TRACEBACK_FILTERING"])
def test_what_the_environment_sets_is_named(setting):
    done = subprocess.run(
        [sys.executable, "-m", "jaxlm", "plan", "configs/models/gpt2-124m.toml", "--on", "h100-sxm5"],
        capture_output=True,
        text=True,
        env={**os.environ, setting: "nonsense"},
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "nonsense" in done.stderr
    assert done.stderr.endswith(f"; change {setting} in the environment, or unset it\n")


def test_an_error_of_another_kind_has_no_line():
    assert in_one_line(error := ValueError("invalid value for flag depth")) is None and exit_status(error) == 1


def test_too_little_memory_says_what_to_lower():
    import jax

    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 67840000000 bytes.\nmore")
    assert "out of memory (RESOURCE_EXHAUSTED: " in in_one_line(error) and "training.batch" in in_one_line(error)
    assert in_one_line(MemoryError("Unable to allocate 3 TiB")).startswith("out of memory (Unable to allocate 3 TiB); ")
    for other in ("INTERNAL: something", "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"):
        assert in_one_line(jax.errors.JaxRuntimeError(other)) is None
