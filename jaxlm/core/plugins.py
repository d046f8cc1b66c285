"""Plug-ins: modules that register parts, named by a user, recorded by a run, or installed. Imports no JAX.

A plug-in is code that runs as the user. So what a file that came with a model names is imported only where this user
named it before and it is still the same, and nothing at all from the folder of a model.
"""

import hashlib
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.core.files import default_cache, replace

GROUP = "jaxlm.plugins"  # of entry points
_DIGEST = "#sha256="
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
# Files that make a folder that of a model: some beside config.toml, others by themselves.
_OF_RUNS = ("data.json", "history.jsonl", "huggingface")
_WEIGHTS = ("*.safetensors", "*.gguf", "pytorch_model*.bin", "adapter_config.json")


class Plugin(NamedTuple):
    """A plug-in as a run records it: its module's name or the absolute path of its file, and a digest of its source.

    The digest is None for one that an installed distribution registers.
    """

    name: str
    digest: str | None

    def __str__(self) -> str:
        return self.name if self.digest is None else f"{self.name}{_DIGEST}{self.digest}"

    @classmethod
    def parse(cls, text: str) -> "Plugin":
        """Read what `str` writes."""
        name, mark, digest = text.rpartition(_DIGEST)
        return cls(name, digest) if mark else cls(text, None)

    @property
    def short(self) -> str:
        """The name without the folder, by which one plug-in stands for another."""
        file = Path(self.name)
        return (file.parent.name if file.name == "__init__.py" else file.stem) if file.suffix == ".py" else self.name


class _Source(NamedTuple):
    """The module of a plug-in, and its file: of a package its __init__.py."""

    module: str
    file: Path

    def digest(self) -> str:
        """Return the SHA-256 of the file, or of a package of the names and contents of its Python files."""
        if self.file.name != "__init__.py":
            return hashlib.sha256(self.file.read_bytes()).hexdigest()
        folder, whole = self.file.parent, hashlib.sha256()
        for file in sorted(folder.rglob("*.py")):
            whole.update(f"{file.relative_to(folder)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
        return whole.hexdigest()


class _Loader(SourceFileLoader):
    """A loader that compiles the file as it is now, and keeps no bytecode beside it."""

    def get_code(self, fullname: str) -> Any:
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds the files of plug-ins by the names of their modules."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if (file := self.files.get(fullname)) is None:
            return None
        package = [str(file.parent)] if file.name == "__init__.py" else None
        loader = _Loader(fullname, str(file))
        return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=package)


_finder = _Finder()
_imported: dict[str, str] = {}  # digests by module
_named: dict[str, Plugin] = {}  # that the user named, by short name
_of_command: list[Plugin] = []
_installed: list[str] | None = None  # modules of entry points, once they are imported


def begin(names: Iterable[str]) -> None:
    """Begin a command of which the user named these plug-ins (`--import`). Raises InputError as `load`."""
    _named.clear()
    _of_command.clear()
    _of_command.extend(load(name, Path(), "--import") for name in names)


def of_command() -> tuple[Plugin, ...]:
    """Return the plug-ins of `--import`."""
    return tuple(_of_command)


def load(name: str, folder: Path, where: str) -> Plugin:
    """Import a plug-in that the user named, and remember it for runs that record it.

    Args:
      name: a module's name, or the path of a .py file relative to `folder`, where a module is sought first too.
      where: the option or file that names it, for messages.

    Raises InputError where there is none, where it cannot be imported, or where it lies in the folder of a model.
    """
    wanted = Plugin.parse(name)
    source = _find(wanted.name, folder)
    if source is None:
        beside = f", nor a file {wanted.name.replace('.', '/')}.py in {folder.absolute()}"
        what = "no such file" if wanted.name.endswith(".py") else f"no such module on Python's path{beside}"
        raise InputError(f"{where}: there is no plug-in {wanted.name}: {what}; give the path of its .py file")
    _refuse_folder_of_model(source.file)
    digest = _digest(source)
    if wanted.digest not in (None, digest):
        raise InputError(f"{where}: {source.file} is not the plug-in {name}: its SHA-256 is {digest}")
    _import(source, digest)
    plugin = Plugin(str(source.file) if source.module in _finder.files else source.module, digest)
    _named[plugin.short] = plugin
    _Trusted().add(source.file, digest)
    return plugin


