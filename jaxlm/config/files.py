"""The files of a configuration: where they are, what they hold, and the base of their [model]."""

import tomllib
from pathlib import Path
from typing import Any

from jaxlm.config.plugin_imports import import_plugins
from jaxlm.core import addresses, bundled, copies
from jaxlm.core.errors import InputError
from jaxlm.core.plugins import Plugin
from jaxlm.core.schema import merged
from jaxlm.families import hub
from jaxlm.families.files import CONFIG as PUBLISHED
from jaxlm.families.files import config_dtype, is_gguf, is_published, read_json
from jaxlm.models.execution_config import keys_of
from jaxlm.training.paths import RunPaths, small_files


def configuration_file(name: str | Path, folder: Path = Path()) -> tuple[Path, bool]:
    """Return the file of a configuration by a path in `folder`, a name, or that of a model of the Hub; and whether it
    is the record of a model. A run folder, a Hugging Face directory or a GGUF file holds one; raise InputError for
    another folder."""
    if hub.is_name(name):
        return hub.fetch(name) / PUBLISHED, True
    path = bundled.find(addresses.place(name), folder)
    copies.pull(path, small_files)
    if is_gguf(path):
        from jaxlm.families.gguf.model import unpacked

        return unpacked(path) / PUBLISHED, True
    if not path.is_dir():
        return path, False
    file = RunPaths(path).config
    if not file.is_file() and is_published(path):
        return path / PUBLISHED, True
    if not file.is_file():
        raise InputError(f"{path} is a folder and no run: it holds no {file.name}; give a TOML file or a RUN")
    return file, True


def read_values(path: Path) -> dict[str, Any]:
    """Return the keys of a file. Of a published model's config.json they are those of [model] alone."""
    if path.name != PUBLISHED:
        return _read_toml(path)
    from jaxlm.families.settings import model_of

    return {"model": model_of(read_json(path), str(path)).model_dump(mode="json", exclude_none=True)}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise bundled.missing(path) from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise InputError(f"{path} is not TOML that can be read: it has too many brackets in one another") from None
    except (OSError, ValueError) as error:  # no permission, not UTF-8, no name of a file
        raise InputError(f"{path} cannot be read: {error}") from None


def published_execution(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the dtype of inference of a published model, and the form of its matrices that is kept."""
    from jaxlm.families import quantized

    dtype, form = config_dtype(config), quantized.quantization(config, where)
    execution: dict[str, Any] = {} if form is None else keys_of(form)
    return execution | ({"dtype": dtype} if dtype else {})


def with_base(model: dict[str, Any], files: tuple[Path, ...], plugged: list[Plugin]) -> dict[str, Any]:
    """Return [model] with what its `base` says, and the base of that; `files` led here. Plug-ins of bases are added."""
    if "base" not in model:
        return model
    source, is_record = configuration_file(str(model["base"]), files[-1].parent)
    values = read_values(source)
    base = values.get("model")
    if not isinstance(base, dict):
        raise InputError(f"{files[-1]}: model.base = {str(source)!r} has no section [model]")
    if source.resolve() in [file.resolve() for file in files]:
        raise InputError(f"{files[-1]}: model.base = {str(source)!r} leads back to itself")
    import_plugins(values, source, is_record, plugged)
    changes = {key: value for key, value in model.items() if key != "base"}
    return merged(with_base(base, (*files, source), plugged), changes)
