"""Tokenizer training on scanned text, chunk by chunk."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from jaxlm.data import tokenizers
from jaxlm.data.formats import FileChunk
from jaxlm.data.parallel import in_order
from jaxlm.data.scan import Progress, SourceIndex, Split, documents
from jaxlm.data.tokenizers import Tokenizer

TRAINING_BYTES = 2**30  # about the most text that a tokenizer is trained on
_RUN = 1024
_ONE_WORD = re.compile(rf"\S{{{_RUN}}}|\s{{{_RUN}}}")  # over the last _RUN characters


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
    chosen = min(1.0, TRAINING_BYTES / max(sum(index.train_bytes for index in indexes), 1))

    def texts() -> Iterator[list[str]]:
        for index in indexes:
            sample = partial(_sample, split=index.split, chosen=chosen)
            yield from _each(sample, index, progress)

    return tokenizers.train_bpe(texts(), vocabulary)


def _sample(chunk: FileChunk, split: Split, chosen: float) -> list[str]:
    texts = (split.divide(text)[0] for text in documents(chunk) if split.sample(text, chosen))
    pieces = (piece for text in texts if text for piece in tokenizers.pieces(text[:TRAINING_BYTES]))
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
