"""Keys that the command line sets."""

import pytest
from config_fixtures import SMALL, changed, refusal

from jaxlm.config import load, overridden


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
