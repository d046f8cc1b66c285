"""`jaxlm runs` and `jaxlm compare`, on folders as training leaves them."""

import json
import os
import re
import time
import tomllib
from pathlib import Path

import pytest
import runs

from jaxlm.cli import main
from jaxlm.config import load
from jaxlm.runs.folder import Run
from jaxlm.training.origin import Origin
from jaxlm.training.paths import RunPaths

STEPS = 40


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return runs.write_config(tmp_path_factory.mktemp("text"))


@pytest.fixture
def make(config, tmp_path):
    """Return a function that makes a run with records up to a step, last written some seconds ago."""

    def make(name: str, *overrides: str, step: int = STEPS, offset: float = 0.0, ago: float = 0.0) -> Path:
        paths = RunPaths(tmp_path / name)
        paths.directory.mkdir(parents=True)
        paths.config.write_text(load(config, overrides).to_toml())
        paths.data.write_text(json.dumps({"digest": "of no data", "held_out_bytes": 1}))
        every = {paths.metrics: 5, paths.evaluations: 20}
        for path, apart in every.items():
            rows = [{"step": i, "loss": offset + 4.0 - i / 100} for i in range(apart, step + 1, apart)]
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        then = time.time() - ago
        for path in (paths.config, *every):
            os.utime(path, (then, then))
        return paths.directory

    return make


def printed(capsys, *arguments):
    assert main(list(map(str, arguments))) == 0
    return capsys.readouterr().out


