"""The command that installs optional packages, for messages that miss one."""

import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

_CHECKOUT = Path(__file__).parents[2]


def install(extra: str) -> str:
    """Return the command that adds the packages of an extra to this installation of jaxlm, be it a checkout or a wheel.

    No package index has jaxlm: a wheel is installed again from where it came from, as pip recorded it (PEP 610).
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]'" + ("" if _CHECKOUT == Path.cwd() else f" in {_CHECKOUT}")
    try:
        origin = json.loads(metadata.distribution("jaxlm").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    address = urlsplit(origin.get("url", ""))
    if "vcs_info" in origin:
        return f"pip install 'jaxlm[{extra}] @ {origin['vcs_info']['vcs']}+{origin['url']}'"
    if address.scheme == "file":
        return f"pip install '{unquote(address.path)}[{extra}]'"
    return f"pip install 'PATH[{extra}]', PATH being that of jaxlm's wheel"
