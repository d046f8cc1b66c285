"""Models of the Hugging Face Hub, fetched into the Hub's own cache: hf:ORG/NAME, or hf:ORG/NAME@REVISION.

Only files that are needed are fetched: no weights for a configuration. `HF_HUB_OFFLINE=1` uses files that were fetched
before, `HF_TOKEN` opens gated models, `HF_HOME` says where the cache is.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from jaxlm.core.errors import InputError
from jaxlm.core.extras import install
from jaxlm.data.config import HUGGING_FACE
from jaxlm.families.files import ADAPTER, ADAPTER_CONFIG, CARRIED, INDEX, SINGLE, shards

_NAME = re.compile(re.escape(HUGGING_FACE) + r"(?P<model>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


def is_name(path: str | Path) -> bool:
    """Return whether this names a model of the Hub and no path."""
    return str(path).startswith(HUGGING_FACE)


def fetch(name: str | Path) -> Path:
    """Return the folder of a model's small files: all files but the weights. The weights of an adapter are small files.

    Raises InputError for an invalid name, without the package huggingface_hub, and for a file that cannot be fetched.
    """
    parts = _NAME.fullmatch(str(name))
    if parts is None:
        raise InputError(f"{name} is no model of the Hub; write hf:ORG/NAME, followed by @REVISION as needed")
    return _snapshot(name, parts["model"], parts["revision"], [*CARRIED, INDEX, ADAPTER_CONFIG, ADAPTER])


def fetch_weights(name: str | Path, folder: Path) -> None:
    """Put the safetensors of a model into the `folder` of its small files. Raises InputError if a file cannot be
    fetched."""
    parts = _NAME.fullmatch(str(name))
    assert parts is not None
    commit = folder.name  # the commit of the small files: the branch may have moved since
    _snapshot(name, parts["model"], commit, [SINGLE])
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        _snapshot(name, parts["model"], commit, set(shards(folder).values()))


def _snapshot(name: str | Path, model: str, revision: str | None, files: Iterable[str]) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise InputError(f"{name} needs the package huggingface_hub: {install('hf')}") from None
    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # the library raises all kinds, for network, model and permission
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"{name} cannot be fetched: {why}") from error
