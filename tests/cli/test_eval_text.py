"""The text that `jaxlm eval` measures on."""

import json
import re

import pytest
from runs import untrained, write_config

from jaxlm import api, config
from jaxlm.cli import main
from jaxlm.cli.progress import Bar
from jaxlm.core.errors import InputError
from jaxlm.data.dataset import prepare
from jaxlm.data.tokenizers import bytes_tokenizer
from jaxlm.runs.folder import Run
from jaxlm.runs.source import text_rows
from jaxlm.runs.trained import RunText


@pytest.fixture
def text(tmp_path):
    """Return the text that eval measures, held-out or other, of a run on forty documents, under overrides."""
    folder = tmp_path / "text"
    folder.mkdir()
    run = Run(tmp_path / "run")
    run.paths.directory.mkdir()
    written = write_config(folder, f"data.text={folder}/*.txt", f"data.cache={tmp_path}/cache")
    run.paths.config.write_text(written.read_text())
    bytes_tokenizer().save(run.paths.tokenizer)
    experiment = run.experiment()
    run.paths.data.write_text(json.dumps({"digest": prepare(experiment.data, experiment.model.vocab_size).digest}))

    def text(*overrides: str, data: str | None = None) -> dict:
        experiment = config.load(run.paths.config, overrides)
        with Bar(steps=0) as bar:
            if data is None:
                return RunText(run).held_out(experiment, bar)
            return text_rows(experiment, data, run.load_tokenizer(), None, bar)

    return text


def test_the_text_is_what_was_held_out(text):
    assert text()["data"].store.targets


@pytest.mark.parametrize("key", ["held_out=0.5", "field=body", "documents=3", "tokenizer=characters"])
def test_an_override_that_makes_other_text_is_named_before_it_is_tokenized(key, text, tmp_path, capsys):
    (tmp_path / "text").rename(tmp_path / "elsewhere")
    assert main(["eval", str(tmp_path / "run"), f"data.{key}"]) == 2
    out, error = capsys.readouterr()
    said = rf"jaxlm: data\.{key.partition('=')[0]} is not what .*/run was trained with.*; leave it out"
    assert out == "" and re.match(said, error) and error.count("\n") == 1


def test_files_that_are_other_text_are_named(text, tmp_path):
    (tmp_path / "other.txt").write_text("something else " * 99)
    with pytest.raises(InputError, match=r"^data\.text is not what .*/run was trained with.*; leave it out"):
        text(f"data.text={tmp_path}/other.txt")


def test_other_text_that_is_not_there_is_named_as_it_was_given(text, tmp_path):
    with pytest.raises(InputError, match="^--data: .*/nowhere") as refused:
        text(data=f"{tmp_path}/nowhere")
    assert "data.text" not in str(refused.value)
    (tmp_path / "short.txt").write_text("")
    with pytest.raises(InputError, match="^--data: "):
        text(data=f"{tmp_path}/short.txt")


def test_an_override_that_makes_the_same_text_is_taken(text, tmp_path):
    (tmp_path / "text").rename(tmp_path / "moved")
    assert text(f"data.text={tmp_path}/moved/*.txt", f"data.cache={tmp_path}/other", "data.max_broken=0.5")


def test_text_that_changed_is_said_to_have(text, tmp_path):
    (tmp_path / "text" / "0.txt").write_text("something else")
    with pytest.raises(InputError, match="^the text of .*/run has changed"):
        text(f"data.cache={tmp_path}/other")


def test_other_data_is_read_whole_and_what_is_broken_of_it_is_said(text, tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text('{"text": "some words"}\n' * 9 + "broken\n")
    rows = text("data.documents=3", "data.max_broken=0.5", data=str(tmp_path / "other.jsonl"))["data"]
    assert len(rows.store.lengths) == 9
    out, error = capsys.readouterr()
    assert out == "" and "skipped: " in error and "other.jsonl:10 is not JSON" in error


def test_a_run_is_measured_where_its_compiler_options_are_unknown(tmp_path):
    run = Run(untrained(tmp_path / "run", "model.num_layers=1"))
    section = "[execution.compiler_options]\n"
    trained = run.paths.config.read_text()
    assert section in trained
    run.paths.config.write_text(trained.replace(section, f"{section}xla_of_another_chip = 1\n"))
    (tmp_path / "other.txt").write_text("some words " * 99)
    assert api.load(run.paths.directory).evaluate(str(tmp_path / "other.txt")).loss > 0


def test_data_without_a_name_is_refused(tmp_path, capsys):
    assert main(["eval", str(tmp_path), "--data", ""]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("jaxlm: --data names no text") and error.count("\n") == 1
