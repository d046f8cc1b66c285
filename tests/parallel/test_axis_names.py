"""Mesh axes are named by the rules, and nowhere in what computes, counts or compiles."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxlm
from jaxlm.parallel.layout import AXES

ROOT = Path(jaxlm.__file__).parent
PACKAGES = ("costs", "training", "models", "inference", "lowering")
# What else is called so: the time that a run waits for its data, the degree of sharding of a published run, what is
# before a continuation, the stages of other software, and a kind of published figures.
OTHERS = {
    ("training/goodput.py", "data"),
    ("costs/published/runs.py", "fsdp"),
    ("inference/scoring.py", "context"),
    ("costs/stack.py", "pipeline"),
    ("costs/published/runs.py", "pipeline"),
    ("costs/published/cases.py", "pipeline"),
    ("costs/timing/step_time.py", "pipeline"),
}
# Sections, methods, settings and modules that have an axis's name: the data of an experiment, the most tokens of a
# sequence, `jaxlm.parallel.pipeline`.
NAMES = {"data", "context", "pipeline"}


def named(file: Path) -> Iterator[str]:
    """Yield the mesh axes that a file names by a string, a keyword or an attribute."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Constant(value=str(name)):
                if name in AXES:
                    yield name
            case ast.keyword(arg=str(name)) | ast.Attribute(attr=name):
                if name in AXES and name not in NAMES:
                    yield name


def files() -> list[Path]:
    return [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_names_a_mesh_axis(file):
    place = file.relative_to(ROOT).as_posix()
    assert [name for name in named(file) if (place, name) not in OTHERS] == []


def test_the_rules_are_found_to_name_them():
    assert set(named(ROOT / "parallel" / "rules.py")) == set(AXES)
