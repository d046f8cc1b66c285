"""Surveyed text to tokens, part by part."""

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.core.files import building
from jaxlm.data import tokenizers
from jaxlm.data.formats import Part
from jaxlm.data.parallel import in_order
from jaxlm.data.scan import Progress, Split, Survey, documents
from jaxlm.data.store import StoreWriter, join_stores
from jaxlm.data.tokenizers import Tokenizer

SIDES = ("train", "held_out")


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
