"""Configurations that come with jaxlm, by their names."""

from pathlib import Path

import pytest
from config_fixtures import SMALL, refusal, write

from jaxlm.config import load
from jaxlm.config.run_name import default_run
from jaxlm.core import bundled

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = {path.stem: path for path in CONFIGS.rglob("*.toml")}


def test_every_configuration_has_a_name():
    assert {name: path.resolve() for name, path in bundled.configurations().items()} == NAMES
    assert list(bundled.configurations())[:5] == ["data_mixture", "example", "experts", "hybrid", "quickstart"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_configuration_from_any_folder(name):
    assert load(name) == load(NAMES[name])
    assert load(name, ["training.batch=2"]).training.batch == 2


def test_a_path_that_exists_goes_before_a_name():
    Path("quickstart").write_text(SMALL.read_text())
    assert load("quickstart") == load(SMALL) != load(NAMES["quickstart"])


@pytest.mark.parametrize("name", ["quickstart", "llama3.1-8b"])
def test_the_default_folder_is_that_of_the_path(name):
    for overrides in ([], ["training.batch=2"]):
        by_name, by_path = (
            default_run(path, overrides, load(path, overrides)) for path in (Path(name), Path(NAMES[name]))
        )
        assert by_name == by_path and by_name.name.startswith(name)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("llama3-8b", "did you mean llama3.1-8b?"),
        ("configs/quickstart.toml", "did you mean quickstart?"),
        ("xyzzy", "jaxlm config --list names them"),
    ],
)
def test_what_is_no_name_is_told_the_nearest(given, hint):
    assert refusal(path=Path(given)) == f"{given} is neither a file nor one of jaxlm's configurations; {hint}"


def test_a_base_may_be_a_name():
    mine = write(Path("folder/mine.toml"), '[model]\nbase = "llama3.1-8b"\nnum_layers = 2\n')
    assert load(mine).model == load(NAMES["llama3.1-8b"], ["model.num_layers=2"]).model
    assert "did you mean llama3.1-8b?" in refusal(path=write(Path("my.toml"), '[model]\nbase = "llama3-8b"\n'))


def test_a_base_beside_the_file_goes_before_a_name():
    write(Path("folder/gpt2-124m"), SMALL.read_text())
    assert load(write(Path("folder/mine.toml"), '[model]\nbase = "gpt2-124m"\n')).model == load(SMALL).model
