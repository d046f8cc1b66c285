"""The folder of a run."""

from types import SimpleNamespace

import pytest
from runs import write_config

from jaxlm.config import load
from jaxlm.core.errors import InputError
from jaxlm.core.files import replacing
from jaxlm.data.tokenizers import bytes_tokenizer
from jaxlm.runs.folder import Run
from jaxlm.runs.job_folder import JobFolder
from jaxlm.runs.trained import RunWeights
from jaxlm.training.origin import Origin


def test_a_folder_is_of_one_job(tmp_path):
    first, second = Run(tmp_path), Run(tmp_path)
    second.check_free()
    assert not list(tmp_path.iterdir())
    first.claim()
    for ask in (second.check_free, second.claim):
        with pytest.raises(InputError, match="another jaxlm train is at work in .*; wait for its end"):
            ask()
    Run(tmp_path / "not there yet").check_free()


def test_those_who_ask_at_once_are_not_in_one_another_s_way(tmp_path):
    import fcntl

    run = Run(tmp_path)
    with run.paths.lock.open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        run.check_free()


@pytest.mark.parametrize("content", ["", "null", "[]", "3", '{"digest"'])
def test_a_record_of_data_that_is_not_whole_is_refused(tmp_path, content):
    run = Run(tmp_path)
    run.paths.data.write_text(content)
    with pytest.raises(InputError, match="is no run: it has no data.json that is whole"):
        run.digest()


def test_a_tokenizer_that_was_lost_is_put_back(tmp_path):
    experiment = load(write_config(tmp_path))
    dataset = SimpleNamespace(tokenizer=bytes_tokenizer(), digest="of no data", held_out_bytes=1)
    run = JobFolder(tmp_path / "run")
    run.open(experiment, dataset)
    whole = run.paths.tokenizer.read_text()
    run.paths.tokenizer.unlink()
    run.open(experiment, dataset)
    assert run.paths.tokenizer.read_text() == whole
    begun = JobFolder(tmp_path / "begun")
    begun.paths.directory.mkdir()
    begun.paths.tokenizer.write_text('{"torn')
    begun.open(experiment, dataset)
    assert begun.paths.tokenizer.read_text() == whole


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    experiment = load(write_config(tmp_path))
    dataset = SimpleNamespace(tokenizer=bytes_tokenizer(), digest="of no data", held_out_bytes=1)
    run = JobFolder(tmp_path / "run")
    run.open(experiment, dataset)
    before = {*run.paths.directory.iterdir()}
    with replacing(run.paths.goodput) as partial:
        partial.write_text("half")
        killed = partial.rename(partial.with_name(partial.name[:-32] + "0" * 32))
        partial.touch()
    run.paths.goodput.unlink()
    assert {*run.paths.directory.iterdir()} == before | {killed}
    JobFolder(tmp_path / "run").check(experiment)
    run.open(experiment, dataset)
    assert {*run.paths.directory.iterdir()} == before


def test_a_run_remembers_the_weights_that_it_began_with(tmp_path):
    """It forgets those of a start that was cut short."""
    experiment = load(write_config(tmp_path))
    dataset = SimpleNamespace(tokenizer=bytes_tokenizer(), digest="of no data", held_out_bytes=1)
    run, base = JobFolder(tmp_path / "run"), Origin("/models/base", "published", revision="c0ffee")
    for folder in (run.paths.huggingface, run.paths.directory / f".huggingface-{'0' * 32}"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    Origin("/models/other", "run", 3).save(run.paths.origin)
    run.check(experiment, origin=base)
    run.open(experiment, dataset, origin=base, sidecar_files=lambda: {"generation_config.json": b"{}"})
    assert run.begun_from == base and RunWeights(run).sidecar_files() == {"generation_config.json": b"{}"}
    assert not [*run.paths.directory.glob(".huggingface*")]
    assert run.check(experiment, origin=base) == run.check(experiment) == []
    with pytest.raises(InputError, match="began with the weights of /models/base, not with those of /models/other"):
        run.check(experiment, origin=Origin("/models/other", "run"))
    run.paths.origin.write_text('{"torn')
    with pytest.raises(InputError, match="origin.json does not say what the run began with"):
        run.check(experiment)
    run.paths.origin.unlink()
    with pytest.raises(InputError, match="began with weights of its own, not with those of /models/base"):
        run.check(experiment, origin=base)
