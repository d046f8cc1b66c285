"""`jaxlm bench decode`: the time of a token beside that of reading what it needs."""

import json
from argparse import Namespace
from pathlib import Path

import meshes
import pytest

from jaxlm.cli import main
from jaxlm.cli.bench import decode
from jaxlm.inference import measured

STORIES = Path(__file__).parents[1] / "families" / "stories260K"


@pytest.fixture(autouse=True)
def few_reads(monkeypatch):
    monkeypatch.setattr(measured, "_READ_NUMBERS", 1 << 16)


def said(capsys, *arguments, status=0):
    assert main(["bench", "decode", *map(str, arguments)]) == status
    return capsys.readouterr()


@pytest.mark.slow
def test_each_length_is_measured_beside_what_is_read(capsys, tmp_path, monkeypatch):
    meshes.have(monkeypatch, 1)
    # The engine reads whole pages, of 128 tokens: these hold one and two.
    asked = [STORIES, "--dtype", "float32", "--rows", "2", "--context", "20,150", "--blocks", 2, "--steps", 3]
    out, _ = said(capsys, *asked, "--out", tmp_path / "figures.json")
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [(case["rows"], case["context"]) for case in found["cases"]] == [(2, 20), (2, 150)]
    short, long = found["cases"]
    for case in found["cases"]:
        assert len(case["step_s"]) == 2 and case["dtype"] == "float32"
        assert case["tokens_per_s"] == pytest.approx(case["rows"] / case["median_step_s"])
        assert case["read_s"] == pytest.approx(case["read_bytes"] / found["read_bytes_per_s"])
    numbers = 260_032  # of the model, each read once; the rest are keys and values, and what goes between operations
    assert 4 * numbers < short["read_bytes"] < long["read_bytes"] < 8 * numbers
    assert max(map(len, out.splitlines())) <= 80 and "stories260K in float32, exact" in out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--context", 511], "--context 511 and 3 steps exceed model.context_length = 512"),
        (["--rows", "0"], "'0' must be whole numbers from 1 on, such as 1,8"),
        (["--blocks", "0"], "--blocks 0 must be 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, why, capsys):
    _, error = said(capsys, STORIES, *arguments, status=2)
    assert why in error and error.count("\n") == 1


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("given", [{}, {"context": [20]}, {"steps": 3}, {"blocks": 2}], ids=str)
@pytest.mark.parametrize("longest", [32, 64, 128, 256, 512, 8192])
def test_sizes_that_are_not_given_fit_into_the_context(given, longest, rows):
    none = {"context": None, "blocks": None, "steps": None}
    contexts, blocks, steps = decode._fitting(Namespace(**none | given), longest, rows)
    assert max(contexts) + (blocks + 1) * steps * rows + 1 <= longest
    assert {"context": contexts, "blocks": blocks, "steps": steps} | given == {
        "context": contexts,
        "blocks": blocks,
        "steps": steps,
    }
    if longest == 8192 and not given and rows == 1:
        assert (contexts, blocks, steps) == ([500], 12, 10)
