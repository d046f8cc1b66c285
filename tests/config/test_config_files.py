"""Files of configurations: those that come with it, and what cannot be read."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from config_fixtures import SMALL, flat, refusal, write

from jaxlm.config import load

CONFIGS = Path(__file__).parents[2] / "configs"
ALL = sorted(CONFIGS.rglob("*.toml"))
PUBLISHED = sorted((CONFIGS / "models").glob("*.toml"))


def test_the_files_that_others_rely_on_are_there():
    names = {path.relative_to(CONFIGS).with_suffix("").as_posix() for path in ALL}
    models = "gpt2-124m gpt2-355m gpt2-774m gpt2-1.5b llama2-7b llama2-13b llama2-70b"
    models += " llama3.1-8b llama3.1-70b llama3.1-405b qwen3-0.6b qwen3-8b"
    assert {"quickstart", "shakespeare_char"} | {f"models/{name}" for name in models.split()} <= names


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_resolved_file_loads_back_to_the_same_experiment(path, tmp_path):
    experiment = load(path)
    resolved = write(tmp_path / "config.toml", experiment.to_toml())
    assert load(resolved) == experiment
    assert load(resolved).to_toml() == experiment.to_toml()


@pytest.mark.parametrize(
    "overrides",
    [
        ("execution.remat=['query', 'up']",),
        ("mesh.data=2", "mesh.fsdp=4", "mesh.tensor=2"),
        ("data.text=['a b.txt', '~/*.md', 'quo\"te.py', 'back\\slash', 'Grüße']", "data.tokenizer=a/t.json"),
        ("model.position.scaling={factor=4.0, original_context_length=128}", "training.sequence=100"),
        ("model.attention.window=16", "model.logit_soft_cap=30.0"),
        ("model.pattern=[{name='a', attention={num_heads=16}, norm_placement='both'}, {name='b', layers='rest'}]",),
        ("optimizer.learning_rate=1.2345678901234567e-5", "optimizer.epsilon=1e-30"),
        ("optimizer.kind=muon", "optimizer.adam_learning_rate=1e-3", "training.ema_decay=0.999"),
        ("optimizer.groups=[{pattern='*/scale', weight_decay=0.5}, {pattern='*', learning_rate_scale=0}]",),
        ("optimizer={kind='lion', schedule={kind='constant', warmup_steps=3}}",),
    ],
    ids=lambda overrides: overrides[0].partition("=")[0],
)
def test_overrides_are_resolved_and_loaded_back(overrides, tmp_path):
    experiment = load(SMALL, overrides)
    assert experiment != load(SMALL)
    assert load(write(tmp_path / "config.toml", experiment.to_toml())) == experiment


def test_a_resolved_file_holds_every_key():
    """A default that changes later does not change an old run."""
    written = flat(tomllib.loads(load(SMALL).to_toml()))
    missing = flat(load(SMALL).model_dump()).keys() - written.keys()
    # None cannot be written.
    records = {"records.wandb_project", "records.norms_every"}
    records |= {
        f"inference.{name}"
        for name in ("cache_dtype", "cache_memory", "context", "speculate", "state_interval", "steps_per_dispatch")
    }
    attention = {f"model.attention.{name}" for name in ("scale", "soft_cap", "window")}
    model = {"model.position.scaling", "model.logit_soft_cap"} | attention
    kinds = ("chat", "preferences", "chat_template", "validation")
    data = {f"data.{name}" for name in ("documents", "if_missing", "held_out", *kinds)}
    assert (
        missing
        == model
        | data
        | {"training.ema_decay", "training.epochs", "training.local_sgd", "checkpoint.memory_every", "dpo", "lora"}
        | records
    )


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_published_architecture_is_a_model_and_nothing_else(path):
    assert set(tomllib.loads(path.read_text())) == {"model"}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_file_opens_with_the_command_that_runs_it(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# jaxlm train configs/{path.relative_to(CONFIGS).as_posix()}")


def test_configurations_need_no_jax():
    code = "import sys, jaxlm.config; raise SystemExit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "neither a file nor"),
        (b"[model", "is not TOML"),
        (b"[model]\nnum_layers = 1\nnum_layers = 2\n", "is not TOML"),
        (b"name = '\xff'", "cannot be read"),
    ],
    ids=["missing", "broken", "twice", "latin-1"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, says):
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    said = refusal(path=path)
    assert "mine.toml" in said and says in said


def test_a_directory_is_no_configuration(tmp_path):
    assert str(tmp_path) in refusal(path=tmp_path)
