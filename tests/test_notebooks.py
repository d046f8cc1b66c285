"""The notebooks run from top to bottom in a kernel of their own and give the outputs that are stored with them."""

import importlib
import re
from pathlib import Path

import pytest
from matrices import sampled

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = ["counting_the_cost", "how_models_run_on_hardware", "inference_by_the_numbers", "writing_fast_kernels"]
PATH = re.compile(r"(?<![\w$])(/\w[\w.+-]*){2}|[A-Z]:\\")
NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


@pytest.fixture
def execute(monkeypatch):
    """The script that stores the outputs."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("execute")


def structure(notebook):
    """Return the outputs of each code cell: kinds, and text up to spaces, in a measured cell up to numbers too."""
    return [
        [_structure(output, "measured" in cell.metadata.get("tags", ())) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def _structure(output, measured):
    texts = {output.name: output.text} if output.output_type == "stream" else dict(output.data)
    texts = {kind: "" if kind == "image/png" else " ".join(text.split()) for kind, text in texts.items()}
    if measured:
        texts = {kind: " ".join(NUMBER.sub("#", text).split()) for kind, text in texts.items()}
    return output.output_type, texts


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks(execute):
    assert execute.NAMES == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_of_this_source(execute, name):
    notebook = execute.read(name)
    stale = f"{name}.ipynb was edited after it was run: python notebooks/execute.py {name}"
    assert notebook.metadata.get("outputs_of") == execute.fingerprint(notebook), stale


def test_an_edit_is_noticed(execute):
    notebook = execute.read(NAMES[0])
    text = next(cell for cell in notebook.cells if cell.cell_type == "markdown")
    text.source += "!"
    assert notebook.metadata.outputs_of == execute.fingerprint(notebook)
    code(notebook)[-1].source += "\n1"
    assert notebook.metadata.outputs_of != execute.fingerprint(notebook)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_of_no_machine(execute, name):
    notebook = execute.read(name)
    assert set(notebook.metadata) == {"kernelspec", "language_info", "outputs_of"}
    assert notebook.metadata.kernelspec.name == "python3" and notebook.metadata.language_info == {"name": "python"}
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert all(cell.metadata in ({}, {"tags": ["measured"]}) for cell in notebook.cells)
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "\n".join(str(kinds) for cell in structure(notebook) for kinds in cell)
    assert not PATH.search(text) and "\x1b" not in text
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 400_000


@pytest.mark.parametrize("name", NAMES)
def test_exercises_have_solutions_that_are_checked(execute, name):
    """Each solution asserts something, and `run` runs them all."""
    texts = [cell for cell in execute.read(name).cells if cell.cell_type == "markdown"]
    numbers = [re.findall(r"^### Exercise (\d)$", cell.source, re.M) for cell in texts]
    assert 3 <= len(sum(numbers, [])) <= 5 and sum(numbers, []) == list("12345"[: len(sum(numbers, []))])
    for cell, found in zip(texts, numbers, strict=True):
        solutions = execute.solutions(cell)
        assert len(solutions) == len(found) == cell.source.count("<details>") == cell.source.count("</details>")
        assert all(re.search("^assert ", solution, re.M) for solution in solutions)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sampled([pytest.param(name, id=name) for name in NAMES], ["counting_the_cost"]))
def test_it_gives_what_is_stored(execute, name):
    stored = execute.read(name)
    assert structure(execute.run(stored)) == structure(stored)


def test_of_measured_cells_the_numbers_alone_may_differ():
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    def shown(text, *tags):
        cell = new_code_cell(outputs=[new_output("stream", text=text)], metadata={"tags": [*tags]})
        return structure(new_notebook(cells=[cell]))

    assert shown("1,024 tokens in  0.5 ms") != shown("1,024 tokens in 12.0 ms")
    assert shown("1,024 tokens in  0.5 ms", "measured") == shown("2 tokens in 1.2e-05 ms", "measured")
    assert shown("1,024 tokens in  0.5 ms", "measured") != shown("1,024 tokens in  0.5 s", "measured")


@pytest.mark.slow
def test_solutions_run_where_they_stand(execute):
    """With the names above them, and without leaving any; a wrong one fails."""
    from nbclient.exceptions import CellExecutionError
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    def exercise(*lines):
        hidden = "\n".join(("<details><summary>Solution</summary>", "", "```python", *lines, "```", "</details>"))
        return new_markdown_cell(f"### Exercise\n\n{hidden}")

    below = new_code_cell("print(x, 'y' in globals())")
    given = new_notebook(cells=[new_code_cell("x = 2"), exercise("y = x", "x = 3", "assert y == 2"), below])
    ran = execute.run(given)
    assert [cell.cell_type for cell in ran.cells] == ["code", "markdown", "code"]
    assert structure(ran) == [[], [("stream", {"stdout": "2 False"})]] and ran.cells[2].execution_count == 2
    given.cells[1] = exercise("assert x == 3")
    with pytest.raises(CellExecutionError, match="AssertionError"):
        execute.run(given)
