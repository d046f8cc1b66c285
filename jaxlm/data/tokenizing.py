"""Tokenization of scanned text, chunk by chunk."""

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.core.files import building
from jaxlm.data import tokenizers
from jaxlm.data.chat_template import ChatTemplate
from jaxlm.data.conversations import RecordKind, RefusedRecord
from jaxlm.data.formats import FileChunk, place_of
from jaxlm.data.parallel import in_order
from jaxlm.data.scan import Progress, SourceIndex, Split, documents
from jaxlm.data.store import DocumentEncoder, Encoder, StoreWriter, join_stores
from jaxlm.data.tokenizers import Tokenizer

SIDES = ("train", "held_out")


class _Job(NamedTuple):
    """One chunk to tokenize into a folder, with the tokenizer stored in a file, and the template of conversations."""

    chunk: FileChunk
    split: Split
    tokenizer: Path
    template: Path | None
    directory: Path


def tokenize(
    index: SourceIndex, tokenizer: Tokenizer, template: ChatTemplate | None, directory: Path, progress: Progress
) -> None:
    """Tokenize a source into a new folder: stores `train` and `held_out`, and a manifest.

    The template shows conversations. The manifest holds the digest of the stores and the skipped documents. Chunks are
    tokenized in parallel into the folder `unfinished(directory)`; completed ones survive an interruption and are
    reused. The stores hold the chunks in order, however they were computed. Raise InputError, and leave nothing, for
    text that the tokenizer or template cannot encode or that changed since the scan.
    """
    work = unfinished(directory)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(work / "tokenizer.json")
    of_conversations = work / "template.json" if template is not None else None
    if template is not None:
        (work / "template.json").write_text(template.to_json(), encoding="utf-8")
    jobs = [
        _Job(chunk, index.split, work / "tokenizer.json", of_conversations, work / f"{number:06d}")
        for number, chunk in enumerate(index.chunks)
    ]
    missing = [job for job in jobs if not job.directory.is_dir()]
    done = index.size - sum(job.chunk.size for job in missing)
    try:
        for job, _ in zip(missing, in_order(_tokenize_chunk, missing), strict=True):
            done += job.chunk.size
            progress(f"tokenizing {index.source.name}", done, index.size)
        index.source.check()
    except InputError:
        shutil.rmtree(work)
        raise
    with building(directory) as folder:
        digests = [join_stores(folder / side, [job.directory / side for job in jobs]) for side in SIDES]
        manifest = {"digest": "".join(digests), "skipped": index.skipped._asdict()}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(work, ignore_errors=True)


def unfinished(directory: Path) -> Path:
    """Return the folder of the tokenized chunks of an incomplete dataset."""
    return directory.with_name(f"{directory.name}.chunks")


def _tokenize_chunk(job: _Job) -> None:
    """Write the stores of a chunk. Raises InputError, which names the place of a record that the template refuses."""
    encoder = _encoder(job.chunk.field, job.tokenizer, job.template)
    try:
        _write_stores(job, encoder)
    except RefusedRecord as error:
        raise InputError(f"{place_of(job.chunk, error.document)}: {error}") from None


def _write_stores(job: _Job, encoder: Encoder) -> None:
    with (
        building(job.directory) as folder,
        StoreWriter(folder / "train", encoder) as train,
        StoreWriter(folder / "held_out", encoder) as held_out,
    ):
        for text in documents(job.chunk):
            for writer, side in zip((train, held_out), job.split.divide(text), strict=True):
                if side:
                    writer.add(side)


@lru_cache(1)
def _encoder(kind: str | RecordKind, tokenizer: Path, template: Path | None) -> Encoder:
    loaded = tokenizers.load(tokenizer)
    if isinstance(kind, str) or template is None:
        return DocumentEncoder(loaded)
    return kind.encoder(ChatTemplate.from_json(template.read_text(encoding="utf-8"), loaded))
