"""Steps that the memory here cannot hold, refused before any text is read."""

import contextlib
from pathlib import Path

import pytest

from jaxlm import config
from jaxlm.cli import main
from jaxlm.config import mesh_layout
from jaxlm.core.errors import InputError
from jaxlm.costs import capacity
from jaxlm.costs.counted.memory import memory
from jaxlm.costs.workload import Workload

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def cpu(monkeypatch):
    """A machine with 16 GiB and no accelerator."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setattr(capacity, "_of_this_machine", lambda: 2**34)


def test_a_large_model_is_refused_before_its_tokenizer_is_trained(cpu, tmp_path, monkeypatch, capsys):
    def read(*_):
        raise AssertionError("text is read")

    monkeypatch.setattr("jaxlm.runs.job.prepare", read)
    assert main(["train", str(CONFIGS / "models" / "llama3.1-8b.toml"), "--out", str(tmp_path / "run")]) == 2
    out, error = capsys.readouterr()
    line = error.splitlines()[-1]
    assert out == "" and "Traceback" not in error and not (tmp_path / "run").exists()
    assert line.startswith("jaxlm: a step needs ") and "TiB of memory on each device (" in line
    assert "which has 16.00 GiB: choose a smaller model, or more devices; jaxlm plan says" in line


def test_a_large_batch_is_told_what_to_lower(cpu):
    with pytest.raises(InputError, match="which has 16.00 GiB: lower training.batch or training.sequence"):
        capacity.check_before_reading(config.load(CONFIGS / "quickstart.toml", ["training.batch=65536"]))


def test_a_mesh_that_is_not_here_is_refused_too(cpu, monkeypatch):
    with pytest.raises(InputError, match="the mesh needs 100000 devices of this CPU"):
        capacity.check_before_reading(
            config.load(CONFIGS / "quickstart.toml", ["mesh.data=100000", "training.batch=100000"])
        )
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    with pytest.raises(InputError, match="devices"):
        capacity.check_before_reading(config.load(CONFIGS / "quickstart.toml", ["mesh.data=16"]))


@pytest.mark.parametrize("devices", [2, 4])
def test_devices_that_xla_flags_give_are_those_of_the_mesh(cpu, monkeypatch, devices):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")
    experiment = config.load(CONFIGS / "quickstart.toml", ["mesh.data=2", "mesh.tensor=2"])
    with contextlib.nullcontext() if devices == 4 else pytest.raises(InputError, match="2 devices"):
        capacity.check_before_reading(experiment)


@pytest.mark.parametrize("name", ["quickstart", "shakespeare_char", "data_mixture", "experts"])
def test_a_small_model_is_not_counted_and_would_not_be_refused(cpu, monkeypatch, name):
    experiment = config.load(CONFIGS / f"{name}.toml")
    needed = memory(Workload.of(experiment).on_cpu())
    assert needed.total < capacity._at_most(experiment) < 2**36
    capacity.check(needed, needed.total)
    capacity.check_before_reading(experiment)
    with pytest.raises(InputError):
        capacity.check(needed, needed.total // 3)


@pytest.mark.parametrize("name", ["gpt2-124m", "gemma2-9b", "qwen3-8b", "llama2-7b"])
def test_nothing_published_is_taken_for_small(name):
    experiment = config.load(CONFIGS / "models" / f"{name}.toml")
    assert memory(Workload.of(experiment).on_cpu()).total < capacity._at_most(experiment)


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("hybrid", ["mesh.pipeline=2", "execution.dtype=float32"], "a pipeline needs layers of one structure"),
        ("hybrid", ["mesh.pipeline=2", "execution.dtype=bfloat16"], "XLA compiles no pipeline for CPUs in it"),
        ("hybrid", ["mesh.context=2"], "gated_delta reads the tokens of a sequence in order: set mesh.context to 1"),
        ("quickstart", ["mesh.context=8", "execution.context_parallel=heads"], "8 does not divide .* the 4 of keys"),
    ],
)
def test_a_mesh_that_does_not_suit_the_model_is_refused_before_text_is_read(cpu, name, overrides, says):
    with pytest.raises(InputError, match=says):
        capacity.check_before_reading(config.load(CONFIGS / f"{name}.toml", overrides))


def test_an_expert_axis_without_experts_is_said_and_its_setting_refused():
    experiment = config.load(CONFIGS / "quickstart.toml", ["mesh.expert=2"])
    said = mesh_layout.say_layout(experiment, mesh_layout.layout(experiment, 2))
    assert said == "mesh.expert = 2 is more of mesh.fsdp: the model has no experts"
    mixture = config.load(CONFIGS / "experts.toml", ["mesh.expert=2"])
    assert mesh_layout.say_layout(mixture, mesh_layout.layout(mixture, 2)) is None
    chosen = experiment.execution.model_copy(update={"expert_parallel": "all_to_all"})
    with pytest.raises(InputError, match="all_to_all is of experts, and the model has none: set .* to auto"):
        mesh_layout.layout(experiment.model_copy(update={"execution": chosen}), 2)
