"""Every test of configurations stands beside a small experiment."""

import pytest
from config_fixtures import CONTENT, SMALL


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A working directory that holds the small experiment."""
    (tmp_path / SMALL).write_text(CONTENT)
    monkeypatch.chdir(tmp_path)
