"""Messages that say how to install optional packages."""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from jaxlm.core import extras

ROOT = Path(__file__).parents[2]


def test_a_checkout_is_installed_from_its_folder(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert extras.install("serve") == "pip install -e '.[serve]'"
    monkeypatch.chdir(ROOT / "tests")
    assert extras.install("serve") == f"pip install -e '.[serve]' in {ROOT}"


@pytest.mark.parametrize(
    ("recorded", "command"),
    [
        ({"url": "file:///a%20b/jaxlm-0.1.0-py3-none-any.whl"}, "pip install '/a b/jaxlm-0.1.0-py3-none-any.whl[hf]'"),
        (
            {"url": "https://github.com/me/jaxlm", "vcs_info": {"vcs": "git"}},
            "pip install 'jaxlm[hf] @ git+https://github.com/me/jaxlm'",
        ),
        (None, "pip install 'PATH[hf]', PATH being that of jaxlm's wheel"),
    ],
)
def test_a_wheel_is_installed_from_where_it_came(recorded, command, tmp_path, monkeypatch):
    class Installed:
        def read_text(self, name):
            return recorded and json.dumps(recorded)

    monkeypatch.setattr(extras, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    assert extras.install("hf") == command


@pytest.mark.parametrize("folder", ["jaxlm", "kernels_pallas", "launch", "benchmarks"])
def test_no_message_installs_from_an_index_that_does_not_have_it(folder):
    """`pip install jaxlm[serve]` would fetch whatever has this name there."""
    index = re.compile(r"pip install\s+['\"]?jaxlm\b(?!\[\{)")
    assert [str(file) for file in (ROOT / folder).rglob("*.py") if index.search(file.read_text(encoding="utf-8"))] == []
