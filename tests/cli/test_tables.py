"""Tables: whole numbers at any width, and every command that prints one in a terminal of 80 columns."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections import Counter
from pathlib import Path

import pytest
import runs

from jaxlm.cli.tables import TextTable, names, numbers, texts

MODELS = Path(__file__).parents[2] / "configs" / "models"
LLAMA = str(MODELS / "llama3.1-8b.toml")
LIGHT = [
    ["hardware"],
    ["hardware", "h100-sxm5"],
    ["plan", LLAMA, "--on", "h200-sxm:8", "training.sequence=8192", "training.steps=100000"],
    ["plan", str(MODELS / "llama3.1-405b.toml"), "--on", "tpu-v5p:16x20x28", "--mesh", "data=70,fsdp=128"],
    ["plan", LLAMA, "--on", "h200-sxm:64", "--mesh", "auto", "training.sequence=8192"],
    ["plan", LLAMA, "--on", "all:8", "--workload", "decode", "inference.sequences=64", "inference.length=4096"],
    ["config"],
    ["config", "execution.remat"],
    ["config", "--list"],
]
HEAVY = [["plan", "--check"]]  # of many programs, which are counted first
ALL = """
import json, os, sys
from jaxlm.cli import main
commands, files = map(json.loads, sys.argv[1:])
outputs = [os.dup(1)] + [os.open(file, os.O_WRONLY | os.O_CREAT) for file in files]
for arguments in commands:
    for output in outputs:
        os.dup2(output, 1)
        os.dup2(output, 2)
        print(">>>", flush=True)
        print("<<<", main(arguments), flush=True)
"""


def printed(commands: list[list[str]], columns: int, *files: Path) -> list[list[str]]:
    """Return what each command prints in a terminal of so many columns, and then into each file, by one process."""
    command = [sys.executable, "-c", ALL, json.dumps(commands), json.dumps([*map(str, files)])]
    environment = {key: value for key, value in runs.environment().items() if key not in ("COLUMNS", "LINES")}
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment |= {"TERM": "xterm"}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)
    said = b"".join(iter(lambda: _read(ours), b""))
    process.wait(timeout=60)
    os.close(ours)
    found = []
    for part in [said, *(file.read_bytes() for file in files)]:
        text = re.sub(r"\x1b\[[\d;?]*\w|\r", "", part.decode())
        found.append(re.findall(r">>>\n(.*?)<<< 0\n", text, re.S))
        assert len(found[-1]) == len(commands), text
    return found


def _read(file: int) -> bytes:
    try:
        return os.read(file, 2**16)
    except OSError:  # the other end is closed
        return b""


def figures(text: str) -> Counter[str]:
    return Counter(re.findall(r"\d[\d.,]*", text))


@pytest.mark.slow
@pytest.mark.parametrize(
    "commands", [pytest.param(LIGHT, id="light"), pytest.param(HEAVY, id="heavy", marks=pytest.mark.exhaustive)]
)
def test_every_number_is_whole_in_80_columns(commands, tmp_path):
    """Compare with a file, into which tables are printed 200 wide."""
    for command, narrow, wide in zip(commands, *printed(commands, 80, tmp_path / "wide"), strict=True):
        assert "…" not in narrow and max(map(len, narrow.splitlines())) <= max(map(len, wide.splitlines())), command
        assert figures(narrow) == figures(wide), command
        table = [line for line in narrow.splitlines() if "  " in line.strip()]
        assert table and max(map(len, table)) <= 80, command


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_number_is_whole_in_80_columns_where_something_runs(tmp_path):
    """Two runs measure other times; what was cut would show a "…"."""
    small = ["training.batch=8", "training.sequence=512", "execution.remat=full"]
    config = runs.write_config(tmp_path)
    commands = [
        ["compile", str(MODELS / "qwen3-0.6b.toml"), "--on", "tpu-v5e:2x4", *small],
        ["bench", "kernels", "rms_norm", "--rounds", "1", "--out", str(tmp_path)],
        ["train", str(config), "--out", str(tmp_path / "run")],
    ]
    for command in commands:
        ((narrow,),) = printed([command], 80)
        assert "…" not in narrow and figures(narrow), command


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_a_number_is_never_cut(width):
    table = TextTable([*names("case"), *numbers(*"abcdef"), *texts("why")], "a title")
    row = ["llama", *(f"{10**i:,}" for i in range(4, 10)), "because of it " * 9]
    table.add(*row)
    head, rows = table.lines(width)
    assert max(map(len, head[1:] + rows)) <= width
    assert " ".join(rows).split() == " ".join(row).split()
    assert head[0] == "a title" and " ".join(head[1:]).split() == ["case", *"abcdef", "why"]


def test_columns_stand_in_one_line_where_they_fit():
    table = TextTable([*names("name"), *numbers("value")])
    table.add("a", "1")
    table.add("bc", "1,000")
    assert table.lines(80) == (["name  value"], ["a         1", "bc    1,000"])
    assert table.lines(10) == (["name value"], ["a        1", "bc   1,000"])
    assert table.lines(9) == (["name", "  value"], ["a", "      1", "bc", "  1,000"])
