"""Tokenizers trained on surveyed text, part by part."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from jaxlm.data import tokenizers
from jaxlm.data.formats import Part
from jaxlm.data.parallel import in_order
from jaxlm.data.scan import Progress, Split, Survey, documents
from jaxlm.data.tokenizers import Tokenizer

TRAINING_BYTES = 2**30  # of text that a tokenizer is trained on, about
_RUN = 1024
_ONE_WORD = re.compile(rf"\S{{{_RUN}}}|\s{{{_RUN}}}")  # as far as a tokenizer may see


def train_characters(surveys: Sequence[Survey], progress: Progress) -> Tokenizer:
    """A token for every character that occurs, on either side."""
    seen: set[str] = set()
    for survey in surveys:
        for characters in _each(_characters, survey, progress):
            seen.update(characters)
    return tokenizers.characters_tokenizer(seen)


def _characters(part: Part) -> str:
    return "".join(set().union(*documents(part)))


def train_bpe(surveys: Sequence[Survey], vocabulary: int, progress: Progress) -> Tokenizer:
    """Byte-pair encoding of the training side; where there is more than TRAINING_BYTES, of about so much of it,
    chosen evenly by the hash of the documents. The weights of the sources play no part."""
    chosen = min(1.0, TRAINING_BYTES / max(sum(survey.train_bytes for survey in surveys), 1))

    def texts() -> Iterator[list[str]]:
        for survey in surveys:
            sample = partial(_sample, split=survey.split, chosen=chosen)
            yield from _each(sample, survey, progress)

    return tokenizers.train_bpe(texts(), vocabulary)


def _sample(part: Part, split: Split, chosen: float) -> list[str]:
    texts = (split.divide(text)[0] for text in documents(part) if split.sample(text, chosen))
    pieces = (piece for text in texts if text for piece in tokenizers.pieces(text[:TRAINING_BYTES]))
    return [short for piece in pieces for short in _cut_runs(piece)]


def _cut_runs(text: str) -> Iterator[str]:
    """A text, cut anywhere in runs without a blank, or of blanks, that are longer than twice _RUN: training takes the
    square of their length, and what it learns hardly depends on where they end."""
    at = 0
    for end in range(_RUN, len(text), _RUN):
        if _ONE_WORD.match(text, end - _RUN):
            yield text[at:end]
            at = end
    yield text[at:]


def _each(function: Callable, survey: Survey, progress: Progress) -> Iterator:
    done = 0
    for part, result in zip(survey.parts, in_order(function, survey.parts), strict=True):
        done += part.size
        progress(f"reading {survey.source.name}", done, survey.size)
        yield result
