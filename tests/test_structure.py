"""The floors of the house: README names each part with its floor, and imports keep to them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = {
    name: int(floor) for name, floor in re.findall(r"^ *(\w+)\S* +floor (\d)", (ROOT / "README.md").read_text(), re.M)
}


def part(module: str) -> str:
    """Of the house, which a module belongs to."""
    return (module.removeprefix("jaxlm.") if module.startswith("jaxlm.") else module).partition(".")[0]


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "jaxlm":
            yield from (f"jaxlm.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_every_part_has_a_floor():
    assert {path.stem for path in (ROOT / "jaxlm").glob("[a-z]*")} | {"kernels_pallas"} == FLOORS.keys()


def test_imports_come_from_floors_below():
    for file in [*ROOT.glob("jaxlm/*/**/*.py"), *ROOT.glob("jaxlm/[a-z]*.py"), *ROOT.glob("kernels_pallas/**/*.py")]:
        here = part(".".join(file.relative_to(ROOT).with_suffix("").parts))
        for module in imported(file):
            if module.startswith(("jaxlm.", "kernels_pallas")) and module != "jaxlm.__version__":
                assert part(module) == here or FLOORS[part(module)] < FLOORS[here], f"{file} imports {module}"
