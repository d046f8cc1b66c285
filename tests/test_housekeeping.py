"""Version, commands and files are the same in README, CONTRIBUTING, CI, hooks, Dockerfile and pyproject.toml."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from test_installed import PACKAGED
from test_structure import FLOORS

ROOT = Path(__file__).parents[1]
SOURCES = ("jaxlm", "kernels_pallas", "tests", "benchmarks", "notebooks")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands(name: str) -> list[str]:
    """Return the lines of the blocks of commands of a Markdown file."""
    return [line for block in re.findall(r"^```\n(.*?)^```", read(name), re.M | re.S) for line in block.splitlines()]


def steps(job: str) -> list[str]:
    """Return the commands of a job of the workflow."""
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]


def instructions(kind: str) -> list[str]:
    """Return the arguments of the Dockerfile's instructions of a kind."""
    return re.findall(rf"^{kind} (.+)", read("Dockerfile"), re.M)


PROJECT = tomllib.loads(read("pyproject.toml"))["project"]
WORKFLOW = yaml.safe_load(read(".github/workflows/tests.yml"))
CITATION = yaml.safe_load(read("CITATION.cff"))
HOOKS = yaml.safe_load(read(".pre-commit-config.yaml"))
SUITE = "pip install -e '.[test]' && pytest -n auto"
PYTHONS = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"]


def test_there_is_one_version():
    (latest, *_) = re.findall(r"^## \[(\d\S*)\]", read("CHANGELOG.md"), re.M)
    assert PROJECT["version"] == CITATION["version"] == latest


def test_the_changelog_has_the_sections_of_its_form():
    titles = re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.M)
    assert titles[0] == "[Unreleased]" and len(titles) == len(set(titles))
    sections = re.findall(r"^### (.+)", read("CHANGELOG.md"), re.M)
    assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_citation_has_what_its_format_requires():
    """CFF 1.2.0 requires these four keys, and of an author that is no person a name."""
    assert CITATION["cff-version"] == "1.2.0" and CITATION["message"] and CITATION["title"]
    assert CITATION["authors"] == [{"name": "The jaxlm authors"}]
    assert CITATION["license"] == PROJECT["license"] and PROJECT["description"] in CITATION["title"]


def test_the_suite_is_one_command():
    assert read(".ci/run").splitlines()[-1] == SUITE
    assert SUITE in commands("README.md") and SUITE in commands("CONTRIBUTING.md")
    assert steps("test") == [".ci/run"]
    assert "`pytest -n auto -m exhaustive`" in read("CONTRIBUTING.md")
    assert "-m 'not slow and not exhaustive'" in read("CONTRIBUTING.md")


def test_the_suite_runs_on_every_python_that_is_named():
    oldest, *_ = PYTHONS
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={oldest}")
    assert all(python in SpecifierSet(PROJECT["requires-python"]) for python in PYTHONS)
    named = " and ".join(PYTHONS)
    assert f"Python {oldest} or later; the tests run on {named}." in read("README.md")
    assert f"Python {oldest} or later" in read("CONTRIBUTING.md") and f"on Python {named}." in read("CONTRIBUTING.md")
    setups = [step["with"]["python-version"] for step in WORKFLOW["jobs"]["lint"]["steps"] if "with" in step]
    assert setups == [oldest]


def test_the_workflow_may_only_read_and_ends():
    assert WORKFLOW["permissions"] == {"contents": "read"} and WORKFLOW["concurrency"]["cancel-in-progress"] is True
    assert {name: job["timeout-minutes"] for name, job in WORKFLOW["jobs"].items()} == {"test": 90, "lint": 15}


def test_hooks_workflow_and_people_lint_alike():
    (local,) = HOOKS["repos"]
    assert local["repo"] == "local" and {hook["language"] for hook in local["hooks"]} == {"system"}
    hooks = {hook["entry"].removesuffix(" --force-exclude") for hook in local["hooks"]}
    install, *checks = steps("lint")
    assert install == "pip install -e '.[lint]'"
    assert {check.removesuffix(" .").removesuffix(" --check") for check in checks} == hooks
    assert {f"{hook} ." if "ruff" in hook else hook for hook in hooks} <= set(commands("CONTRIBUTING.md"))


def test_ruff_is_pinned_and_comes_with_the_tests():
    extras = PROJECT["optional-dependencies"]
    lint = {Requirement(line).name: Requirement(line) for line in extras["lint"]}
    assert lint.keys() == {"pyright", "ruff"}
    assert re.fullmatch(r"==[\d.]+", str(lint["ruff"].specifier)) and metadata.version("ruff") in lint["ruff"].specifier
    (own,) = (Requirement(line) for line in extras["test"] if line.startswith("jaxlm["))
    assert "lint" in own.extras


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_finds_nothing(command):
    ruff = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", *SOURCES]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_container_runs_the_first_command_of_the_readme():
    first = next(line for line in commands("README.md") if line.startswith("pip install"))
    install, train = first.split(" && ")
    (package,) = instructions("ARG")
    (installed, _) = instructions("RUN")
    assert shlex.split(installed.replace("$PACKAGE", package.removeprefix("PACKAGE="))) == [
        word for word in shlex.split(install) if word != "-e"
    ]
    for extra in ("cuda", "tpu"):
        assert f".[{extra}]" in read("Dockerfile") and extra in PROJECT["optional-dependencies"]
    runs = [*json.loads(instructions("ENTRYPOINT")[0]), *json.loads(instructions("CMD")[0])]
    # The package brings the configuration, so that its name will do.
    assert runs == train.replace("configs/quickstart.toml", "quickstart").split()
    assert f"`{' '.join(runs)}`" in read("README.md")


def test_the_container_has_a_python_that_is_tested_and_no_root():
    assert instructions("FROM") == [f"python:{PYTHONS[-1]}-slim"]
    (user,) = instructions("USER")
    assert user != "root" and f"useradd --create-home {user}" in instructions("RUN")
    assert instructions("WORKDIR")[-1] == f"/home/{user}" and f"-v jaxlm:/home/{user} " in read("README.md")


def test_the_container_gets_what_a_package_is_built_from():
    rules = [line for line in read(".dockerignore").splitlines() if not line.startswith("#")]
    assert rules[0] == "*" and rules[-1] == "**/__pycache__"
    assert {rule for rule in rules if rule.startswith("!")} == {f"!{name}" for name in PACKAGED}


def test_what_contributing_names_is_there():
    text = read("CONTRIBUTING.md")
    code = " ".join([*commands("CONTRIBUTING.md"), *re.findall(r"`([^`\n]+)`", text)])
    named = {word for word in code.split() if re.search(r"/|\.(md|py|toml|ya?ml|cff|json)$", word)}
    named |= set(re.findall(r"\]\((?!https?:)([^)#]+)", text))
    named = {name for name in named if not name.startswith(".venv")}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_contributing_has_the_floors_of_the_house():
    floors = re.findall(r"^(\d)\. (.+)", read("CONTRIBUTING.md"), re.M)
    told = {
        Path(path).stem: int(floor) for floor, line in floors for path in re.findall(r"`(?:jaxlm/)?([\w.]+?)/?`", line)
    }
    assert told == FLOORS
