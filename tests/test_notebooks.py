"""The notebooks run from top to bottom in their own kernel, and are stored without outputs."""

from pathlib import Path

import nbclient
import nbformat
import pytest
from matrices import sampled

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def read(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == [
        "counting_the_cost",
        "how_models_run_on_hardware",
        "inference_by_the_numbers",
        "writing_fast_kernels",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_is_kept_but_the_source(path):
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3" and notebook.metadata.language_info == {"name": "python"}
    for cell in notebook.cells:
        assert not cell.metadata
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "path",
    sampled(
        [pytest.param(path, id=path.stem) for path in NOTEBOOKS], ["counting_the_cost", "inference_by_the_numbers"]
    ),
)
def test_it_runs(path, monkeypatch, tmp_path):
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in shown)
    complaints = [output.text for output in shown if output.get("name") == "stderr"]
    assert not complaints, "\n".join(complaints)
