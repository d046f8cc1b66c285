"""Defaults of keys that a file leaves out."""

from pathlib import Path

import pytest
from config_fixtures import CONTENT, SMALL, write

from jaxlm.config import load
from jaxlm.config.experiment import with_steps
from jaxlm.core.errors import InputError
from jaxlm.training.schedules import schedule

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_sequence_is_the_context_unless_given():
    assert load(SMALL).training.sequence == 256
    assert load(SMALL, ["model.context_length=128"]).training.sequence == 128
    assert load(SMALL, ["training.sequence=100"]).training.sequence == 100


def test_the_schedule_decays_over_the_steps_unless_given():
    assert load(SMALL).optimizer.schedule.decay_steps == 400
    assert load(SMALL, ["training.steps=50"]).optimizer.schedule.decay_steps == 50
    assert load(SMALL, ["optimizer.schedule.decay_steps=7"]).optimizer.schedule.decay_steps == 7


def test_the_schedule_decays_over_the_default_steps_too():
    experiment = load(CONFIGS / "models" / "gpt2-124m.toml")
    assert experiment.optimizer.schedule.decay_steps == experiment.training.steps


def test_epochs_take_the_place_of_steps_until_the_text_is_read():
    experiment = load(SMALL, ["training.epochs=2"])
    assert (experiment.training.steps, experiment.optimizer.schedule.decay_steps) == (None, None)
    assert load(SMALL, ["training.epochs=2", "optimizer.schedule.decay_steps=7"]).optimizer.schedule.decay_steps == 7
    resolved = with_steps(experiment, 30)
    assert (resolved.training.steps, resolved.training.epochs, resolved.optimizer.schedule.decay_steps) == (
        30,
        None,
        30,
    )
    with pytest.raises(InputError, match="training.steps and training.epochs are both given; keep one"):
        load(SMALL, ["training.epochs=2", "training.steps=30"])
    with pytest.raises(InputError, match="steps of training.epochs follow from .* text, .* set training.steps"):
        schedule(experiment.optimizer.schedule, 1.0)


def test_an_override_of_the_length_takes_the_place_of_the_other(tmp_path):
    (tmp_path / "x.toml").write_text(CONTENT.replace("steps = 400", "epochs = 3"))
    assert load(tmp_path / "x.toml", ["training.steps=9"]).training.epochs is None
    (tmp_path / "recorded.toml").write_text(with_steps(load(tmp_path / "x.toml"), 30).to_toml())
    longer = load(tmp_path / "recorded.toml", ["training.epochs=4"])
    assert (longer.training.epochs, longer.training.steps, longer.optimizer.schedule.decay_steps) == (4.0, None, None)


@pytest.mark.parametrize("kind", ["cosine", "linear", "warmup_stable_decay"])
def test_every_schedule_that_decays_does_so_over_the_steps(kind):
    schedule = load(SMALL, [f"optimizer.schedule.kind={kind}"]).optimizer.schedule
    assert (schedule.kind, schedule.decay_steps) == (kind, 400)


def test_the_optimizer_is_adamw_under_a_cosine_unless_given():
    optimizer = load(SMALL).optimizer
    assert (optimizer.kind, optimizer.schedule.kind) == ("adamw", "cosine")


def test_a_kind_brings_its_own_defaults():
    kinds = ("adamw", "muon", "adafactor", "lion", "sgd")
    rates = {kind: load(SMALL, [f"optimizer.kind={kind}"]).optimizer.learning_rate for kind in kinds}
    assert rates == {"adamw": 3e-4, "muon": 3e-4, "adafactor": 1e-2, "lion": 1e-4, "sgd": 0.1}


def test_heads_are_multi_head_and_share_the_width_unless_given():
    attention = load(SMALL, ["model.attention={num_heads=4}"]).model.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 4, 64)
    attention = load(CONFIGS / "models" / "qwen3-0.6b.toml").model.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (16, 8, 128)


@pytest.mark.parametrize("path", [SMALL, CONFIGS / "models" / "gpt2-124m.toml"], ids=["with [data]", "without [data]"])
def test_the_cache_follows_the_environment(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert load(path).data.cache == str(tmp_path / "mine" / "jaxlm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert load(path).data.cache == "~/.cache/jaxlm"
    assert load(path, ["data.cache=/there"]).data.cache == "/there"


def test_another_kind_leaves_behind_what_only_the_former_knows(tmp_path):
    """A resolved file has every key of its kinds; what is given beside the kind is refused as ever."""
    resolved = write(tmp_path / "config.toml", load(SMALL, ["optimizer.learning_rate=0.5"]).to_toml())
    former = load(resolved)
    sgd = load(resolved, ["optimizer.kind=sgd"]).optimizer
    assert (former.optimizer.kind, sgd.kind, sgd.learning_rate) == ("adamw", "sgd", 0.5)
    assert sgd.schedule == former.optimizer.schedule
    assert load(resolved, ["model.position.kind=learned"]).model.position.kind == "learned"
    for overrides in (["optimizer.epsilon=1", "optimizer.kind=sgd"], ["optimizer.kind=sgd", "optimizer.epsilon=1"]):
        with pytest.raises(InputError, match=r"unknown key optimizer.epsilon; it is a key of optimizer.kind = 'adamw'"):
            load(resolved, overrides)
    stretched = write(
        tmp_path / "stretched.toml",
        load(SMALL, ["model.position.scaling={factor=4.0, original_context_length=8}"]).to_toml(),
    )
    assert load(stretched, ["model.position.kind=learned"]).model.position.kind == "learned"
    with pytest.raises(InputError, match=r"unknown key model.position.scaling; it is a key of model.position.kind"):
        load(stretched, ["model.position.kind=learned", "model.position.scaling.factor=2.0"])
    listed = write(tmp_path / "listed.toml", stretched.read_text().replace('kind = "llama3"', 'kind = ["llama3"]'))
    with pytest.raises(InputError, match="unknown key model.position.scaling.low"):
        load(listed, ["model.position.scaling.kind=linear"])


SIZES = "[model]\nvocab_size = 300\ncontext_length = 64\nnum_layers = 2\nd_model = 96\n"


def test_sizes_alone_make_a_model(tmp_path):
    model = load(write(tmp_path / "mine.toml", f"{SIZES}[model.attention]\nnum_heads = 4\n")).model
    sections = (model.norm, model.position, model.attention, model.feed_forward)
    assert [section.kind for section in sections] == ["rms", "rope", "gqa", "dense"]
    assert (model.attention.num_kv_heads, model.attention.head_dim) == (4, 24)
    assert (model.feed_forward.activation, model.feed_forward.gated, model.feed_forward.d_ff) == ("silu", True, 256)


@pytest.mark.parametrize(
    ("table", "is_gated", "d_ff"),
    [
        ("", True, 256),
        ('activation = "gelu"', False, 384),
        ("gated = false", False, 384),
        ('activation = "gelu"\ngated = true', True, 256),
        ("d_ff = 100", True, 100),
    ],
)
def test_the_default_activation_is_gated_and_the_width_follows(table, is_gated, d_ff, tmp_path):
    """A file that names its activation is what it always was."""
    content = f"{SIZES}attention = {{ num_heads = 4 }}\n[model.feed_forward]\n{table}\n"
    feed_forward = load(write(tmp_path / "mine.toml", content)).model.feed_forward
    assert (feed_forward.gated, feed_forward.d_ff) == (is_gated, d_ff)


def test_a_norm_without_a_kind_is_rms():
    assert load(SMALL, ["model.norm={epsilon=1e-6}"]).model.norm.kind == "rms"
