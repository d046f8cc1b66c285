"""The container of a GGUF file: metadata, and where its tensors lie.

Source: github.com/ggml-org/ggml, docs/gguf.md. Files come from outside: every bound is checked before a byte of a
tensor is read, and nothing is executed.
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.families.gguf.blocks import NOT_READ, TYPES, BlockType
from jaxlm.families.quantized.scaled import ScaledTensor
from jaxlm.families.safetensors import LazyTensor, StoredTensor

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_LONGEST_HEADER = 2**30  # bytes
_MOST = 2**28  # entries, elements of an array, and bytes of a string
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file: its metadata by key, its tensors by the file's own names, and a digest of its header."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor | LazyTensor]
    digest: str


def read(path: Path) -> GgufFile:
    """Return the header of a GGUF file, of version 2 or 3.

    Tensors have the shapes of a Hugging Face file: the innermost dimension last. Quantized ones are made float32 when
    they are read. Raises InputError for a file that is not whole and sound, or has a type that jaxlm does not read.
    """
    try:
        with path.open("rb") as file:
            return _Header(path, file, path.stat().st_size).read()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (struct.error, UnicodeDecodeError, RecursionError):
        raise InputError(f"{path} is no GGUF file, or is cut off") from None


class _Header:
    def __init__(self, path: Path, file: BinaryIO, size: int):
        self._path, self._file, self._size = path, file, size
        self._digest = hashlib.sha256(str(size).encode())

    def read(self) -> GgufFile:
        if self._bytes(4) != _MAGIC:
            raise InputError(f"{self._path} is no GGUF file: it does not begin with {_MAGIC.decode()}")
        version = self._scalar("I")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise InputError(f"{self._path} is of version {version} of GGUF, and jaxlm reads {known}")
        number, entries = self._count(), self._count()
        metadata = {self._string(): self._value(self._scalar("I")) for _ in range(entries)}
        described = [self._tensor() for _ in range(number)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**16:
            raise InputError(f"{self._path} aligns its tensors to {alignment!r} bytes, which is no number of bytes")
        start = -(-self._file.tell() // alignment) * alignment
        tensors = {name: self._placed(name, kind, shape, start + at) for name, kind, shape, at in described}
        if len(tensors) != number:
            raise InputError(f"{self._path} has two tensors of one name")
        return GgufFile(self._path, metadata, tensors, self._digest.hexdigest())

    def _bytes(self, number: int) -> bytes:
        if number > _MOST or self._file.tell() + number > min(self._size, _LONGEST_HEADER):
            raise InputError(f"{self._path} is no GGUF file, or is cut off in its header")
        content = self._file.read(number)
        self._digest.update(content)
        return content

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self._bytes(struct.calcsize(form)))
        return value

    def _count(self) -> int:
        number = self._scalar("Q")
        if number > _MOST:
            raise InputError(f"{self._path} is no GGUF file: it cannot have {number:,} entries")
        return number

    def _string(self) -> str:
        return self._bytes(self._count()).decode(errors="surrogateescape")

    def _value(self, kind: int) -> Any:
        if kind == _FLOAT32:  # the shortest number that it stands for: 1e-05, as in a config.json
            return float(str(np.float32(self._scalar("f"))))
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise InputError(f"{self._path} has metadata of the unknown type {kind}")
        of, number = self._scalar("I"), self._count()
        if of in _SCALARS:
            form = _SCALARS[of]
            return list(struct.unpack(f"<{number}{form}", self._bytes(number * struct.calcsize(form))))
        return [self._value(of) for _ in range(number)]

    def _tensor(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        name, dimensions = self._string(), self._scalar("I")
        if dimensions > 4:
            raise InputError(f"{self._path}: {name} has {dimensions} dimensions, and a tensor of GGUF has four at most")
        shape = tuple(self._count() for _ in range(dimensions))[::-1]
        kind = self._scalar("I")
        if kind not in TYPES:
            known = NOT_READ.get(kind, f"type {kind}")
            read = ", ".join(each.name for each in TYPES.values())
            raise InputError(f"{self._path}: {name} is quantized as {known}, and jaxlm reads {read}")
        return name, TYPES[kind], shape, self._scalar("Q")

    def _placed(self, name: str, kind: BlockType, shape: tuple[int, ...], offset: int) -> StoredTensor | LazyTensor:
        number = math.prod(shape)
        if shape and shape[-1] % kind.numbers:
            raise InputError(f"{self._path}: rows of {name} {list(shape)} are no whole blocks of {kind.numbers}")
        size = number // kind.numbers * kind.bytes
        if offset + size > self._size:
            raise InputError(f"{self._path} is cut off: {offset + size - self._size:,} bytes of {name} are missing")
        if kind.dtype is not None:
            return StoredTensor(self._path, kind.dtype, shape, offset)
        dequantize = kind.dequantize
        assert dequantize is not None
        packed = StoredTensor(self._path, np.dtype(np.uint8), (number // kind.numbers, kind.bytes), offset)
        of_tensor = np.dtype(np.float32), shape, lambda: dequantize(np.asarray(packed.read())).reshape(shape)
        split, numbers_kind = kind.parts, kind.kind
        if split is None or numbers_kind is None or len(shape) != 2:
            return LazyTensor(*of_tensor)

        def parts() -> tuple[np.ndarray, np.ndarray]:
            numbers, scale = split(np.asarray(packed.read()))
            return numbers.reshape(shape), np.broadcast_to(scale, numbers.shape).reshape(shape)

        return ScaledTensor(*of_tensor, numbers_kind, kind.numbers, parts)
