"""Hooks of MkDocs: add pages that lie elsewhere in the repository or are generated, and check and rewrite links.

A page of the repository links to other files as they lie there, so that it reads well without the site. On the site a
link to a file that is no page becomes its text. A link to a file that does not exist is an error.
"""

import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# The repository's pages outside docs/, by their place on the site.
ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    "clusters.md": "launch/README.md",
    **{f"notebooks/{path.name}": f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")},
}
PLACES = {repository: site for site, repository in ELSEWHERE.items()}
COMMANDS = (
    *("train", "eval", "generate", "serve", "runs", "compare", "import", "export", "plan", "compile", "hardware"),
    *("config", "bench kernels", "bench decode", "bench serve"),
)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files, config):
    """Add the pages of the repository outside docs/, and those that are generated."""
    for site, repository in ELSEWHERE.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / repository)))
    files.append(File.generated(config, "options.md", content=_options()))
    files.append(File.generated(config, "api.md", content="# jaxlm.api\n\n::: jaxlm.api\n"))
    files.append(File.generated(config, "kernels_api.md", content="# kernels_pallas\n\n::: kernels_pallas\n"))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite the links of a page."""
    place = page.file.src_uri
    if place not in ELSEWHERE and not (ROOT / "docs" / place).exists():
        return markdown  # generated
    repository = ELSEWHERE.get(place, f"docs/{place}")
    parts = re.split(r"(^```.*?^```|`[^`\n]+`)", markdown, flags=re.M | re.S)
    rewritten = [part if n % 2 else _LINK.sub(lambda link: _on_site(link, repository, place), part)
                 for n, part in enumerate(parts)]  # fmt: skip
    return "".join(rewritten)


def _on_site(link, repository, place):
    image, text, target = link.groups()
    path, _, anchor = target.partition("#")
    if ":" in target or not path:
        return link.group()
    pointed = posixpath.normpath(posixpath.join(posixpath.dirname(repository), path))
    if not (ROOT / pointed).exists():
        raise PluginError(f"{repository} links to {target}, which does not exist")
    site = PLACES.get(pointed, pointed.removeprefix("docs/") if pointed.startswith("docs/") else None)
    if site is None:
        return text
    relative = posixpath.relpath(site, posixpath.dirname(place) or ".")
    return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"


def _options():
    """Return a page with the --help of every command."""
    sections = ["# Every option\n\nWhat `jaxlm COMMAND --help` prints.\n"]
    for command in COMMANDS:
        asked = [sys.executable, "-m", "jaxlm", *command.split(), "--help"]
        done = subprocess.run(asked, cwd=ROOT, env=os.environ | {"COLUMNS": "88"}, capture_output=True, text=True)
        if done.returncode:
            raise PluginError(f"jaxlm {command} --help: {done.stderr}")
        sections.append(f"## jaxlm {command}\n\n```\n{done.stdout.rstrip()}\n```\n")
    return "\n".join(sections)
