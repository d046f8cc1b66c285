"""The program in docs/extending.md runs unchanged, and the files that the page names exist."""

import re
from pathlib import Path

import meshes

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def test_the_program_runs(monkeypatch, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    monkeypatch.chdir(ROOT)
    meshes.have(monkeypatch, 1)
    exec(compile(program, "docs/extending.md", "exec"), {"__name__": "extending"})
    shape, flops, memory, *ids = capsys.readouterr().out.splitlines()
    assert shape == "(1, 4, 512)" and int(flops) > 0 and memory.startswith("Memory(") and len(ids) == 4


def test_its_files_are_there():
    named = {name for name in re.findall(r"`([\w./]+/[\w.]+)`", PAGE)}
    assert len(named) > 15 and not {name for name in named if not (ROOT / name).exists()}
