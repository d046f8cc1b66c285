"""Token shards on disk, written once and then memory-mapped."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxlm.data.cache import reading
from jaxlm.data.tokenizers import Tokenizer

SHARD_TOKENS = 2**29
_DOCUMENTS_AT_ONCE = 256
_CHARACTERS_AT_ONCE = 2**22
_LONGEST_TOKEN = 256  # characters
_DOCUMENTS_PER_SCAN = 4096
LEARNED = np.uint32(1 << 31)  # the highest bit of a token of a conversation that is learned


class Encoder(Protocol):
    """Makes token ids of documents, in a dtype, with their sizes."""

    dtype: np.dtype

    def encode(self, documents: Sequence[str]) -> tuple[list[np.ndarray], Counter[str]]:
        """Return the token ids of each document, and the sizes that `TokenStore` has of all. Raises InputError for text
        that cannot be tokenized."""
        ...


class TokenStore:
    """Tokenized documents of one split.

    A folder with `tokens-00000.npy` … (the smallest unsigned type that holds an id), `documents.npy`, int64
    [documents, 3]: shard, first token and number of tokens, and `sizes.json`. No document spans two shards.
    `sizes`: `predicted_bytes`, UTF-8 bytes of the targets; `dropped_bytes`, UTF-8 bytes of characters that the
    tokenizer drops; `unknown_tokens`, the number of tokens that stand for unknown text; of conversations
    `learned_targets`, the number of targets that are learned, whose tokens have the bit `LEARNED` set; of preferences
    `pairs`.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.documents = np.load(directory / "documents.npy", mmap_mode="r")
        self.shards = [np.load(shard, mmap_mode="r") for shard in sorted(directory.glob("tokens-*.npy"))]
        sizes = json.loads((directory / "sizes.json").read_text())
        if not isinstance(sizes, dict) or not all(isinstance(size, int) for size in sizes.values()):
            raise ValueError("sizes.json holds no sizes")
        self.sizes = Counter(sizes)
        if self.documents.shape[1:] != (3,):
            raise ValueError("documents.npy lists no documents")
        if len(self.documents) and self.documents[-1, 0] != len(self.shards) - 1:
            raise ValueError("token shards are missing")

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per document, separators included, int64 [documents]."""
        return np.asarray(self.documents[:, 2])

    @property
    def targets(self) -> int:
        """The number of predicted tokens: all but the first of each document, or those that are learned."""
        if self.of_conversations:
            return self.sizes["learned_targets"]
        return int(np.maximum(self.documents[:, 2] - 1, 0).sum())

    @property
    def predicted_bytes(self) -> int:
        """UTF-8 bytes of the targets."""
        return self.sizes["predicted_bytes"]

    @property
    def of_conversations(self) -> bool:
        """Return whether only some of the tokens are learned."""
        return "learned_targets" in self.sizes

    @property
    def of_pairs(self) -> bool:
        """Return whether every two documents are the chosen and the rejected conversation of a preference."""
        return "pairs" in self.sizes

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """Return `length` tokens of a document, from its token `start` on."""
        tokens = self._read(document, start, length)
        return tokens & ~LEARNED if self.of_conversations else tokens

    def learned(self, document: int, start: int, length: int) -> np.ndarray:
        """Return whether each of `length` tokens of a document is learned, from its token `start` on."""
        tokens = self._read(document, start, length)
        return (tokens & LEARNED).astype(bool) if self.of_conversations else np.ones(len(tokens), bool)

    def first_learned(self) -> np.ndarray:
        """Return the number of tokens before the first learned target of each document, int64 [documents]; where none
        is learned, the largest int64. The first token of a document is no target."""
        none = np.iinfo(np.int64).max
        if not self.of_conversations:
            return np.where(self.lengths > 1, 1, none)
        first = np.full(len(self.documents), none)
        for number, shard in enumerate(self.shards):  # the documents of a shard follow one another without gaps
            inside = np.flatnonzero(self.documents[:, 0] == number)
            for at in range(0, len(inside), _DOCUMENTS_PER_SCAN):
                some = inside[at : at + _DOCUMENTS_PER_SCAN]
                starts, lengths = np.asarray(self.documents[some, 1]), np.asarray(self.documents[some, 2])
                end = int(starts[-1] + lengths[-1])
                learned = np.flatnonzero(shard[starts[0] : end] & LEARNED) + starts[0]
                following = np.append(learned, end)[np.searchsorted(learned, starts + 1)]
                is_inside = following < starts + lengths
                first[some[is_inside]] = (following - starts)[is_inside]
        return first

    def _read(self, document: int, start: int, length: int) -> np.ndarray:
        shard, first, _ = self.documents[document]
        return self.shards[shard][first + start : first + start + length]


class StoreWriter:
    """A context manager that writes a store document by document. The store is complete when it exits without an error.

    It holds a few documents in memory at a time.
    """

    def __init__(self, directory: Path, encoder: Encoder):
        directory.mkdir(parents=True)
        self._files = _StoreFiles(directory, encoder.dtype)
        self._encoder = encoder
        self._waiting: list[str] = []
        self._characters = 0

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self._encode()
        self._files.close()

    def add(self, text: str) -> None:
        """Append a document. Raise InputError for text that cannot be tokenized."""
        self._waiting.append(text)
        self._characters += len(text)
        if len(self._waiting) == _DOCUMENTS_AT_ONCE or self._characters >= _CHARACTERS_AT_ONCE:
            self._encode()

    def _encode(self) -> None:
        documents, sizes = self._encoder.encode(self._waiting)
        for tokens in documents:
            self._files.append(tokens, np.array([[0, len(tokens)]]))
        self._files.sizes.update(sizes)
        self._waiting, self._characters = [], 0


class DocumentEncoder:
    """Encodes text documents for a store, between separators."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self.dtype = tokenizer, tokenizer.dtype

    def encode(self, documents: Sequence[str]) -> tuple[list[np.ndarray], Counter[str]]:
        """Return the token ids of documents, and their sizes."""
        found, unknown = self._tokenizer.encode_documents(documents), self._tokenizer.unknown
        return found, Counter(
            unknown_tokens=0 if unknown is None else sum(int(np.count_nonzero(ids == unknown)) for ids in found),
            dropped_bytes=sum(dropped_bytes(text, self._tokenizer) for text in documents),
            predicted_bytes=predicted_bytes(documents, self._tokenizer),
        )


