import json

import pytest

from jaxlm.core.errors import InputError
from jaxlm.training import sinks
from jaxlm.training.config import RecordsConfig
from jaxlm.training.goodput import Attempts, summary
from jaxlm.training.paths import RunPaths
from jaxlm.training.recorder import Recorder

ONLY_FILES = RecordsConfig(tensorboard=False)


def record(run, resumed, steps, settings, scale=1.0):
    with Recorder(RunPaths(run), settings, resumed, {"training": {"seed": 0}}) as recorder:
        for step in steps:
            recorder.write("train", {"step": step, "loss": scale * step, "mfu": None})
            if step % 2 == 0:
                recorder.write("evaluation", {"step": step, "loss": -scale * step, "by_source": {"a": 1.0}})
                recorder.write("norms", {"step": step, "gradient": {"layers/up": [1.0, 2.0], "embedding": 3.0}})


def events(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, round(e.value, 4)) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_event_files_hold_every_number_of_every_row(tmp_path):
    record(tmp_path, 0, [1, 2], RecordsConfig())
    assert events(tmp_path) == {
        "train/loss": [(1, 1.0), (2, 2.0)],
        "evaluation/loss": [(2, -2.0)],
        "evaluation/by_source/a": [(2, 1.0)],
        "norms/gradient/layers/up/0": [(2, 1.0)],
        "norms/gradient/layers/up/1": [(2, 2.0)],
        "norms/gradient/embedding": [(2, 3.0)],
    }


@pytest.mark.parametrize("resumed", [0, 2, 5])
def test_a_resumed_run_has_every_point_once_and_the_newer_one(tmp_path, resumed):
    record(tmp_path, 0, range(1, 6), RecordsConfig())
    record(tmp_path, resumed, range(resumed + 1, 8), RecordsConfig(), scale=10.0)
    expected = [(step, step * (1.0 if step <= resumed else 10.0)) for step in range(1, 8)]
    assert events(tmp_path)["train/loss"] == expected
    assert events(tmp_path)["evaluation/loss"] == [(step, -value) for step, value in expected if step % 2 == 0]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == expected


def test_a_broken_line_costs_no_other(tmp_path):
    record(tmp_path, 0, range(1, 6), ONLY_FILES)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "{broken\n", "3\n", *lines[3:], '{"step": 6']))
    record(tmp_path, 5, [6], ONLY_FILES)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 4, 5, 6]


def test_what_is_written_is_known(tmp_path):
    record(tmp_path, 0, [1, 2], ONLY_FILES)
    recorder = Recorder(RunPaths(tmp_path), ONLY_FILES, 2, {})
    assert recorder.holds("evaluation", 2) and not recorder.holds("evaluation", 1)
    assert not (tmp_path / "tensorboard").exists()


def test_other_processes_of_a_job_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxlm.training.recorder.is_first", lambda: False)
    monkeypatch.setattr("jaxlm.training.records.is_first", lambda: False)
    record(tmp_path, 0, [1, 2], RecordsConfig())
    assert not list(tmp_path.iterdir())


def test_wandb_continues_one_run_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = RecordsConfig(tensorboard=False, wandb_project="tests")
    record(tmp_path, 0, [1, 2, 3], settings)
    record(tmp_path, 2, [3, 4], settings)
    starts = sorted((tmp_path / "wandb").glob("offline-run-*"))
    name = (tmp_path / "wandb_id").read_text()
    # offline-run-TIME-ID, with the suffix -1 for a second start within a second.
    assert {start.name.split("-")[3] for start in starts} == {name} and name
    assert all(list(start.glob(f"run-{name}.wandb")) for start in starts)


def test_weights_and_biases_without_a_login_is_one_line(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**_):
        raise wandb.errors.UsageError("api_key not configured (no-tty)\nmore")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(InputError, match=r"no-tty\); log in \(wandb login\), or set WANDB_MODE=offline$"):
        sinks.WeightsAndBiases(RunPaths(tmp_path), "project", {})


def test_a_package_that_is_not_here_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sinks.check_installed(None)
    with pytest.raises(InputError, match=r"pip install -e '\.\[wandb\]'"):
        sinks.check_installed("project")


@pytest.mark.parametrize("line", [b"\xff", b"3", b"{}", b"null", b"[1]", b'{"step": "x"}', b'{"step": 3'])
def test_a_line_that_is_not_whole_ends_a_file(tmp_path, line):
    record(tmp_path, 0, [1, 2], ONLY_FILES)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    record(tmp_path, 2, [3], ONLY_FILES)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]


@pytest.mark.parametrize("line", [b"3", b"{}", b'{"seconds": 3, "from_step": 0, "to_step": 1}'])
def test_a_start_that_is_not_whole_counts_for_nothing(tmp_path, line):
    path = tmp_path / "goodput.jsonl"
    whole = b'{"seconds": {"device": 3.0}, "from_step": 0, "to_step": 1}\n'
    path.write_bytes(whole + line + b"\n")
    assert summary(Attempts.file(path).rows()).seconds == {"training": 3.0}
