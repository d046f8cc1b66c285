import importlib
import os
import pkgutil
import subprocess
import sys

import pytest

import jaxlm.cli
from jaxlm import __version__
from jaxlm.cli import main

CALL = """
import sys
from jaxlm.cli import main
try:
    sys.exit(main())
finally:
    assert "jax" not in sys.modules
"""


FOUND = [importlib.import_module(f"jaxlm.cli.{found.name}") for found in pkgutil.iter_modules(jaxlm.cli.__path__)]
# A command that Python has a word for has an underscore in the name of its module.
MODULES = {found.__name__.rpartition(".")[2].rstrip("_"): found for found in FOUND if hasattr(found, "main")}
COMMANDS = list(MODULES)


def test_the_commands_are_found():
    assert {"train", "eval", "generate"} <= set(COMMANDS)


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_needs_no_jax(command):
    done = subprocess.run([sys.executable, "-c", CALL, *command, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" ".join(["usage: jaxlm", *command]))


def test_what_a_terminal_cannot_encode_is_no_error():
    done = subprocess.run(
        [sys.executable, "-c", CALL, "eval", "--help"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1:strict"},
    )
    assert (done.returncode, done.stderr) == (0, b"") and b"TASK[,?]" in done.stdout


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert not ended.value.code
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("    ")}
    assert set(COMMANDS) <= listed


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_speaks_json_and_says_what_it_takes(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    said = capsys.readouterr().out
    assert not ended.value.code
    assert "--json" in said and MODULES[command].__doc__.split()[0] in said


@pytest.mark.parametrize("start", [["-c", CALL], ["-m", "jaxlm"]], ids=["jaxlm", "python -m jaxlm"])
def test_version_is_said(start):
    done = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"jaxlm {__version__}\n", "")


def test_help_takes_less_than_half_a_second():
    """In time of a processor: other work on the machine makes it wait."""

    def seconds() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-c", CALL, "--help"], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    assert min(seconds() for _ in range(5)) < 0.5
