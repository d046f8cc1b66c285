"""Keys that the command line sets."""

import re

import pytest
from config_fixtures import SMALL, changed, refusal

from jaxlm.config import load
from jaxlm.config.overrides import overridden


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("training.log_every=7", "training.log_every", 7),
        ("optimizer.learning_rate=1e-5", "optimizer.learning_rate", 1e-5),
        ("optimizer.weight_decay=0", "optimizer.weight_decay", 0.0),
        ("model.tied_embeddings=true", "model.tied_embeddings", True),
        ("execution.dtype=bfloat16", "execution.dtype", "bfloat16"),
        ('execution.dtype="bfloat16"', "execution.dtype", "bfloat16"),
        (" execution.dtype = 'bfloat16'", "execution.dtype", "bfloat16"),
        ("mesh.fsdp=2", "mesh.fsdp", 2),
        ("data.text=some/file.txt", "data.text", ("some/file.txt",)),
        ("data.text=a=b #1.txt", "data.text", ("a=b #1.txt",)),
        ('data.text=["a.txt", "b.md"]', "data.text", ("a.txt", "b.md")),
        ("execution.remat=full", "execution.remat", "full"),
        ("execution.remat=['query', 'up']", "execution.remat", ("query", "up")),
        ("optimizer.schedule.warmup_steps=3", "optimizer.schedule.warmup_steps", 3),
        ("optimizer.schedule={warmup_steps=3, decay_steps=400}", "optimizer.schedule.warmup_steps", 3),
        ("checkpoint.keep=5", "checkpoint.keep", 5),
    ],
)
def test_an_override_sets_its_key_and_no_other(override, key, value):
    assert changed(override) == {key: value}


def test_the_last_override_of_a_key_holds():
    assert changed("training.batch=4", "training.batch=6") == {"training.batch": 6}


def test_fsdp_over_all_devices_is_the_default_and_can_be_said():
    assert load(SMALL).mesh.fsdp == "all" and changed("mesh.fsdp=all") == {}


@pytest.mark.parametrize("override", ["training.steps", "=3", "training.=3", ".steps=3", "a..b=3", ""])
def test_an_override_that_is_none_is_quoted_with_an_example(override):
    assert refusal(override).startswith(f"{override!r} is no override; write key=value, such as ")


def test_a_value_has_no_keys():
    said = refusal("training.steps.more=3")
    assert "training.steps.more" in said and "steps is a value" in said


def test_the_keys_that_overrides_set_are_named():
    given = ["training.steps=3", "mesh={data=2, tensor=2}", "data.sources.web.weight=2", "data.tokenizer=bytes"]
    assert overridden(given) == [
        "training.steps", "mesh.data", "mesh.tensor", "data.sources.web.weight", "data.tokenizer",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "key",
    [
        "model.attention.window=5",
        "model.attention.head_dim=12",
        "model.position.scaling={factor=4.0, original_context_length=128}",
        "model.logit_soft_cap=3.0",
        "optimizer.schedule.decay_steps=7",
        "training.epochs=2",
        "data.validation=other.txt",
        "inference.context=9",
        "lora.rank=2",
    ],
)
def test_none_leaves_a_key_unset(key):
    """As where no file gives it; also a whole table, and a key whose default follows from others."""
    name = key.partition("=")[0]
    assert changed(key) and changed(key, f"{name.replace('lora.rank', 'lora')}=none") == {}
    assert changed("model.attention.num_kv_heads=none") == {"model.attention.num_kv_heads": 8}  # as many as heads


def test_none_in_place_of_what_a_file_or_an_entry_of_a_pattern_inherits(tmp_path):
    (tmp_path / "base.toml").write_text((tmp_path / SMALL).read_text() + "[lora]\nrank = 2\n")
    assert load("base.toml").lora is not None and load("base.toml", ["lora=none"]).lora is None
    entries = "[{name='far', attention={window='none'}}, {name='near'}]"
    layers = load(SMALL, ["model.attention.window=5", f"model.pattern={entries}"]).model.layers
    assert [layer.window for layer in layers] == [None, 5, None, 5]


def test_none_is_a_value_where_a_key_has_it_or_cannot_be_unset():
    assert changed("model.position.kind=none")["model.position.kind"] == "none"
    assert load(SMALL, ["model.attention.qk_norm=none"]).model.attention.qk_norm == "none"
    assert "training.batch = 'none'" in refusal("training.batch=none")
    assert "unknown key model.windows" in refusal("model.windows=none")


def test_unset_steps_keep_the_epochs_of_the_file(tmp_path):
    text = (tmp_path / SMALL).read_text()
    (tmp_path / "epochs.toml").write_text(re.sub(r"(?m)^steps = \d+$", "epochs = 2", text))
    assert load("epochs.toml", ["training.steps=none"]) == load("epochs.toml")
    assert load("epochs.toml").training.epochs == 2


def test_states_that_could_not_be_kept_are_refused():
    recurrent = "model.attention.kind=short_convolution"
    said = "inference.state_interval = 300 must be a multiple of inference.page = 128, such as 384"
    assert said in refusal(recurrent, "inference.state_interval=300")
    for override, every in (("inference.state_interval=384", 384), ("inference.page=96", 576)):
        assert load(SMALL, [recurrent, override]).inference.settings().states_every == every
    said = "inference.state_interval = 512 is of recurrent layers, and this model has none; leave it out"
    assert said in refusal("inference.state_interval=512")


def test_a_context_that_the_model_does_not_have_is_refused():
    longest = load(SMALL).model.context_length
    assert load(SMALL, [f"inference.context={longest}"]).inference.context == longest
    said = f"inference.context = {longest + 1} is longer than model.context_length = {longest}; lower it"
    assert said in refusal(f"inference.context={longest + 1}")
