"""The types of the public parts are consistent, as `[tool.pyright]` of pyproject.toml lists them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_pyright_finds_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
