"""Token shards on disk: written once, then memory-mapped."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxlm.data.tokenizers import Tokenizer

SHARD_TOKENS = 2**27
_DOCUMENTS_AT_ONCE = 256
_LONGEST_TOKEN = 256  # characters


class TokenStore:
    """Tokenized documents of one split.

    A folder with `tokens-00000.npy` … (the smallest unsigned type that holds an id) and `documents.npy`, int64
    [documents, 3]: shard, first token and number of tokens. No document lies in two shards.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._documents = np.load(directory / "documents.npy", mmap_mode="r")
        shards = sorted(directory.glob("tokens-*.npy"))
        self._shards = [np.load(shard, mmap_mode="r") for shard in shards]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, separators included, int64 [documents]."""
        return np.asarray(self._documents[:, 2])

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """`length` tokens of a document from its token `start` on."""
        shard, first, _ = self._documents[document]
        return self._shards[shard][first + start : first + start + length]


def write_store(directory: Path, texts: Iterable[str], tokenizer: Tokenizer) -> TokenStore:
    """Tokenize documents into a new folder."""
    directory.mkdir(parents=True)
    documents: list[tuple[int, int, int]] = []
    pending: list[np.ndarray] = []
    shard = filled = 0

    def flush() -> None:
        tokens = np.concatenate(pending) if pending else np.zeros(0, tokenizer.dtype)
        np.save(directory / f"tokens-{shard:05d}.npy", tokens)

    for group in _in_groups(texts, _DOCUMENTS_AT_ONCE):
        for tokens in tokenizer.encode_documents(group):
            if filled and filled + len(tokens) > SHARD_TOKENS:
                flush()
                pending, filled, shard = [], 0, shard + 1
            documents.append((shard, filled, len(tokens)))
            pending.append(tokens)
            filled += len(tokens)
    flush()
    np.save(directory / "documents.npy", np.array(documents, np.int64).reshape(-1, 3))
    return TokenStore(directory)


def predicted_bytes(texts: Iterable[str], tokenizer: Tokenizer) -> int:
    """UTF-8 bytes that a model predicts of these documents: without a separator before it, a document's first
    token is given, not predicted."""
    total = 0
    for text in texts:
        given = 0
        if tokenizer.separator is None:
            given = sum(map(tokenizer.size, tokenizer.encode(text[:_LONGEST_TOKEN])[:1]))
        total += len(text.encode()) - given
    return total


def _in_groups(texts: Iterable[str], size: int) -> Iterable[list[str]]:
    group: list[str] = []
    for text in texts:
        group.append(text)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
