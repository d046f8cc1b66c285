"""From a data configuration to tokenized splits: built once, reused while nothing changed."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from jaxlm.data import tokenizers
from jaxlm.data.cache import building
from jaxlm.data.config import DataConfig
from jaxlm.data.sources import find_files, read_documents, split
from jaxlm.data.store import TokenStore, predicted_bytes, write_store
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.errors import InputError

_FORMAT = 1  # of what lies in the cache; another number makes everything anew


class Dataset(NamedTuple):
    """Two tokenized splits. `digest` identifies tokens and tokenizer, wherever the files lie."""

    tokenizer: Tokenizer
    train: TokenStore
    held_out: TokenStore
    held_out_bytes: int
    digest: str


def prepare(data: DataConfig, vocabulary: int, say: Callable[[str], None] = lambda line: None) -> Dataset:
    """The dataset that the configuration describes, from the cache where it is there.

    Raises InputError for text that cannot be read, or a tokenizer with more tokens than `vocabulary`.
    """
    files = find_files(data.text)
    directory = Path(data.cache).expanduser() / "datasets" / _fingerprint(data, vocabulary, files)
    if not (directory / "manifest.json").is_file():
        documents = list(read_documents(files))
        existing = next(p for p in directory.absolute().parents if p.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise InputError(f"data.cache: {data.cache} cannot be written; set it to a folder that can")
        try:
            _build(directory, data, vocabulary, documents, say)
        except OSError as error:
            raise InputError(f"data.cache: {directory.parent} cannot be written ({error.strerror})") from error
    manifest = json.loads((directory / "manifest.json").read_text())
    tokenizer = tokenizers.load(directory / "tokenizer.json")
    _check_vocabulary(tokenizer, vocabulary)
    train, held_out = TokenStore(directory / "train"), TokenStore(directory / "held_out")
    for side, store in (("training", train), ("held-out", held_out)):
        if not (store.lengths > 1).any():  # a loss of nothing would look perfect
            raise InputError(f"data.held_out = {data.held_out} leaves no target in the {side} text; give more text")
    return Dataset(tokenizer, train, held_out, manifest["held_out_bytes"], manifest["digest"])


def _fingerprint(data: DataConfig, vocabulary: int, files: list[Path]) -> str:
    """Changes whenever a file, or a choice that shapes the tokens, does."""
    described = {
        "format": _FORMAT,
        "tokenizer": data.tokenizer,
        "held_out": data.held_out,
        "files": [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files],
    }
    if data.tokenizer == "bpe":
        described["vocabulary"] = vocabulary
    elif data.tokenizer.endswith(".json"):
        described["tokenizer"] = tokenizers.load(Path(data.tokenizer).expanduser()).to_json()
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:20]


def _build(
    directory: Path, data: DataConfig, vocabulary: int, documents: list[str], say: Callable[[str], None]
) -> None:
    if not documents:
        raise InputError(f"data.text: the files of {', '.join(data.text)} are empty")
    train, held_out = split(documents, data.held_out)
    if data.tokenizer == "bpe":
        say(f"training a BPE tokenizer of {vocabulary} tokens on {_size(train)}")
    tokenizer = _tokenizer(data.tokenizer, vocabulary, train, documents)
    _check_vocabulary(tokenizer, vocabulary)

    say(f"tokenizing {_size(documents)}")
    with building(directory) as folder:
        tokenizer.save(folder / "tokenizer.json")
        digest = hashlib.sha256(tokenizer.to_json().encode())
        for name, texts in (("train", train), ("held_out", held_out)):
            write_store(folder / name, texts, tokenizer)
            for file in sorted((folder / name).iterdir()):
                digest.update(file.read_bytes())
        manifest = {"digest": digest.hexdigest(), "held_out_bytes": predicted_bytes(held_out, tokenizer)}
        (folder / "manifest.json").write_text(json.dumps(manifest))


def _tokenizer(kind: str, vocabulary: int, train: list[str], documents: list[str]) -> Tokenizer:
    match kind:
        case "bytes":
            return tokenizers.bytes_tokenizer()
        case "characters":
            return tokenizers.characters_tokenizer(documents)
        case "bpe":
            return tokenizers.train_bpe(train, vocabulary)
        case path:
            return tokenizers.load(Path(path).expanduser())


def _check_vocabulary(tokenizer: Tokenizer, vocabulary: int) -> None:
    if tokenizer.vocabulary > vocabulary:
        raise InputError(
            f"model.vocabulary = {vocabulary} is smaller than the tokenizer's {tokenizer.vocabulary}; "
            f"set model.vocabulary={tokenizer.vocabulary} or more"
        )


def _size(texts: Iterable[str]) -> str:
    return f"{sum(map(len, texts)) / 1e6:.1f} M characters"
