"""The configurations that come with jaxlm, by name."""

import difflib
import os
from importlib import resources
from pathlib import Path

from jaxlm.core.errors import InputError

# In a clone a link to configs/, in a wheel a folder.
FOLDER = Path(str(resources.files("jaxlm") / "configs"))


def configurations() -> dict[str, Path]:
    """Return the file of each configuration by its name, experiments before models."""
    files = [*sorted(FOLDER.glob("*.toml")), *sorted(FOLDER.glob("models/*.toml"))]
    return {file.stem: file for file in files}


def find(name: str | Path, folder: Path = Path()) -> Path:
    """Return the path `name` in `folder` if it exists or is no name of a configuration, else that configuration's."""
    path = folder / name
    return path if os.path.lexists(path) else configurations().get(str(name), path)


def missing(path: Path) -> InputError:
    """Return the error for a path that does not exist, with the nearest name of a configuration."""
    near = difflib.get_close_matches(path.name.removesuffix(".toml"), configurations(), 1)
    hint = f"did you mean {near[0]}?" if near else "jaxlm config --list names them"
    return InputError(f"{path} is neither a file nor one of jaxlm's configurations; {hint}")
