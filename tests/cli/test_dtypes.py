"""Published weights are computed in as they are stored, trained ones in `execution.dtype`, the same everywhere."""

import json
import shutil
import tomllib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import runs
import story_fixtures

from jaxlm import api, config
from jaxlm.cli import main
from jaxlm.families import safetensors
from jaxlm.families.directory import PublishedModel
from jaxlm.families.safetensors import LazyTensor
from jaxlm.runs.folder import Run

TOKENS = [[1, 403, 407, 261, 378]]
ONE = ["mesh.fsdp=1"]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A model of one layer whose weights are in float32."""
    return story_fixtures.shallow(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture(scope="module")
def imported(published, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("imported") / "run"
    assert main(["import", str(published), str(run)]) == 0
    return run


def test_an_import_says_the_dtype(published, tmp_path, capsys):
    assert main(["import", str(published), str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float32"


def stored_as(published: Path, dtype: np.dtype, folder: Path) -> Path:
    """Return a copy whose tensors are in another dtype."""
    shutil.copytree(published, folder)
    tensors = {
        name: LazyTensor(np.dtype(dtype), tensor.shape, lambda tensor=tensor: tensor.read().astype(dtype))
        for name, tensor in PublishedModel(published).stored.items()
    }
    safetensors.write(folder / "model.safetensors", tensors, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "dtype": np.dtype(dtype).name}))
    return folder


@pytest.fixture
def timed(monkeypatch):
    """Return a function that makes one of the dtypes the fastest here."""

    def make(dtype):
        monkeypatch.setattr("jaxlm.inference.dtype_choice.seconds_of", lambda each: 0.001 if each == dtype else 0.002)

    return make


def logits(model) -> np.ndarray:
    return np.asarray(model.logits(TOKENS))


@pytest.mark.parametrize("which", ["published", "imported"])
def test_logits_of_weights_in_float32_are_those_of_float32(which, published, imported):
    said = []
    model = api.load({"published": published, "imported": imported}[which], ONE, say=said.append)
    expected = logits(api.load(published, ONE, dtype="float32"))
    np.testing.assert_array_equal(logits(model), expected)
    assert model.dtype == "float32" and said == ["computing in float32, as the weights are stored"]
    assert np.abs(logits(api.load(published, ONE, dtype="bfloat16")) - expected).max() > 0
    assert str(model.engine().runner.programs.dtype) == "float32"


def test_a_run_that_was_imported_earlier_computes_as_one_of_today(imported, tmp_path):
    """Its config.toml says bfloat16, of which nobody decided."""
    run = Run(Path(shutil.copytree(imported, tmp_path / "run")))
    values = tomllib.loads(run.paths.config.read_text())
    assert values["execution"]["dtype"] == "float32"
    text = run.paths.config.read_text().replace('dtype = "float32"', 'dtype = "bfloat16"')
    run.paths.config.write_text(text)
    assert run.experiment().execution.dtype == "bfloat16" and api.load(run.paths.directory, ONE).dtype == "float32"


@pytest.mark.parametrize("fastest", ["float32", "bfloat16"])
def test_on_a_cpu_it_is_the_fastest_that_is_no_coarser(published, tmp_path, timed, fastest):
    timed(fastest)
    half = api.load(stored_as(published, np.dtype(np.float16), tmp_path / "half"), ONE)
    brain = api.load(stored_as(published, np.dtype(ml_dtypes.bfloat16), tmp_path / "brain"), ONE)
    assert (api.load(published, ONE).dtype, half.dtype, brain.dtype) == ("float32", "float32", fastest)


def test_what_is_asked_for_goes_before_it(published, imported):
    for path in (published, imported):
        assert api.load(path, ["execution.dtype=bfloat16"]).dtype == "bfloat16"
        assert api.load(path, dtype="bfloat16").dtype == "bfloat16"


def test_a_trained_run_computes_in_its_own(tmp_path, timed):
    timed("float32")
    run = runs.untrained(tmp_path / "run", "execution.dtype=bfloat16", "model.num_layers=1")
    said = []
    assert api.load(run, say=said.append).dtype == "bfloat16" and not said


def test_the_loss_of_published_weights_is_that_of_their_dtype(published, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("Once upon a time there was a little girl. " * 20)
    sizes = ["training.batch=1", "training.sequence=32", *ONE]

    def loss(*overrides):
        text = str(tmp_path / "text.txt")
        assert main(["eval", str(published), "--data", text, *sizes, *overrides, "--json"]) == 0
        row = json.loads(capsys.readouterr().out)
        return row["loss"], row["dtype"]

    assert loss() == loss("execution.dtype=float32") != loss("execution.dtype=bfloat16")
    assert loss()[1] == "float32"


def test_a_command_says_it(published, capsys):
    asked = ["generate", str(published), "--token-ids", "1,2", "--max-tokens", "2", *ONE, "--json"]
    assert main(asked) == 0
    out, errors = capsys.readouterr()
    assert json.loads(out)["dtype"] == "float32" and "computing in float32, as the weights are stored" in errors


def test_a_plan_of_inference_is_of_the_dtype_in_config_json(published, tmp_path):
    half = stored_as(published, np.dtype(np.float16), tmp_path / "half")
    brain = stored_as(published, np.dtype(ml_dtypes.bfloat16), tmp_path / "brain")
    for kind in ("prefill", "decode"):
        found = [config.load(path, kind=kind).execution.dtype for path in (published, half, brain)]
        assert found == ["float32", "float32", "bfloat16"]
    assert config.load(published, ["execution.dtype=bfloat16"], "decode").execution.dtype == "bfloat16"
    assert config.load(published).execution.dtype == "bfloat16"  # what is trained
