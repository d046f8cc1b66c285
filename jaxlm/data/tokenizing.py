"""Surveyed text to a tokenizer and to tokens, part by part."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from jaxlm.data import tokenizers
from jaxlm.data.formats import Part
from jaxlm.data.parallel import in_order
from jaxlm.data.store import StoreWriter, join_stores
from jaxlm.data.survey import Progress, Split, Survey, documents
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.errors import InputError
from jaxlm.files import building

TRAINING_BYTES = 2**30  # of text that a tokenizer is trained on, about
SIDES = ("train", "held_out")
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


class _Job(NamedTuple):
    """One part to tokenize into a folder, with the tokenizer of a file."""

    part: Part
    split: Split
    tokenizer: Path
    directory: Path


def tokenize(survey: Survey, tokenizer: Tokenizer, directory: Path, progress: Progress) -> None:
    """Tokens of a source into a new folder: the stores `train` and `held_out`, and a manifest with their digest
    and what of the source is left out.

    Parts are tokenized side by side into a folder beside it, `unfinished`, where those that are whole stay if this
    breaks off, and are not tokenized again. The stores are the parts in their order, whoever tokenized them. Raises
    InputError, and leaves nothing, for text that the tokenizer has no tokens for, or that changed since the survey.
    """
    work = unfinished(directory)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(work / "tokenizer.json")
    jobs = [
        _Job(part, survey.split, work / "tokenizer.json", work / f"{number:06d}")
        for number, part in enumerate(survey.parts)
    ]
    missing = [job for job in jobs if not job.directory.is_dir()]
    done = survey.size - sum(job.part.size for job in missing)
    try:
        for job, _ in zip(missing, in_order(_tokenize_part, missing), strict=True):
            done += job.part.size
            progress(f"tokenizing {survey.source.name}", done, survey.size)
        survey.source.check()
    except InputError:
        shutil.rmtree(work)
        raise
    with building(directory) as folder:
        digests = [join_stores(folder / side, [job.directory / side for job in jobs]) for side in SIDES]
        manifest = {"digest": "".join(digests), "losses": survey.losses._asdict()}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(work, ignore_errors=True)


def unfinished(directory: Path) -> Path:
    """Where the parts of a dataset wait until all are there."""
    return directory.with_name(f"{directory.name}.parts")


def _tokenize_part(job: _Job) -> None:
    tokenizer = _load(job.tokenizer)
    with (
        building(job.directory) as folder,
        StoreWriter(folder / "train", tokenizer) as train,
        StoreWriter(folder / "held_out", tokenizer) as held_out,
    ):
        for text in documents(job.part):
            for writer, side in zip((train, held_out), job.split.divide(text), strict=True):
                if side:
                    writer.add(side)


_load = lru_cache(1)(tokenizers.load)


def _each(function: Callable, survey: Survey, progress: Progress) -> Iterator:
    done = 0
    for part, result in zip(survey.parts, in_order(function, survey.parts), strict=True):
        done += part.size
        progress(f"reading {survey.source.name}", done, survey.size)
        yield result