def join_stores(directory: Path, stores: Iterable[Path]) -> str:
    """Concatenate stores into a new one. Return a digest of its tokens and document lengths."""
    directory.mkdir(parents=True)
    files = None
    for path in stores:
        with reading(path.parent):
            store = TokenStore(path)
        for number, tokens in enumerate(store.shards):
            files = files or _StoreFiles(directory, tokens.dtype)
            files.append(tokens, store.documents[store.documents[:, 0] == number, 1:])
        files.sizes.update(store.sizes)
    return files.close()


class _StoreFiles:
    """The files of a store, written sequentially."""

    def __init__(self, directory: Path, dtype: np.dtype):
        self._directory, self._dtype = directory, dtype
        self._documents = _NpyFile(directory / "documents.npy", np.dtype(np.int64), (3,))
        self._shard, self._tokens = 0, self._new_shard(0)
        self._digests = hashlib.sha256(), hashlib.sha256()
        self.sizes: Counter[str] = Counter()

    def append(self, tokens: np.ndarray, documents: np.ndarray) -> None:
        """Append tokens to one shard, with the first token and length of each document in them, [documents, 2]."""
        if self._tokens.length and self._tokens.length + len(tokens) > SHARD_TOKENS:
            self._tokens.close()
            self._shard += 1
            self._tokens = self._new_shard(self._shard)
        rows = np.insert(documents, 0, self._shard, axis=1).astype(np.int64)
        rows[:, 1] += self._tokens.length
        self._documents.append(rows)
        self._tokens.append(tokens)
        for digest, array in zip(self._digests, (tokens, rows[:, 2]), strict=True):
            digest.update(np.ascontiguousarray(array))

    def close(self) -> str:
        self._tokens.close()
        self._documents.close()
        (self._directory / "sizes.json").write_text(json.dumps(self.sizes))
        return "".join(digest.hexdigest() for digest in self._digests)

    def _new_shard(self, number: int) -> "_NpyFile":
        return _NpyFile(self._directory / f"tokens-{number:05d}.npy", self._dtype)


class _NpyFile:
    """A `.npy` file that is appended to."""

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...] = ()):
        self._file, self._dtype, self._shape = path.open("wb"), dtype, shape
        self.length = 0
        self._write_header()

    def append(self, array: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(array, self._dtype))
        self.length += len(array)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        """Write a header of constant size: NumPy pads it, so that the first dimension can grow."""
        shape = (self.length, *self._shape)
        described = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, described)


def predicted_bytes(texts: Iterable[str], tokenizer: Tokenizer) -> int:
    """Count the UTF-8 bytes that a model predicts of these documents.

    Without a leading separator, the first token of a document is given, not predicted. Dropped characters do not count.
    """
    total = 0
    for text in texts:
        given = 0
        if tokenizer.separator is None:
            given = sum(map(tokenizer.size, tokenizer.encode_batch([text[:_LONGEST_TOKEN]])[0][:1]))
        total += len(text.encode()) - given - dropped_bytes(text, tokenizer)
    return total


def dropped_bytes(text: str, tokenizer: Tokenizer) -> int:
    """Count the UTF-8 bytes of the characters that a tokenizer drops from a text."""
    return sum(text.count(character) * len(character.encode()) for character in tokenizer.dropped(text))
