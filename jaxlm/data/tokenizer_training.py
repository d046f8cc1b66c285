"""Tokenizers that are made of the text, by the name in `data.tokenizer`: trained on scanned text, chunk by chunk."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from jaxlm.core import plugins
from jaxlm.data import tokenizers
from jaxlm.data.config import TOKENIZERS
from jaxlm.data.formats import FileChunk
from jaxlm.data.parallel import in_order
from jaxlm.data.scan import Progress, SourceIndex, Split, documents
from jaxlm.data.tokenizers import Tokenizer

TRAINING_BYTES = 2**30  # about the most text that a tokenizer is trained on
_RUN = 1024
_ONE_WORD = re.compile(rf"\S{{{_RUN}}}|\s{{{_RUN}}}")  # over the last _RUN characters


class TokenizerKind(NamedTuple):
    """A tokenizer by its name in `data.tokenizer`.

    Attributes:
      make: makes one of the scanned sources and a number of tokens.
      shaped_by: what it depends on besides the text; None where it does not read the text.
    """

    make: Callable[[Sequence[SourceIndex], int, Progress], Tokenizer]
    shaped_by: tuple[str, ...] | None
    source: str | None = None  # a digest of the code, of one that was registered


# Makes a tokenizer of texts and a number of tokens.
TrainTokenizer = Callable[[Iterator[str], int], Any]


def register(name: str, train: TrainTokenizer) -> None:
    """Let `data.tokenizer` name a kind of tokenizer, which is trained on the training text.

    Args:
      name: other than of a path of a .json file.
      train: returns a `tokenizers.Tokenizer`, of which a run keeps the tokenizer.json, from (texts, vocabulary): an
        iterator over documents, of about TRAINING_BYTES at most, and `model.vocab_size`. Documents are separated by its
        token "<|endoftext|>", if it has one.

    Raises ValueError where another kind has the name.
    """
    if name in _BUILT_IN or name.endswith(".json"):
        raise ValueError(f"data.tokenizer = {name!r} is taken; give another name")

    def make(indexes: Sequence[SourceIndex], vocabulary: int, progress: Progress) -> Tokenizer:
        return tokenizers.checked(train(_documents(indexes, progress), vocabulary), name)

    KINDS[name] = TokenizerKind(make, ("vocabulary", "held_out"), plugins.source_digest(train))
    if name not in TOKENIZERS:
        TOKENIZERS.append(name)


def unregister(name: str) -> None:
    """Take a kind out that was registered."""
    del KINDS[name]
    TOKENIZERS.remove(name)


def _documents(indexes: Sequence[SourceIndex], progress: Progress) -> Iterator[str]:
    chosen = _chosen(indexes)
    for index in indexes:
        for texts in _each(partial(_training_texts, split=index.split, chosen=chosen), index, progress):
            yield from texts


def _training_texts(chunk: FileChunk, split: Split, chosen: float) -> list[str]:
    texts = (split.divide(text)[0] for text in documents(chunk) if split.sample(text, chosen))
    return [text for text in texts if text]


def _chosen(indexes: Sequence[SourceIndex]) -> float:
    """Return the fraction of the training text that tokenizers are trained on."""
    return min(1.0, TRAINING_BYTES / max(sum(index.train_bytes for index in indexes), 1))


def train_characters(indexes: Sequence[SourceIndex], progress: Progress) -> Tokenizer:
    """Make a tokenizer with a token for every character of the text, training and held-out."""
    seen: set[str] = set()
    for index in indexes:
        for characters in _each(_characters, index, progress):
            seen.update(characters)
    return tokenizers.characters_tokenizer(seen)


def _characters(chunk: FileChunk) -> str:
    return "".join(set().union(*documents(chunk)))


def train_bpe(indexes: Sequence[SourceIndex], vocabulary: int, progress: Progress) -> Tokenizer:
    """Train a byte-pair encoding on the training side.

    Text beyond TRAINING_BYTES is sampled down to about that size, uniformly by a hash of the documents. The weights of
    the sources are ignored.
    """
    chosen = _chosen(indexes)

    def texts() -> Iterator[list[str]]:
        for index in indexes:
            sample = partial(_sample, split=index.split, chosen=chosen)
            yield from _each(sample, index, progress)

    return tokenizers.train_bpe(texts(), vocabulary)


def _sample(chunk: FileChunk, split: Split, chosen: float) -> list[str]:
    texts = _training_texts(chunk, split, chosen)
    pieces = (piece for text in texts for piece in tokenizers.pieces(text[:TRAINING_BYTES]))
    return [short for piece in pieces for short in _cut_runs(piece)]


def _cut_runs(text: str) -> Iterator[str]:
    """Cut a text within runs of non-blanks or blanks of at least 2 × _RUN characters.

    Training time is quadratic in their length, and the cuts hardly change the learned merges.
    """
    at = 0
    for end in range(_RUN, len(text), _RUN):
        if _ONE_WORD.match(text, end - _RUN):
            yield text[at:end]
            at = end
    yield text[at:]


def _each(function: Callable, index: SourceIndex, progress: Progress) -> Iterator:
    done = 0
    for chunk, result in zip(index.chunks, in_order(function, index.chunks), strict=True):
        done += chunk.size
        progress(f"reading {index.source.name}", done, index.size)
        yield result


_BUILT_IN = {
    "bytes": TokenizerKind(lambda *_: tokenizers.bytes_tokenizer(), None),
    "characters": TokenizerKind(lambda indexes, _, progress: train_characters(indexes, progress), ()),
    "bpe": TokenizerKind(train_bpe, ("vocabulary", "held_out")),
}
KINDS = dict(_BUILT_IN)
