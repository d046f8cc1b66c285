"""The program in README.md runs unchanged, and uses exactly the names of `jaxlm.api`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from jaxlm import api

ROOT = Path(__file__).parents[1]
(PROGRAM,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)


def test_it_uses_the_seven_names():
    assert set(re.findall(r"\bapi\.(\w+)", PROGRAM)) == set(api.__all__)
    assert len(api.__all__) == 7 and all(getattr(api, name).__doc__ for name in api.__all__)


@pytest.mark.slow
def test_the_program_runs(tmp_path):
    """Run the program in its own process, set up as a run is, next to the files that it names."""
    for name in ("configs", "jaxlm"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=runs.environment(1), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    counted, compiled, shapes = done.stdout.splitlines()[:3]
    assert counted.startswith("Memory(") and compiled.startswith("CompiledMemory(")
    assert re.fullmatch(r"1 \(1, \d+, 2048\)", shapes)
    assert (tmp_path / "runs" / "example" / "sample.txt").exists()
    assert done.stdout.splitlines()[-2:] == ["[('runs/example', 'finished', 4)]", "{}"]
