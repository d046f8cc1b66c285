"""A GGUF file as a published model."""

from functools import cached_property
from pathlib import Path

from jaxlm.core.errors import InputError
from jaxlm.core.files import building, default_cache, digest
from jaxlm.families.directory import PublishedModel, say_widths
from jaxlm.families.files import CONFIG, write_json
from jaxlm.families.gguf import translation, vocabulary
from jaxlm.families.gguf.reader import GgufFile, read
from jaxlm.families.safetensors import LazyTensor, StoredTensor
from jaxlm.models.quantize_config import Quantization

_EDITION = 2  # of translations: a higher number leaves older folders of the cache unused


def unpacked(path: Path) -> Path:
    """Return a folder in the cache with the small files of a Hugging Face directory that a GGUF file describes.

    Raises InputError for a file that is broken, or that jaxlm cannot translate.
    """
    return _unpacked(read(path))


def _unpacked(file: GgufFile) -> Path:
    folder = Path(default_cache(), "gguf", f"{_EDITION}-{file.digest}").expanduser()
    if folder.is_dir():
        return folder
    config, contents = translation.config(file), vocabulary.files(file)
    try:
        with building(folder) as partial:
            write_json(partial / CONFIG, config)
            for name, content in contents.items():
                (partial / name).write_bytes(content)
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"{folder} cannot be written ({why}); set XDG_CACHE_HOME to a folder that can") from None
    return folder


class GgufModel(PublishedModel):
    """The model in a GGUF file. Its folder, in the cache, has the small files of a Hugging Face directory."""

    def __init__(self, path: Path):
        self._file = read(path)
        super().__init__(_unpacked(self._file))

    def __str__(self) -> str:
        return str(self.path)

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return self._file.path

    @cached_property
    def _dequantized(self) -> dict[str, StoredTensor | LazyTensor]:
        return translation.tensors(self._file)

    def digest(self) -> str:
        """Return a digest of the file."""
        return digest([self.path])

    def remarks(self, quantization: Quantization | None = None) -> list[str]:
        """Return lines that say which quantized tensors are kept in this form, and that others are read as float32."""
        kept = len(self.kept(quantization))
        number = sum(isinstance(tensor, LazyTensor) for tensor in self._file.tensors.values())
        return say_widths(kept, quantization, {"float32": number - kept})
