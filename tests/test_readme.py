"""README.md and the program in docs/python.md run unchanged; the program uses exactly the names of `jaxlm.api`."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import meshes
import pytest
import runs

from jaxlm import api, cli, config
from jaxlm.cli import _parse
from jaxlm.config.run_name import default_run
from jaxlm.families.directory import PublishedModel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", README, re.S)
(PROGRAM,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.S)


def test_it_uses_every_name():
    assert set(re.findall(r"\bapi\.(\w+)", PROGRAM)) == set(api.__all__)
    assert len(api.__all__) == 14 and all(getattr(api, name).__doc__ for name in api.__all__)


def test_the_first_page_trains_looks_generates_and_compares():
    """In this order, by commands that are understood, of runs that its first two commands leave."""
    page = README.partition("\nTest everything")[0]
    blocks = "\n".join(re.findall(r"```\n(.*?)```", page, re.S))
    lines = re.findall(r"^(?:.*&& )?jaxlm (.*?)(?: +#.*)?$", blocks, re.M)
    commands = [_parse(shlex.split(line)) for line in lines]
    assert [line.split()[0] for line in lines] == ["train", "runs", "generate", "train", "compare"]
    trained = [
        str(default_run(asked.config, asked.overrides, config.load(ROOT / asked.config, asked.overrides)))
        for asked in (commands[0], commands[3])
    ]
    assert [str(run) for run in commands[4].runs] == trained and str(commands[2].run) == trained[0]


def test_it_can_be_read_at_one_go():
    assert len(README.splitlines()) <= 200


def test_its_example_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    meshes.have(monkeypatch, 1)
    exec(compile(EXAMPLE, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.startswith(", there was a little girl named Lily.")


def test_published_weights_go_in_and_come_out_in_three_lines(tmp_path, monkeypatch, capsys):
    lines = re.findall(r"^jaxlm (.*stories.*)$", README, re.M)
    assert [line.split()[0] for line in lines[:3]] == ["generate", "import", "export"]
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    meshes.have(monkeypatch, 1)
    for line in lines[:3]:
        assert cli.main(shlex.split(line)) == 0
    assert capsys.readouterr().out.startswith("Once upon a time, there was a little girl named Lily.")
    before, after = (PublishedModel(Path(folder)) for folder in (lines[1].split()[1], lines[2].split()[2]))
    assert all((after.stored[name].read() == tensor.read()).all() for name, tensor in before.stored.items())


# In place of those of the quickstart: XLA's compiler for TPUs takes 40 s for that, and 6 s for these.
SMALLER = {
    "model": {"vocab_size": 512, "context_length": 32, "d_model": 32},
    "model.attention": {"num_heads": 4, "num_kv_heads": 2},
    "model.feed_forward": {"d_ff": 64},
    "data": {"documents": 60},  # all that is held out of them is measured at the end
    "training": {"batch": 4},
    "evaluation": {"batches": 2},
    "records": {"sample_tokens": 8},
}


@pytest.mark.slow
def test_the_program_runs(tmp_path):
    """Run the program in its own process, set up as a run is, next to the files that it names: the package, and a
    smaller quickstart."""
    (tmp_path / "jaxlm").symlink_to(ROOT / "jaxlm")
    (tmp_path / "configs").mkdir()
    overrides = [f"{table}.{key}={value}" for table, keys in SMALLER.items() for key, value in keys.items()]
    smaller = config.load(ROOT / "configs" / "quickstart.toml", overrides)
    (tmp_path / "configs" / "quickstart.toml").write_text(smaller.to_toml())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=runs.environment(1), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    counted, compiled, shapes = done.stdout.splitlines()[:3]
    assert counted.startswith("Memory(") and compiled.startswith("CompiledMemory(")
    assert re.fullmatch(r"1 \(1, \d+, 512\)", shapes)
    assert "llama" in done.stdout.splitlines() and (tmp_path / "runs/published/model.safetensors").exists()
    assert (tmp_path / "runs" / "example" / "sample.txt").exists()
    folders = ("runs/int8", "runs/imported")
    states = [*((folder, "imported", 0) for folder in folders), ("runs/example", "finished", 4)]
    assert done.stdout.splitlines()[-3:-1] == [str(states), "{}"]
    assert 0 < float(done.stdout.splitlines()[-1]) < 1
