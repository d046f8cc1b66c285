"""The floors of the house: docs/architecture.md names them, and imports keep to them, without a circle."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FLOORS = {name: int(floor) for name, floor in re.findall(r"^ *(\w+)\S* +floor (\d)", HOUSE, re.M)}
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for folder in ("jaxlm", "kernels_pallas")
    for file in (ROOT / folder).rglob("*.py")
}


def part(module: str) -> str:
    """Return the part of the house that a module belongs to."""
    return (module.removeprefix("jaxlm.") if module.startswith("jaxlm.") else module).partition(".")[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules of the house that a tree imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A name may be a module of its package.
            names = [f"{node.module}.{name.name}" for name in node.names]
            names = [name if name in FILES else node.module for name in names]
        else:
            continue
        yield from (name for name in names if name in FILES)


def imported_at_import(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a module imports outside of functions, also for type checkers alone."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def parsed(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def test_every_part_has_a_floor():
    assert {path.stem for path in (ROOT / "jaxlm").glob("[a-z]*.py")} | {
        path.parent.name for path in (ROOT / "jaxlm").glob("[a-z]*/__init__.py")
    } | {"kernels_pallas"} == FLOORS.keys()


def test_imports_come_from_floors_below():
    """Includes imports inside functions and for type checkers alone; packages of one floor do not import each other."""
    for module in FILES.keys() - {"jaxlm", "jaxlm.__main__"}:
        here = part(module)
        for other in set(imported(parsed(module))) - {"jaxlm"}:
            assert part(other) == here or FLOORS[part(other)] < FLOORS[here], f"{module} imports {other}"


def test_no_kernel_imports_from_another():
    """The parts that two of them use are in kernels_pallas.core."""
    for name in FILES:
        house, _, rest = name.partition(".")
        own = rest.partition(".")[0]
        if house == "kernels_pallas" and own not in ("", "core", "bench"):
            parts = {each.split(".")[1] for each in imported(parsed(name)) if each.startswith("kernels_pallas.")}
            assert parts <= {own, "core"}, f"{name} imports from {parts - {own, 'core'}}"


def test_no_module_imports_itself_by_way_of_others():
    graph = {module: set(imported_at_import(parsed(module))) - {module} for module in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' → '.join(error.args[1])}")


# A docstring opens with an imperative or a noun phrase.
BARE = {"What", "Of", "How", "Whether", "Where", "Which", "Why", "So", "Those", "That"}
NAMED = [
    file for folder in ("jaxlm", "kernels_pallas", "tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")
]


def definitions() -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every module, class and function with its location."""
    for file in NAMED:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node


def test_no_two_classes_have_one_name():
    places: dict[str, list[str]] = {}
    for place, node in definitions():
        if isinstance(node, ast.ClassDef):
            places.setdefault(node.name, []).append(place)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


# Private words that had a standard term, as names of modules, classes, functions, parameters and fields of classes: the
# term is used.
REFUSED = {
    "Held": "TensorBinding",
    "LoraRun": "AdaptedWeights",
    "PagedRuns": "SectionReads",
    "Place": "LayerIndex",
    "Seen": "VisibleFraction",
    "Steps": "TrainStep, TrainPrograms",
    "WeightsSource": "ModelWeights",
    "WholeTexts": "UnpaddedReads",
    "_Asked": "PlanRequest",
    "_known": "valid_token_mask",
    "as_asked": "without_kernels_or_padding",
    "ends": "stop_token_ids",
    "ignores_ends": "ignores_stop_tokens",
    "jit_steps": "TrainStep.jitted",
    "known_V": "valid_V",
    "lora_run": "adapters",
    "make_steps": "TrainStep",
    "paper": "recorder",
    "steps_of_engine": "by_step_shape",
    "taken_apart": "unstack_layers",
}


def test_plain_words_are_not_replaced_by_private_ones():
    named = []
    for module in FILES:
        named.append((module, module.rpartition(".")[2]))
        for node in ast.walk(parsed(module)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                named.append((module, node.name))
            elif isinstance(node, ast.arg):
                named.append((module, node.arg))
            if isinstance(node, ast.ClassDef):
                fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                named += [(module, ast.unparse(field)) for field in fields]
    assert [(module, name, REFUSED[name]) for module, name in named if name in REFUSED] == []


# Participles that do not say what a value is.
UNTELLING = {"found", "made", "read", "held", "given", "said", "asked", "told"}


def test_values_that_live_long_are_named_for_what_they_are():
    """A name of `UNTELLING` is neither returned nor used more than five lines after its first use."""
    lasting = set()
    for module in FILES:
        for function in ast.walk(parsed(module)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines: dict[str, list[int]] = {}
            returned = set()
            for node in ast.walk(function):
                if isinstance(node, ast.Name):
                    lines.setdefault(node.id, []).append(node.lineno)
                elif isinstance(node, ast.arg):
                    lines.setdefault(node.arg, []).append(node.lineno)
                elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
                    returned.add(node.value.id)
            for name in UNTELLING & lines.keys():
                if name in returned or max(lines[name]) - min(lines[name]) > 5:
                    lasting.add((module, function.name, name))
    assert lasting == set()


def test_no_two_files_of_tests_have_one_name():
    """Pytest imports them by their names alone."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_docstrings_say_what_a_thing_is_or_does():
    opened = {place: (ast.get_docstring(node) or "").split() for place, node in definitions()}
    assert [place for place, words in opened.items() if words and words[0].strip(",.:") in BARE] == []


def test_costs_know_no_architecture():
    """No parameter path and no key of a layer: both are read from the recording of the model."""
    from jaxlm.models.block_config import ATTENTIONS, FEED_FORWARDS
    from jaxlm.models.config import ModelConfig

    keys = ModelConfig.model_fields.keys() - {"vocab_size", "context_length", "num_layers", "d_model"}
    layer_keys = {key for kind in (*ATTENTIONS, *FEED_FORWARDS) for key in kind.model_fields}
    paths = re.compile(r"(layers|embedding|unembedding|positions|final_norm)/")
    found = []
    for file in (ROOT / "jaxlm" / "costs").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            of_model = isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "model"
            is_path = isinstance(node, ast.Constant) and isinstance(node.value, str) and paths.match(node.value)
            asks = isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"
            of_layer = asks and getattr(node.args[1], "value", None) in layer_keys
            if (of_model and node.attr in keys) or (is_path and id(node) not in prose) or of_layer:
                found.append(f"{file.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert found == []


def test_counting_names_no_door():
    """It interprets what doors declare: no door's name stands in it, but in prose."""
    from jaxlm.models.doors.door import DOORS

    found = []
    for file in (ROOT / "jaxlm" / "costs" / "counted").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in DOORS:
                found.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.value!r}")
    assert len(DOORS) > 10 and found == []


def test_a_folder_that_a_user_makes_is_no_package_of_ours():
    """Ruff would sort the imports of `tests/runs.py` anew where there is a folder runs/."""
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert ruff["src"] == [] and set(ruff["lint"]["isort"]["known-first-party"]) == {"jaxlm", "kernels_pallas"}
