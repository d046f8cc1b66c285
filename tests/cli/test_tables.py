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

from jaxlm.cli.tables import TextTable, fold, names, numbers, print_sentence, texts

MODELS = Path(__file__).parents[2] / "configs" / "models"
LLAMA = str(MODELS / "llama3.1-8b.toml")
LIGHT = [
    ["hardware"],
    ["hardware", "h100-sxm5"],
    ["plan", LLAMA, "--on", "h200-sxm:8", "training.sequence=8192", "training.steps=100000"],
    ["plan", str(MODELS / "llama3.1-405b.toml"), "--on", "tpu-v5p:16x20x28", "--mesh", "data=70,fsdp=128"],
    ["plan", LLAMA, "--on", "h200-sxm:64", "--mesh", "auto", "training.sequence=8192"],
    ["plan", LLAMA, "--on", "all:8", "--workload", "decode", "inference.sequences=64", "inference.length=4096"],
    ["plan", LLAMA, "--on", "all:8", "training.sequence=8192"],
    ["plan", LLAMA, "--on", "all:8", "--workload", "serve", "--prompt", "1000", "--output", "300"],
    ["runs", str(Path(__file__).parent)],
    ["config"],
    ["config", "execution.remat"],
    ["config", "--list"],
]
SEVERAL = [  # of the same first column
    ["hardware", "h100-sxm5", "h200-sxm", "mi300x", "tpu-v5e", "tpu-v5p", "b200-hgx"],
    ["compare", *[str(Path(__file__).parent / "earlier_run")] * 9],
]
HEAVY = [["plan", "--check"]]  # of many programs, which are counted first
ALL = """
import json, os, sys
from jaxlm.cli import main
commands, files = map(json.loads, sys.argv[1:])
outputs = [(os.dup(1), None)] + [(os.open(file, os.O_WRONLY | os.O_CREAT), columns) for file, columns in files]
for arguments in commands:
    for output, columns in outputs:
        os.environ.pop("COLUMNS", None)
        if columns:
            os.environ["COLUMNS"] = columns
        os.dup2(output, 1)
        os.dup2(output, 2)
        print(">>>", flush=True)
        print("<<<", main(arguments), flush=True)
"""


def printed(commands: list[list[str]], columns: int, *files: tuple[Path, str | None]) -> list[list[str]]:
    """Return what each command prints in a terminal of so many columns, and then into each file, with COLUMNS set to
    what goes with it, by one process."""
    command = [sys.executable, "-c", ALL, json.dumps(commands), json.dumps([(str(file), to) for file, to in files])]
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
    for part in [said, *(file.read_bytes() for file, _ in files)]:
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
    """Compare with what is printed 200 wide. What is captured is as wide as an ordinary terminal."""
    everywhere = printed(commands, 80, (tmp_path / "captured", None), (tmp_path / "wide", "200"))
    for command, narrow, captured, wide in zip(commands, *everywhere, strict=True):
        assert "…" not in narrow and captured == narrow and max(map(len, narrow.splitlines())) <= 80, command
        assert figures(narrow) == figures(wide), command
        assert len(wide.splitlines()) <= len(narrow.splitlines()), command


@pytest.mark.slow
def test_columns_that_do_not_fit_are_further_tables(tmp_path):
    for command, narrow, wide in zip(SEVERAL, *printed(SEVERAL, 80, (tmp_path / "wide", "200")), strict=True):
        lines = [line for line in narrow.splitlines() if not line.endswith("earlier_run")]
        assert max(map(len, lines)) <= 80, command
        assert figures(narrow).keys() == figures(wide).keys() and len(figures(narrow)) > 5, command


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
        table = [line for line in narrow.splitlines() if "  " in line.strip()]
        assert max(map(len, table)) <= 80, command


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


def test_columns_stand_under_another_where_a_line_is_too_long():
    table = TextTable([*names("chip"), *names("mesh", under="chip"), *numbers("at least", "tokens")])
    table.add("h200:8", "fsdp 8", "1.2 s", "100")
    assert table.lines(40) == (
        ["chip    mesh    at least  tokens"],
        ["h200:8  fsdp 8     1.2 s     100"],
    )
    assert table.lines(29) == (["chip   mesh   at least tokens"], ["h200:8 fsdp 8    1.2 s    100"])
    assert table.lines(25) == (["chip    at least  tokens", "  mesh"], ["h200:8     1.2 s     100", "  fsdp 8"])


def test_a_header_is_folded_before_a_row_is():
    table = TextTable([*names("chip"), *numbers("tokens/s per chip", "at least")])
    table.add("h200", "1,234", "1.2 s")
    assert table.lines(23) == (["      tokens/s     at", "chip  per chip  least"], ["h200     1,234  1.2 s"])


def test_a_table_that_repeats_its_first_column_is_printed_as_several(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "24")
    table = TextTable([*names("figure"), *numbers("one", "two", "three")], "chips", repeats=True)
    table.add("peak", "10 TB", "200 TB", "3 TB")
    table.print()
    first = ["chips", "figure    one     two", "─" * 21, "peak    10 TB  200 TB"]
    assert capsys.readouterr().out.splitlines() == [*first, "", "figure  three", "─" * 13, "peak     3 TB"]


def test_long_words_are_folded_after_slashes_and_else_after_other_signs():
    lines = ["a", "layers/attention/", "flash_attention_", "gradients"]
    assert fold("a layers/attention/flash_attention_gradients", 20) == lines
    assert fold("data 4×tensor 2", 10, after="×") == ["data 4×", "tensor 2"]


def test_a_sentence_is_wrapped_and_its_words_are_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    print_sentence("wrote runs/a-name-that-is-longer-than-a-line and ended")
    assert capsys.readouterr().out == "wrote\nruns/a-name-that-is-longer-than-a-line\nand ended\n"
