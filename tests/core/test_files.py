"""Atomic files and folders, and locks."""

import os
import subprocess
import sys

import pytest

from jaxlm.core.files import building, leftovers, locked, replace, replacing


def test_a_file_is_replaced_whole_or_stays(tmp_path):
    file = tmp_path / "file"
    replace(file, "old µ\n")
    with pytest.raises(RuntimeError), replacing(file) as partial:
        partial.write_text("half")
        assert list(leftovers(tmp_path)) == list(leftovers(tmp_path, file.name)) == [partial]
        assert not list(leftovers(tmp_path, "other"))
        raise RuntimeError
    assert file.read_text(encoding="utf-8") == "old µ\n" and os.listdir(tmp_path) == ["file"]
    replace(file, "new")
    assert file.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_of_two_builders_of_one_folder_the_first_stays(tmp_path):
    with building(tmp_path / "folder") as late:
        (late / "late").touch()
        with building(tmp_path / "folder") as early:
            (early / "early").touch()
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == ["early"]


def test_who_waits_for_another_process_says_so(tmp_path):
    said: list[str] = []
    holds = f"""
from jaxlm.core.files import locked
with locked(__import__("pathlib").Path({str(tmp_path / "lock")!r}), None):
    print("locked", flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline()
        with locked(tmp_path / "lock", lambda: said.append("waiting") or other.communicate("\n")):
            assert said == ["waiting"] and other.poll() == 0
    with locked(tmp_path / "lock", said.clear):
        assert said
