"""The program in docs/extending.md runs unchanged, with the layer of docs/plugins.md, and the named files exist."""

import importlib
import re
from pathlib import Path

import meshes

from jaxlm.core.schema import kind_of
from jaxlm.models import feed_forward
from jaxlm.models.block_config import FEED_FORWARDS
from jaxlm.models.doors.door import DOORS

ROOT = Path(__file__).parents[1]
PAGE, PLUGINS = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("extending.md", "plugins.md"))


def test_the_program_runs(monkeypatch, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    monkeypatch.chdir(ROOT)
    meshes.have(monkeypatch, 1)
    exec(compile(program, "docs/extending.md", "exec"), {"__name__": "extending"})
    shape, flops, memory, *ids = capsys.readouterr().out.splitlines()
    assert shape == "(1, 4, 512)" and int(flops) > 0 and memory.startswith("Memory(") and len(ids) == 4


def test_its_examples_are_a_kind_and_a_door(tmp_path, monkeypatch):
    """In one file, which is imported."""
    layer, *_ = re.findall(r"```py\n(.*?)```", PLUGINS, re.S)
    (door,) = re.findall(r"```py\n(.*?)```", PAGE, re.S)
    (tmp_path / "extending_mine.py").write_text(layer + door)
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("extending_mine")
    try:
        assert "bilinear" in map(kind_of, FEED_FORWARDS) and DOORS["blocks"].declare is mine.declare
    finally:
        feed_forward.unregister(mine.BilinearConfig)


def test_its_files_are_there():
    named = {name for name in re.findall(r"`([\w./]+/[\w.]+)`", PAGE)}
    assert len(named) > 15 and not {name for name in named if not (ROOT / name).exists()}
