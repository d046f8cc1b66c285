"""A model that stands on another file's."""

from pathlib import Path

import pytest
from config_fixtures import CONTENT, SMALL, flat, refusal, write

from jaxlm.config import load
from jaxlm.core.errors import InputError
from jaxlm.models.norm_config import LayerNormConfig


@pytest.fixture
def base(tmp_path):
    model = CONTENT.partition("[data]")[0]
    return write(tmp_path / "models" / "small.toml", model + "[training]\nsteps = 123\n")


def test_a_base_is_found_from_the_file_that_names_it(base, tmp_path, monkeypatch):
    expected = load(SMALL).model
    path = write(tmp_path / "runs" / "mine.toml", '[model]\nbase = "../models/small.toml"\n')
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert load(path).model == expected


def test_the_other_keys_of_a_model_change_its_base(base):
    path = base.with_name("mine.toml")
    write(path, '[model]\nbase = "small.toml"\nnum_layers = 9\nattention.num_kv_heads = 2\nnorm.epsilon = 1e-3\n')
    before, after = (flat(load(p).model.model_dump()) for p in (SMALL, path))
    assert {key: value for key, value in after.items() if before[key] != value} == {
        "num_layers": 9,
        "attention.num_kv_heads": 2,
        "norm.epsilon": 1e-3,
    }


def test_a_table_of_another_kind_takes_the_place_of_its_base(tmp_path):
    big = Path(__file__).parents[2] / "configs" / "models" / "llama3.1-8b.toml"

    def on_it(changes):
        return load(write(tmp_path / "mine.toml", f"[model]\nbase = {str(big)!r}\n{changes}\n")).model

    assert on_it('position = { kind = "learned" }').position.model_dump() == {"kind": "learned"}
    assert on_it('norm.kind = "layer"').norm.model_dump() == LayerNormConfig().model_dump()
    before, after = load(big).model.position, on_it('position = { kind = "rope", theta = 5.0 }').position
    assert before.scaling is not None and after == before.model_copy(update={"theta": 5.0})


def test_defaults_that_depend_on_other_keys_follow_a_changed_base(base):
    path = write(base.with_name("mine.toml"), '[model]\nbase = "small.toml"\nd_model = 512\ncontext_length = 64\n')
    experiment = load(path)
    assert (experiment.model.attention.head_dim, experiment.training.sequence) == (64, 64)


def test_only_the_model_of_a_base_counts(base):
    assert load(write(base.with_name("mine.toml"), '[model]\nbase = "small.toml"\n')).training.steps == 1000


def test_overrides_change_what_a_base_says(base):
    path = write(base.with_name("mine.toml"), '[model]\nbase = "small.toml"\nnum_layers = 9\n')
    assert load(path, ["model.num_layers=3", "model.attention.num_kv_heads=8"]).model.attention.num_kv_heads == 8
    assert load(path, ["model.num_layers=3"]).model.num_layers == 3


def test_the_resolved_file_needs_no_base(base, tmp_path):
    experiment = load(write(base.with_name("mine.toml"), '[model]\nbase = "small.toml"\nnum_layers = 9\n'))
    assert load(write(tmp_path / "elsewhere" / "config.toml", experiment.to_toml())) == experiment


def test_a_missing_base_is_named(tmp_path):
    said = refusal(path=write(tmp_path / "mine.toml", '[model]\nbase = "nowhere.toml"\n'))
    assert "nowhere.toml" in said


@pytest.mark.parametrize("content", ["model = 5\n", "model = [1]\n"])
def test_a_base_whose_model_is_no_section_is_refused(tmp_path, content):
    write(tmp_path / "odd.toml", content)
    said = refusal(path=write(tmp_path / "mine.toml", '[model]\nbase = "odd.toml"\n'))
    assert "model" in said and ".toml" in said


def test_a_base_may_have_a_base_but_not_itself(tmp_path):
    write(tmp_path / "a.toml", SMALL.read_text())
    write(tmp_path / "b.toml", '[model]\nbase = "a.toml"\nnum_layers = 7\n')
    model = load(write(tmp_path / "c.toml", '[model]\nbase = "b.toml"\ncontext_length = 32\n')).model
    assert (model.num_layers, model.context_length) == (7, 32) and model.d_model == load(SMALL).model.d_model
    with pytest.raises(InputError, match="leads back to itself"):
        load(write(tmp_path / "d.toml", '[model]\nbase = "d.toml"\n'))
