"""The plug-ins that a configuration names at its top, by the key `import`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, create_model

from jaxlm.core import plugins
from jaxlm.core.errors import InputError
from jaxlm.core.plugins import Plugin
from jaxlm.core.schema import Section


def _listed(names: Any) -> Any:
    return (names,) if isinstance(names, str) else names


# A key named as a keyword of Python is.
PluginsConfig = create_model(
    "_Plugins",
    __base__=Section,
    **{
        "import": (
            Annotated[tuple[str, ...], BeforeValidator(_listed)],
            Field(
                (),
                description="Plug-ins, which register parts: names of modules, and paths of .py files relative to this "
                "file. A run records each with a digest of its source.",
            ),
        )
    },
)


def import_plugins(values: dict[str, Any], path: Path, is_record: bool, plugged: list[Plugin]) -> None:
    """Import the plug-ins that a file names, and add them to `plugged`. Raises InputError."""
    plugins.load_installed()
    names = _listed(values.pop("import", ()))
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f'{path}: import = {names!r} must be a list of names, such as ["mine.py"]')
    is_record = is_record or plugins.in_folder_of_model(path) is not None
    for name in names:
        of = path.parent if path.parent.name else path
        plugged.append(plugins.load_recorded(name, of) if is_record else plugins.load(name, path.parent, str(path)))


def installed_plugins(section: Section) -> list[Plugin]:
    """Return the plug-ins of installed packages that a section, and those inside it, are of."""
    return plugins.installed_of(type(each).__module__ for each in _sections(section))


def _sections(section: Section) -> Iterator[Section]:
    """Yield a section and those inside it."""
    yield section
    for value in section.__dict__.values():
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Section):
                yield from _sections(inner)
