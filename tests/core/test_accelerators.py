import sys

import pytest

from jaxlm.core import accelerators


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A machine without accelerators, whose device files the test creates."""
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(accelerators, "_FILES", (str(tmp_path / "nvidia*"),))
    monkeypatch.setattr(accelerators, "_NVIDIA", str(tmp_path / "gpus/*/information"))
    return tmp_path


def test_a_machine_without_accelerators_is_its_cpu(place):
    assert (accelerators.found(), accelerators.platforms()) == ((), "cpu")


def test_what_is_there_is_left_to_jax(place):
    (place / "nvidia0").touch()
    (place / "gpus/0").mkdir(parents=True)
    (place / "gpus/0/information").write_text("Model: \t\t NVIDIA H200\nIRQ: 5\n")
    files, model = accelerators.found()[::-1]
    assert files.endswith("nvidia0") and model.endswith("information: NVIDIA H200")
    assert accelerators.platforms() == ""


def test_what_is_asked_for_is_kept(place, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert accelerators.platforms() == "cuda"
