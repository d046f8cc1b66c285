"""jaxlm as it is installed: a wheel, built from the source distribution, used where there is no repository."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGED = ("jaxlm", "kernels_pallas", "configs", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
TINY = (
    "training.steps=2", "training.batch=2", "training.sequence=32", "evaluation.every=2", "evaluation.batches=1",
    "model.vocab_size=257", "model.num_layers=1", "model.d_model=32", "model.attention.num_heads=4",
    "model.attention.num_kv_heads=2", "model.feed_forward.d_ff=64", "records.sample_tokens=8",
    "data.tokenizer=bytes", "data.documents=20", "data.held_out=0.1",
)  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder that holds the contents of the wheel, which is built without a network."""
    folder = tmp_path_factory.mktemp("installed")
    for name in PACKAGED:  # without what earlier builds left in the repository, which setuptools would take in
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / "source")
    python = [sys.executable, "-m"]
    # The source distribution, and from that the wheel.
    subprocess.run([*python, "build", "--no-isolation", "--outdir", folder, folder / "source"], check=True)
    (wheel,) = folder.glob("*.whl")
    target = folder / "target"
    subprocess.run([*python, "pip", "install", "--no-deps", "--no-index", "--target", target, wheel], check=True)
    return target


@pytest.fixture
def jaxlm(installed, tmp_path):
    """Run the installed jaxlm in a folder of its own."""

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(installed), "JAX_NUM_CPU_DEVICES": "1"}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == status, done.stderr
        return done

    return run


@pytest.mark.slow
def test_the_wheel_has_every_configuration(installed, jaxlm):
    packaged = installed / "jaxlm" / "configs"
    files = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.toml")}
    assert {path.relative_to(packaged) for path in packaged.rglob("*.toml")} == files
    assert Path(jaxlm("-c", "import jaxlm; print(jaxlm.__file__)").stdout).is_relative_to(installed)
    listed = json.loads(jaxlm("-m", "jaxlm", "config", "--list", "--json").stdout)["configurations"]
    assert {Path(row["file"]).relative_to(packaged) for row in listed} == files


@pytest.mark.slow
def test_the_quickstart_trains_on_the_standard_library(jaxlm, tmp_path):
    jaxlm("-m", "jaxlm", "train", "quickstart", *TINY)
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("quickstart,") and (run / "sample.txt").exists()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_models_are_planned_by_name_and_held_against_published_figures(jaxlm):
    planned = jaxlm("-m", "jaxlm", "plan", "llama3.1-8b", "--on", "h100-sxm5:8", "--mesh", "auto", "--json")
    assert json.loads(planned.stdout)["parameters"]["total"] == 8_030_261_248
    assert "parameters" in jaxlm("-m", "jaxlm", "plan", "--check").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shakespeare_char", "curl -o tinyshakespeare.txt https://raw.githubusercontent.com/karpathy/char-rnn/"),
        ("data_mixture", "data.sources.notes.text"),
    ],
)
def test_text_that_does_not_come_with_it_is_one_line(name, says, jaxlm, tmp_path):
    error = jaxlm("-m", "jaxlm", "train", name, status=2).stderr
    assert error.count("\n") == 1 and says in error
    assert list(tmp_path.iterdir()) == []
