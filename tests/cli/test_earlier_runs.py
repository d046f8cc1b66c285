"""Runs of before `[execution]` and `[inference]` are read and resumed, and new configurations use today's keys."""

import json
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w
from runs import losses, rows, write_config

from jaxlm import api, config
from jaxlm.cli import main
from jaxlm.config.run_name import default_run
from jaxlm.core.errors import InputError
from jaxlm.core.moved_keys import MOVED
from jaxlm.core.schema import leaves
from jaxlm.models.execution_config import ExecutionConfig
from jaxlm.runs.job_folder import JobFolder
from jaxlm.training.changes import changed_keys

# Four steps of `jaxlm train`, on the commit before these sections.
EARLIER = Path(__file__).with_name("earlier_run")


@pytest.fixture
def earlier(tmp_path) -> JobFolder:
    return JobFolder(Path(shutil.copytree(EARLIER, tmp_path / "run")))


def as_earlier(values: dict) -> dict:
    """Return the tables of a configuration as a run kept them before."""
    for before, now in MOVED.items():
        (section, name), (present, _) = before.split("."), now.split(".")
        values[section][name] = values[present][name]
    return {name: table for name, table in values.items() if name not in ("execution", "inference")}


def test_an_earlier_run_has_its_keys_where_they_moved_to(earlier):
    experiment = earlier.experiment()
    kept = {"dtype": "float32", "kernels": "xla", "remat": ("query", "up"), "scan_layers": False}
    assert experiment.execution == ExecutionConfig(**kept)
    assert (experiment.inference.sequences, experiment.inference.length) == (64, 32)
    assert config.load(earlier.paths.directory) == config.load(earlier.paths.config) == experiment
    written = earlier.paths.directory / "written.toml"
    written.write_text(experiment.to_toml())
    assert config.load(written) == experiment and not changed_keys(config.load(written), experiment)
    (summary,) = api.runs(earlier.paths.directory.parent)
    assert (summary.step, summary.loss) == (4, rows(EARLIER)[-1]["loss"])


def test_its_history_goes_on_only_where_something_changed(earlier):
    before = earlier.paths.history.read_bytes()
    data = SimpleNamespace(digest=earlier.digest(), held_out_bytes=1)
    earlier.record(earlier.experiment(), data, 3)
    assert earlier.paths.history.read_bytes() == before
    more = config.load(earlier.paths.config, ["training.log_every=2"])
    earlier.record(more, data, 4)
    first, second = rows(earlier.paths.directory, "history.jsonl")
    assert [first] == [json.loads(before)] and second["config"] == more.model_dump(mode="json")


@pytest.mark.parametrize(("before", "now"), MOVED.items(), ids=MOVED)
def test_an_earlier_key_is_refused_with_its_present_name(earlier, before, now, tmp_path):
    value = json.dumps(dict(leaves(earlier.experiment().model_dump(mode="json")))[now])
    with pytest.raises(InputError, match=f"{before} is now {now}"):
        config.load(earlier.paths.config, [f"{before}={value}"])
    copied = tmp_path / "config.toml"  # beside no run
    copied.write_text(earlier.paths.config.read_text())
    with pytest.raises(InputError, match=f"{before} is now {now}"):
        config.load(copied)


def test_a_run_in_which_somebody_wrote_both_keys_is_refused(earlier):
    with earlier.paths.config.open("a") as file:
        file.write('[execution]\ndtype = "bfloat16"\n')
    with pytest.raises(InputError, match=r"training.dtype is now execution.dtype"):
        earlier.experiment()


def test_names_of_runs_are_what_they_were(tmp_path):
    """Keys are in the order of the sections that they had."""
    file = write_config(tmp_path)
    given = ["training.batch=16", "execution.dtype=bfloat16", "optimizer.beta1=0.5", "execution.remat=full"]
    named = default_run(file, given, config.load(file, given)).as_posix()
    assert named == "runs/tiny,beta1=0.5,batch=16,dtype=bfloat16"


def test_an_earlier_run_is_resumed_bit_for_bit(tmp_path, tmp_path_factory, capsys):
    small = write_config(
        tmp_path_factory.mktemp("text"), "training.steps=6", "checkpoint.every=3", "execution.remat=full"
    )
    whole, run = tmp_path / "whole", tmp_path / "run"

    def train(out: Path, *overrides: str) -> list[str]:
        assert main(["train", str(small), "--out", str(out), *overrides]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "resumed with" in line]

    train(whole)
    train(run, "training.steps=3", "optimizer.schedule.decay_steps=6")
    paths = JobFolder(run).paths
    paths.config.write_text(tomli_w.dumps(as_earlier(tomllib.loads(paths.config.read_text()))))
    (row,) = rows(run, "history.jsonl")
    row["config"] = as_earlier(row["config"])
    paths.history.write_text(json.dumps(row) + "\n")
    assert train(run) == ["resumed with training.steps = 6, before 3"]
    assert losses(run) == losses(whole)
    first, second = rows(run, "history.jsonl")
    assert first == row and second["step"] == 4 and second["config"]["execution"]["remat"] == "full"
