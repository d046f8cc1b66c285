"""Run the notebooks from top to bottom and store their outputs: `python notebooks/execute.py [NAME ...]`.

A stored notebook holds nothing of the moment and the machine: no times of cells, no paths, execution counts from one,
pictures of one resolution and few colors. Numbers that belong to this machine stand in cells with the tag `measured`.
The notebook's metadata keep a fingerprint of the source that its outputs come from.
"""

import argparse
import base64
import copy
import hashlib
import io
import os
import re
import tempfile
from pathlib import Path

import nbclient
import nbformat
from nbformat import NotebookNode
from PIL import Image

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
DOTS_PER_INCH, COLORS = 72, 128


def read(name: str) -> NotebookNode:
    """Return a stored notebook. Raises nbformat.ValidationError if it is not a notebook."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


def solutions(cell: NotebookNode) -> list[str]:
    """Return the Python of each hidden solution in a cell of text."""
    if cell.cell_type != "markdown":
        return []
    hidden = re.findall(r"<details><summary>Solution</summary>\n(.*?)</details>", cell.source, re.S)
    return ["\n".join(re.findall(r"```python\n(.*?)```", text, re.S)) for text in hidden]


def fingerprint(notebook: NotebookNode) -> str:
    """Return a hash of the code cells: outputs that have another one are stale."""
    source = [[cell.source, cell.metadata.get("tags", [])] for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(repr(source).encode()).hexdigest()[:16]


def smaller(picture: str) -> str:
    """Return a PNG, in base64, with a palette of `COLORS`, which takes a third of the bytes."""
    written = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        image.convert("RGB").quantize(COLORS).save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def run(notebook: NotebookNode) -> NotebookNode:
    """Return a copy of the notebook with the outputs of a kernel of its own, on the CPU and in an empty folder.

    A solution runs where it stands, with a copy of the names that are known there: later cells do not see its own.
    Raises nbclient.exceptions.CellExecutionError where a cell or a solution fails.
    """
    notebook = copy.deepcopy(notebook)
    session = copy.deepcopy(notebook)
    session.cells = []
    for cell in notebook.cells:
        session.cells.append(cell)
        for source in solutions(cell):
            program = f"compile({source!r}, 'a solution of {cell.id}', 'exec')"
            session.cells.append(nbformat.v4.new_code_cell(f"exec({program}, dict(globals()))"))
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "matplotlibrc")
        settings.write_text(f"figure.dpi: {DOTS_PER_INCH}\n")
        work = Path(folder, "work")
        work.mkdir()
        nbclient.NotebookClient(
            session,
            timeout=300,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(work)}},
        ).execute(env=os.environ | {"JAX_PLATFORMS": "cpu", "IPYTHONDIR": folder, "MATPLOTLIBRC": str(settings)})
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(code, start=1):
        cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
            if picture := output.get("data", {}).get("image/png"):
                output.data["image/png"] = smaller(picture)
    notebook.metadata["outputs_of"] = fingerprint(notebook)
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description="Run notebooks and store their outputs.")
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="NAME", help=", ".join(NAMES))
    for name in parser.parse_args().names or NAMES:
        notebook = run(read(name))
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"{name}: {(FOLDER / f'{name}.ipynb').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
