"""Files of tensors in the safetensors format: eight bytes of length, a JSON header, and the numbers.

The header comes from outside: every bound is checked before a byte of a tensor is read, and nothing is executed.
"""

import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxlm.core.errors import InputError

_LONGEST_HEADER = 100_000_000  # bytes, as in the format's own library
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    **{f"I{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_named(name: str) -> np.dtype:
    """Return the dtype with this name in the format."""
    return _DTYPES[name]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file. `read` reads its elements."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self) -> np.ndarray:
        """Return the tensor as a read-only view of the file."""
        if math.prod(self.shape) == 0:
            return np.zeros(self.shape, self.dtype)
        return _mapped(self.file)[self.offset : self.offset + self.bytes].view(self.dtype).reshape(self.shape)

    @property
    def dtype_name(self) -> str:
        """The format's name of the dtype."""
        return _NAMES[self.dtype]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that no file holds in this form; `make` computes its elements on demand."""

    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    def read(self) -> np.ndarray:
        """Return the tensor."""
        return self.make()

    @property
    def dtype_name(self) -> str:
        """The format's name of the dtype."""
        return _NAMES[self.dtype]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


# Files that views are held of: of a mixture's thousands of tensors, each would take a while to map by itself.
_maps: weakref.WeakValueDictionary[tuple[Path, int, int, int], np.memmap] = weakref.WeakValueDictionary()


def _mapped(file: Path) -> np.ndarray:
    """Return the bytes of a file, mapped once while a view of them is held."""
    status = file.stat()
    key = (file, status.st_ino, status.st_size, status.st_mtime_ns)
    if (mapped := _maps.get(key)) is None:
        _maps[key] = mapped = np.memmap(file, np.uint8, "r")
    return mapped.view(np.ndarray)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Raises InputError where the file is not whole and sound."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise InputError(f"{file} is no safetensors file, or is cut off: its header cannot be {length} bytes")
            header = json.loads(stream.read(length), object_pairs_hook=_without_duplicates, parse_int=_integer)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} has a header that is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise InputError(f"{file} has a header that is no table of tensors")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(file, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, math.prod(item[1].shape))):
        if tensor.offset != end:
            raise InputError(f"{file}: {name} overlaps another tensor, or leaves a gap before it")
        end += tensor.bytes
    if end != size:
        missing = f"is cut off: {end - size:,} bytes of its tensors are missing" if end > size else "has more bytes"
        raise InputError(f"{file} {missing}" + ("" if end > size else f" than its tensors: {size - end:,}"))
    return tensors


def _tensor(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise InputError(f"{file}: {name} is not described by dtype, shape and data_offsets")
    if dtype not in _DTYPES:
        raise InputError(f"{file}: {name} has the dtype {dtype!r}, which jaxlm does not read")
    if not all(isinstance(n, int) and 0 <= n < 2**48 for n in shape) or not 0 <= begin <= end:
        raise InputError(f"{file}: {name} has an impossible shape or place: {shape}, {begin} to {end}")
    if end - begin != _DTYPES[dtype].itemsize * math.prod(shape):
        raise InputError(
            f"{file}: {name} of {dtype} {shape} takes {_DTYPES[dtype].itemsize * math.prod(shape):,} bytes, and its "
            f"place has {end - begin:,}"
        )
    return StoredTensor(file, _DTYPES[dtype], tuple(shape), start + begin)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _integer(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("a number is too large")
    return int(digits)


def write(file: Path, tensors: Mapping[str, StoredTensor | LazyTensor], metadata: Mapping[str, str]) -> None:
    """Write tensors one after another; no more than one is in memory."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.bytes],
        }
        end += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            array = np.asarray(tensor.read(), tensor.dtype, order="C")
            assert array.shape == tensor.shape, name
            stream.write(array.reshape(-1).view(np.uint8).data)
        stream.flush()
        os.fsync(stream.fileno())


def shards(tensors: Mapping[str, StoredTensor | LazyTensor], most: int) -> list[dict[str, StoredTensor | LazyTensor]]:
    """Return the tensors in files of at most `most` bytes each, in order; a larger tensor has a file of its own."""
    files: list[dict[str, StoredTensor | LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.bytes > most:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.bytes
    return files


def total_bytes(tensors: Iterable[StoredTensor | LazyTensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.bytes for tensor in tensors)