def test_runs_are_listed_with_state_step_loss_and_age(make, tmp_path, monkeypatch, capsys):
    make("finished", ago=7200)
    make("sweep/lr=[1e-3]", step=10, ago=60)
    going = Run(make("going", step=25, ago=1))
    going.claim()
    for checkpoint in ("20", "25"):
        (going.paths.checkpoints / checkpoint).mkdir(parents=True)
    (going.paths.checkpoints / "20" / "checksums.json").write_text("{}")  # that of 25 is still being written
    Run(RunPaths(tmp_path / "finished").directory).claim()  # its process still lives
    RunPaths(make("unreadable", ago=90_000 * 2)).config.write_text("[model\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("")
    monkeypatch.setenv("COLUMNS", "200")
    shown = [line.split() for line in printed(capsys, "runs", tmp_path).splitlines() if str(tmp_path) in line]
    assert [(Path(run).name, *rest) for run, *rest in shown] == [
        ("unreadable", "unreadable", "40/–", "–", "3.6000", "3.6000", "0", "s"),
        ("going", "running", "25/40", "20", "3.7500", "3.8000", "1", "s"),
        ("lr=[1e-3]", "stopped", "10/40", "–", "3.9000", "–", "1", "min"),
        ("finished", "finished", "40/40", "–", "3.6000", "3.6000", "2", "h"),
    ]
    found = json.loads(printed(capsys, "runs", tmp_path, "--json"))["runs"]
    assert [run["state"] for run in found] == [row[1] for row in shown]
    assert found[2]["held_out_loss"] is None and found[3]["age_s"] == pytest.approx(7200, abs=60)


def test_a_run_of_kinds_that_are_not_registered_is_listed(make, tmp_path, capsys):
    paths = RunPaths(make("mine", step=25))
    paths.config.write_text(paths.config.read_text().replace('kind = "gqa"', 'kind = "of_a_plugin"'))
    assert main(["plan", str(tmp_path / "mine"), "--on", "h100:1"]) == 2
    capsys.readouterr()
    (run,) = json.loads(printed(capsys, "runs", tmp_path, "--json"))["runs"]
    assert (run["state"], run["step"], run["steps"]) == ("stopped", 25, 40)


def test_a_folder_without_runs_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 2
    assert capsys.readouterr().err == "jaxlm: runs is no folder; give one that holds runs\n"
    assert printed(capsys, "runs", tmp_path) == f"{tmp_path} holds no run; jaxlm train or jaxlm import makes one\n"


def test_runs_are_compared_by_keys_steps_and_tokens(make, tmp_path, capsys):
    """With twice the batch, step 5 of one run has the tokens of step 10 of the other."""
    folders = make("a"), make("b", "training.batch=16", "optimizer.learning_rate=0.5", offset=1.0)
    found = json.loads(printed(capsys, "compare", *folders, "--json", "--png", tmp_path / "new" / "losses.png"))
    assert found["runs"] == [str(folder) for folder in folders]
    assert found["keys"] == {"training.batch": [8, 16], "optimizer.learning_rate": [pytest.approx(0.001, abs=1), 0.5]}
    steps, tokens = found["training"]["steps"], found["training"]["tokens"]
    assert [row["at"] for row in steps] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert steps[-1]["losses"] == pytest.approx([3.6, 4.6])
    assert [row["at"] for row in tokens] == [32 * 8 * step for step in (10, 20, 30, 40)]
    assert tokens[-1]["losses"] == pytest.approx([3.6, 4.8])
    assert [row["at"] for row in found["held_out"]["steps"]] == [20, 40]
    assert (tmp_path / "new" / "losses.png").read_bytes().startswith(b"\x89PNG")

    shown = printed(capsys, "compare", *folders)
    assert f"A {folders[0]}\nB {folders[1]}\n" in shown
    assert re.search(r"^key +A +B$", shown, re.M) and re.search(r"^training\.batch +8 +16$", shown, re.M)
    assert "training loss at equal tokens" in shown and re.search(r"10,240 +3\.6000 +4\.8000", shown)


def test_runs_show_the_model_that_they_began_with(make, tmp_path, capsys):
    """Not as a tokenizer, of which each has a copy."""
    folders = [make(name, f"data.tokenizer={tmp_path / name / 'tokenizer.json'}") for name in ("a", "b", "c")]
    for folder, step in zip(folders, (20, 20, None), strict=True):
        Origin("/models/base", "run", step).save(RunPaths(folder).origin)
    assert printed(capsys, "runs", tmp_path).count("/models/base, step 20\n") == 2
    assert "no key differs" in printed(capsys, "compare", *folders[:2])
    found = json.loads(printed(capsys, "compare", *folders[1:], "--json"))["keys"]
    assert found == {"--from": ["/models/base, step 20", "/models/base"]}


def test_what_is_equal_or_missing_is_said(make, capsys):
    same = printed(capsys, "compare", make("a"), make("b"))
    assert "no key differs" in same and "tokens" not in same
    apart = printed(capsys, "compare", make("c", step=10), make("d"))
    assert "held-out loss at equal steps: no step has one in every run" in apart
    nothing = printed(capsys, "compare", make("e"), make("f", step=0), make("g", step=0))
    *_, last = " ".join(nothing.split()).partition("no losses")
    assert re.fullmatch(" are compared: [^ ]*f, [^ ]*g have none on record", last)
    assert "at equal steps" not in nothing


def test_what_cannot_be_compared_is_one_line(make, tmp_path, capsys):
    run, _ = make("a"), make("quick,steps=9")
    for arguments, says in (
        ([run], "compare takes 2 to 26 runs, not 1"),
        ([run, tmp_path], "is no run: it holds no config.toml, nor the config.json of a Hugging Face directory"),
        ([run, tmp_path / "b"], f"there is no run {tmp_path / 'b'}; jaxlm train makes one"),
        (
            [run, tmp_path / "quick"],
            f"there is no run {tmp_path / 'quick'}; did you mean {tmp_path / 'quick,steps=9'}?",
        ),
        ([run, run / "config.toml"], "config.toml is a file and no run; give a run, a Hugging Face directory or hf:"),
        ([run, run, "--png", tmp_path], "cannot be written: Is a directory"),
    ):
        assert main(["compare", *map(str, arguments)]) == 2
        assert says in capsys.readouterr().err


def test_many_runs_keep_their_numbers_in_80_columns(make, capsys):
    shown = printed(capsys, "compare", *(make(f"run-{i}", offset=i) for i in range(9)))
    assert "…" not in shown and max(map(len, shown.splitlines()[9:])) <= 80
    assert all(f"{3.6 + i:.4f}" in shown for i in range(9))


def test_tensorboard_is_installed_by_what_the_docs_tell():
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (root / "docs" / "training.md").read_text(encoding="utf-8")
    (extra,) = re.findall(r"tensorboard --logdir runs`[^|]*`pip install (?:-e )?'\.\[([\w-]+)\]'`", text)
    assert any(package.startswith("tensorboard>") for package in extras[extra])
