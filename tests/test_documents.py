"""README and docs: links lead somewhere, commands parse, keys and TOML are right, and the site builds."""

import os
import posixpath
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from jaxlm import config
from jaxlm.cli import _parse
from jaxlm.config.experiment import Experiment
from jaxlm.core.errors import InputError
from jaxlm.core.schema import leaves, sections_at

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "launch/README.md",
    ROOT / "benchmarks/README.md",
]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.M | re.S)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def anchors(name: str) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", read(name), flags=re.M | re.S), re.M)
    plain = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


def blocks(name: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(name), re.M | re.S)


def commands(name: str) -> list[list[str]]:
    """Return the words of each call of jaxlm in the blocks of commands of a page."""
    lines = "\n".join(blocks(name, "")).replace("\\\n", " ").splitlines()
    calls = [re.search(r"(?:^|&& )jaxlm (?!COMMAND)(.+)", re.sub(r"\s#\s.*$|&\s*$", "", line)) for line in lines]
    return [shlex.split(call[1]) for call in calls if call]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    for _, target in re.findall(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", _CODE.sub("", read(name))):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        pointed = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
        assert (ROOT / pointed).exists(), target
        assert not anchor or anchor in anchors(pointed), target


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("docs/commands.md", "CHANGELOG.md")])
def test_commands_parse_and_their_keys_exist(name):
    for words in commands(name):
        if "…" in words or any(word.startswith("CONFIG") and len(words) == 1 for word in words):
            continue
        asked = _parse(words)
        for override in getattr(asked, "overrides", ()):
            *tables, key = override.partition("=")[0].split(".")
            sections = sections_at(".".join(tables), Experiment)
            assert any(key in section.model_fields for section in sections) or "NAME" in tables, override


def test_every_command_stands_on_its_page():
    listed = set(re.findall(r"^jaxlm ((?:bench )?\w+)", read("docs/commands.md"), re.M))
    parser = subprocess.run(
        [sys.executable, "-m", "jaxlm", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert {name.split()[0] for name in listed} == set(re.findall(r"^    (\w+)  ", parser, re.M))


@pytest.mark.parametrize("name", [name for name in NAMES if blocks(name, "toml")])
def test_its_toml_has_keys_that_exist(name):
    """Check keys of configurations; a table of a kind that the page itself adds has keys of its own."""
    own_kinds = set(re.findall(r'kind: Literal\["(\w+)"\]', read(name)))
    for block in blocks(name, "toml"):
        values = tomllib.loads(block)
        if not values.keys() <= {*Experiment.model_fields, "import"}:
            assert '"' in next(iter(block.splitlines())) or "project" in values, (
                block
            )  # tensors' names, a pyproject.toml
            continue
        keys = dict(leaves(values))
        for key in keys.keys() - {"import", "model.base"}:
            *tables, last = key.split(".")
            sections = sections_at(".".join(tables), Experiment)
            is_own = keys.get(".".join([*tables, "kind"])) in own_kinds
            assert (
                any(last in section.model_fields for section in sections)
                or is_own
                or {"sources", "compiler_options"} & {*tables}
            ), key


@pytest.mark.parametrize("name", NAMES)
def test_install_lines_work(name):
    """No package is published: an extra is that of a checkout or of a wheel's path."""
    assert "jaxlm[" not in read(name)


def test_an_unknown_name_is_refused_as_the_pages_say():
    with pytest.raises(InputError):
        config.load("no-such-configuration")


def test_the_accuracy_of_memory_is_that_of_its_table():
    cases, median, within = re.search(
        r"(\d+) cases: median error ([\d.]+)%.*?; (\d+) within 5 %", read("docs/memory.md")
    ).groups()
    assert f"{within} of {cases} compiled" in read("README.md") and f"median error of {median} %" in read("README.md")
    assert f"median error of {median} %" in read("docs/ladder.md")


def test_every_page_is_on_the_site():
    navigation = yaml.safe_load(read("mkdocs.yml"))["nav"]
    pages = {page for entry in navigation for item in entry.values() if isinstance(item, list)
             for one in item for page in one.values()}  # fmt: skip
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= pages


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """MkDocs is strict here: a warning is an error."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert (tmp_path / "site" / "api" / "index.html").exists()
