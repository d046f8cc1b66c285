import os
import sys

import pytest

from jaxlm.core import accelerators
from jaxlm.costs.plan import HEADROOM


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


@pytest.mark.parametrize(
    ("file", "given", "share"),
    [
        ("nvidia0", {}, "0.9"),
        ("nvidia0", {"XLA_CLIENT_MEM_FRACTION": "0.5"}, "0.5"),
        ("nvidia0", {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, None),  # JAX refuses both names at once
        ("nvidia0", {"JAX_PLATFORMS": "cpu"}, None),
        ("accel0", {}, None),
        (None, {}, None),
    ],
)
def test_jax_takes_as_much_of_a_gpu_as_plans_count_on(place, monkeypatch, file, given, share):
    environment = {key: value for key, value in os.environ.items() if "MEM_FRACTION" not in key} | given
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(accelerators, "_FILES", (str(place / "*"),))
    monkeypatch.setattr(accelerators, "_GPUS", (str(place / "nvidia"),))
    monkeypatch.setattr("jax.config.update", lambda *setting: None)
    if file:
        (place / file).touch()
    accelerators.choose()
    assert environment.get("XLA_CLIENT_MEM_FRACTION") == share
    assert accelerators.GPU_MEMORY_SHARE == 1 - HEADROOM