def load_recorded(text: str, record: Path) -> Plugin:
    """Import a plug-in that a file beside a model records, unless the user named one of its name, or with its source;
    return that one.

    Raises InputError where it is missing, has changed, lies in the folder of a model, or was never named by this user.
    """
    plugin = Plugin.parse(text)
    equal = [each for each in _named.values() if plugin.digest is not None and each.digest == plugin.digest]
    if stands_for := _named.get(plugin.short) or next(iter(equal), None):
        return stands_for
    if plugin.digest is None and plugin.name in load_installed():
        return plugin
    needs = f"{record} needs the plug-in {plugin.name}"
    source = _find(plugin.name, None) if _is_absolute_or_module(plugin.name) else None
    if source is None:
        raise InputError(f"{needs}, which is not there; install it, or give its file: --import PATH")
    _refuse_folder_of_model(source.file)
    digest = _digest(source)
    if plugin.digest is not None and digest != plugin.digest:
        raise InputError(
            f"{needs}, and {source.file} has changed since; put it back, or accept it as it is: --import {plugin.name}"
        )
    if not _Trusted().has(source.file, digest):
        raise InputError(f"{needs}, which you have not imported yet; read it, then give --import {plugin.name}")
    _import(source, digest)
    return plugin


def load_installed() -> list[str]:
    """Import the plug-ins of installed distributions (entry points of the group `jaxlm.plugins`), once, and return
    their modules. A function among them is called. Raises InputError, which names the distribution."""
    global _installed
    if _installed is None:
        _installed = []
        for entry in entry_points(group=GROUP):
            try:
                plugin = entry.load()
                if callable(plugin):
                    plugin()
            except Exception as error:
                _installed = None
                of = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
                raise InputError(
                    f"the plug-in {entry.name} of {of} cannot be imported: "
                    f"{_said(error, _folder_of(entry.module))}; repair or uninstall it"
                ) from error
            _installed.append(entry.module)
    return _installed


def installed_of(modules: Iterable[str]) -> list[Plugin]:
    """Return the installed plug-ins whose packages these modules are in."""
    packages = {module.partition(".")[0] for module in modules}
    return [Plugin(module, None) for module in load_installed() if module.partition(".")[0] in packages]


def are_imported() -> bool:
    """Return whether any plug-in is imported."""
    return bool(_imported or _installed)


def files() -> dict[str, str]:
    """Return the files of plug-ins by module, for `add_files` of a process that is spawned."""
    return {module: str(file) for module, file in _finder.files.items()}


def add_files(files: Mapping[str, str]) -> None:
    """Let modules be found in these files, as what is unpickled asks for them."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
    _finder.files.update({module: Path(file) for module, file in files.items()})


def source_digest(function: Any) -> str:
    """Return a digest of the file that a function is written in; of its name where there is none."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    if file is None or not os.path.isfile(file):
        return f"{function.__module__}.{function.__qualname__}"
    return _Source(function.__module__, Path(file)).digest()


def in_folder_of_model(file: Path) -> Path | None:
    """Return the folder of a model that a file lies in, however deep; None without one."""
    parents = dict.fromkeys((*file.absolute().parents, *file.resolve().parents))
    return next((folder for folder in parents if _is_of_model(folder)), None)


def _is_of_model(folder: Path) -> bool:
    if any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        return True
    if (folder / "config.toml").is_file() and any((folder / name).exists() for name in _OF_RUNS):
        return True
    with suppress(OSError, ValueError):
        published = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return isinstance(published, dict) and not {"model_type", "architectures"}.isdisjoint(published)
    return False


def _refuse_folder_of_model(file: Path) -> None:
    if (folder := in_folder_of_model(file)) is not None:
        raise InputError(
            f"{file} lies in {folder}, the folder of a model, from which no code is imported; read it, copy it "
            "elsewhere, and name that"
        )


def _is_absolute_or_module(name: str) -> bool:
    return Path(name).is_absolute() if name.endswith(".py") else _MODULE.fullmatch(name) is not None


def _find(name: str, folder: Path | None) -> _Source | None:
    """Return the module of a file, or that of a name: in the folder, or on Python's path. Nothing is imported for it.
    None where there is none. Raises InputError for what is no name."""
    if name.endswith(".py"):
        file = (folder or Path()).joinpath(Path(name).expanduser())
        return _of_file(file) if file.is_file() else None
    if not _MODULE.fullmatch(name):
        raise InputError(f"{name!r} is no plug-in; give the name of a module, or the path of a .py file")
    path = name.replace(".", "/")
    beside = () if folder is None else (folder / f"{path}.py", folder / path / "__init__.py")
    for file in beside:
        if file.is_file():
            return _of_file(file)
    spec: ModuleSpec | None = None
    locations = None
    for end in [match.start() for match in re.finditer(r"\.", name)] + [len(name)]:
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        found = (finder.find_spec(name[:end], locations) for finder in finders)
        spec = next((each for each in found if each is not None), None)
        if spec is None:
            return None
        locations = spec.submodule_search_locations
    return _Source(name, Path(spec.origin)) if spec and spec.origin and os.path.isfile(spec.origin) else None


def _of_file(file: Path) -> _Source:
    """Return the module of a file, whose name no other has, also where files of one name lie in several folders."""
    file = file.resolve()
    stem = re.sub(r"\W", "_", Plugin(str(file), None).short)
    module = f"jaxlm_plugin_{stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    return _Source(module, file)


def _digest(source: _Source) -> str:
    try:
        return source.digest()
    except OSError as error:
        raise InputError(f"the plug-in {source.file} cannot be read: {error.strerror or error}") from None


def _import(source: _Source, digest: str) -> None:
    """Import a module, unless a program did by another name; again where its file has changed since."""
    if source.module not in sys.modules and any(map(partial(_is_of, source.file), list(sys.modules.values()))):
        return
    if source.module.startswith("jaxlm_plugin_"):
        add_files({source.module: str(source.file)})
    if _imported.get(source.module, digest) != digest:
        for module in [m for m in sys.modules if m == source.module or m.startswith(f"{source.module}.")]:
            del sys.modules[module]
    try:
        importlib.import_module(source.module)
    except Exception as error:
        root = source.file.parent if source.file.name == "__init__.py" else source.file
        raise InputError(f"the plug-in {source.file} cannot be imported: {_said(error, root)}") from error
    _imported[source.module] = digest


def _is_of(file: Path, module: Any) -> bool:
    """Return whether a module was imported from a file."""
    return str(file) == os.path.realpath(getattr(module, "__file__", None) or "")


def _folder_of(module: str) -> Path | None:
    """Return the folder of the package of an installed module, or its file; None where there is none."""
    package = module.partition(".")[0]
    with suppress(ImportError, ValueError):
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
    return None


def _said(error: Exception, root: Path | None) -> str:
    """Return an error of a plug-in in a line, with the last place in its own file, or in its folder, that led to it. A
    SyntaxError says its place itself."""
    if root is None or isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith("<")]  # of importlib
    own = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(root.resolve())]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


class _Trusted:
    """The plug-ins that this user named, by file with the digests they had, in a file of the user's cache."""

    def __init__(self) -> None:
        self._file = Path(default_cache()).expanduser() / "plugins.json"

    def has(self, file: Path, digest: str) -> bool:
        """Return whether the user named this file as it is."""
        return digest in self._digests().get(str(file.resolve()), ())

    def add(self, file: Path, digest: str) -> None:
        """Remember a file, as far as the cache can be written."""
        digests = self._digests()
        known = digests.setdefault(str(file.resolve()), [])
        if digest not in known:
            known.append(digest)
            with suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                replace(self._file, json.dumps(digests, indent=1) + "\n")

    def _digests(self) -> dict[str, list[str]]:
        """Return what the file holds; nothing where another user wrote it."""
        try:
            own = self._file.stat().st_uid == os.geteuid()
            digests = json.loads(self._file.read_text(encoding="utf-8")) if own else {}
        except (OSError, ValueError):
            return {}
        return digests if isinstance(digests, dict) else {}
