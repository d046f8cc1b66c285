"""Tokenized splits of a data configuration: built once, then reused until an input changes."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core import units
from jaxlm.core.addresses import is_address
from jaxlm.core.errors import InputError
from jaxlm.core.files import building, leftovers, locked
from jaxlm.data import chat_template, formats, named_templates, tokenizers
from jaxlm.data.cache import reading, writing
from jaxlm.data.chat_template import ChatTemplate
from jaxlm.data.config import HUGGING_FACE, DataConfig, expanded
from jaxlm.data.conversations import RecordKind
from jaxlm.data.scan import Progress, SkippedDocuments, SourceIndex, scan_source
from jaxlm.data.sources import Changed, Source, find_sources
from jaxlm.data.store import TokenStore
from jaxlm.data.tokenizer_training import KINDS, TRAINING_BYTES, TokenizerKind
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.data.tokenizing import SIDES, tokenize, unfinished

_FORMAT = 3  # of the cache; another number rebuilds everything


class SplitSource(NamedTuple):
    """The training and held-out tokens of a source, and its fraction of the rows of a batch."""

    train: TokenStore
    held_out: TokenStore
    weight: float

    @property
    def held_out_bytes(self) -> int:
        """UTF-8 bytes of the held-out targets."""
        return self.held_out.predicted_bytes


class Dataset(NamedTuple):
    """Tokenized sources, by name. `digest` identifies tokens, tokenizer and weights, independent of file paths."""

    tokenizer: Tokenizer
    sources: dict[str, SplitSource]
    digest: str

    @property
    def held_out_bytes(self) -> int:
        """UTF-8 bytes of the held-out targets of all sources."""
        return sum(source.held_out_bytes for source in self.sources.values())


def _nobody(*_: object) -> None:
    """Ignore a message."""


def prepare(
    data: DataConfig,
    vocabulary: int,
    say: Callable[[str], None] = _nobody,
    progress: Progress = _nobody,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
) -> Dataset:
    """Return the dataset of a configuration, from the cache if present. `tokenizer` stands for `data.tokenizer`, and
    `template` for `data.chat_template` or that beside the tokenizer.

    Raise InputError for unreadable text, or for a tokenizer with more tokens than `vocabulary`.
    """
    sources, cache = find_sources(data, say), _Cache(data, say, progress, template)
    try:
        tokenizer = _fitting(tokenizer or cache.tokenizer(sources, vocabulary), vocabulary)
        splits = {source.name: cache.split(source, tokenizer) for source in sources}
    except BrokenProcessPool:
        raise InputError(
            "a process that reads text was killed, perhaps for lack of memory; restart to resume"
        ) from None
    identity = [tokenizer.to_json()]
    for found, (name, (source, digest)) in zip(sources, splits.items(), strict=True):
        for side, store in (("training", source.train), ("held-out", source.held_out)):
            if not store.targets:  # a loss over no targets would look perfect
                raise InputError(f"{found.described_share} leaves no target in the {side} text; give more text")
        identity += [name, str(source.weight), digest]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return Dataset(tokenizer, {name: source for name, (source, _) in splits.items()}, digest)


def tokenize_whole(
    data: DataConfig,
    text: str,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    say: Callable[[str], None] = _nobody,
    progress: Progress = _nobody,
) -> TokenStore:
    """Tokenize other text, or conversations that a template shows, with the reading settings of `data` into one store.

    Read all documents, except for a Hugging Face source, where `data.documents` limits them. Raise InputError as
    `prepare` does.
    """
    documents = data.documents if text.startswith(HUGGING_FACE) and not is_address(text) else None
    data = data.model_copy(
        update={
            **{"text": None, "chat": None, "preferences": None, "validation": None, "sources": {}},
            "chat_template_kwargs": {},  # the template has its variables
            "text" if template is None else "chat": (text,),
            **{"if_missing": None, "held_out": 1.0, "documents": documents},
        }
    )
    (source,) = find_sources(data, say)
    return _Cache(data, say, progress, template).split(source, tokenizer)[0].held_out


class _Cache:
    """Tokenizers, scan logs and token stores under `data.cache`, each named by a hash of all its inputs."""

    def __init__(
        self, data: DataConfig, say: Callable[[str], None], progress: Progress, template: ChatTemplate | None = None
    ):
        self._data, self._say, self._progress, self._given = data, say, progress, template
        self._folder = expanded(data.cache, "data.cache")
        self._indexes: dict[str, SourceIndex] = {}

    def tokenizer(self, sources: Sequence[Source], vocabulary: int) -> Tokenizer:
        """Return the configured tokenizer, trained if needed, of at most `vocabulary` tokens."""
        name = self._data.tokenizer
        kind = KINDS.get(name)
        if kind is None:
            tokenizer = _fitting(tokenizers.load(expanded(name, "data.tokenizer")), vocabulary)
            if tokenizer.dropout:
                self._say(f"data.tokenizer: the BPE dropout of {tokenizer.dropout:g} in {name} is switched off")
            return tokenizer
        if kind.shaped_by is None:
            return _fitting(kind.make((), vocabulary, self._progress), vocabulary)
        shapes = {"vocabulary": vocabulary, "held_out": self._data.held_out}
        shaped_by = {key: shapes[key] for key in kind.shaped_by} | ({"source": kind.source} if kind.source else {})
        described = {"tokenizer": name, **shaped_by, "sources": [source.described() for source in sources]}
        directory = self._directory("tokenizers", described)
        if not directory.is_dir():
            with self._dropping_stale_scans(*sources):
                tokenizer = _fitting(self._train(name, kind, sources, vocabulary), vocabulary)
                for source in sources:
                    source.check()
            with writing(self._data.cache), building(directory) as folder:
                tokenizer.save(folder / "tokenizer.json")
        with reading(directory):
            tokenizer = tokenizers.load(directory / "tokenizer.json")
        if kind == "bpe" and tokenizer.vocab_size < vocabulary:
            self._say(
                f"the text gives a BPE tokenizer of {tokenizer.vocab_size} tokens and no more, and model.vocab_size = "
                f"{vocabulary}; set model.vocab_size={tokenizer.vocab_size}, or give more text"
            )
        return _fitting(tokenizer, vocabulary)

    def split(self, source: Source, tokenizer: Tokenizer) -> tuple[SplitSource, str]:
        """Return the tokens of a source and of its validation text, tokenized if needed, and their digest."""
        found, digest = self._split(source, tokenizer)
        if source.validation is None:
            return found, digest
        validation, other = self._split(source.validation, tokenizer)
        return found._replace(held_out=validation.held_out), digest + other

    def _split(self, source: Source, tokenizer: Tokenizer) -> tuple[SplitSource, str]:
        template = self._template(source, tokenizer) if isinstance(source.field, RecordKind) else None
        shaped_by = {"tokenizer": tokenizer.to_json(), "held_out": source.held_out}
        if template is not None:
            shaped_by["template"] = [template.source, template.variables]
        directory = self._directory("datasets", {**shaped_by, **source.described()})
        lock = self._folder / "locks" / directory.name
        if not directory.is_dir():
            index = self._index(source)
            waiting = partial(self._say, f"another jaxlm tokenizes {source.name}; waiting for it")
            with writing(self._data.cache), locked(lock, waiting) as alone:
                if not directory.is_dir():  # no other process was first
                    for killed in leftovers(directory.parent, directory.name) if alone else ():
                        shutil.rmtree(killed, ignore_errors=True)
                    self._say(f"tokenizing {units.size(index.train_bytes + index.held_out_bytes)} of {source.name}")
                    with self._dropping_stale_scans(source):
                        tokenize(index, tokenizer, template, directory, self._progress)
        elif unfinished(directory).is_dir():  # left by a killed process, unless another is just finishing
            with suppress(OSError), locked(lock, _nobody) as alone:
                if alone:
                    shutil.rmtree(unfinished(directory))
        with reading(directory):
            train, held_out = (TokenStore(directory / side) for side in SIDES)
            manifest = json.loads((directory / "manifest.json").read_text())
            digest = manifest["digest"]
            # Earlier versions called the entry `losses`, or had none.
            skipped = SkippedDocuments(**manifest.get("skipped", manifest.get("losses", {})))
        if source.key not in self._indexes:
            self._report_skipped(source, skipped)
        self._report_unknown(source, train, held_out)
        return SplitSource(train, held_out, source.weight), digest

    def _template(self, source: Source, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the template that shows conversations: that of the configuration, or beside the tokenizer."""
        template = self._given or self._plain_template(source, tokenizer)
        return template.with_kwargs(self._data.chat_template_kwargs)

    def _plain_template(self, source: Source, tokenizer: Tokenizer) -> ChatTemplate:
        folder = expanded(self._data.tokenizer, "data.tokenizer").parent
        places = folder, folder / "huggingface"  # of a published model, of a run
        if (path := self._data.chat_template) is not None:
            beside = next((place for place in places if (place / chat_template.SETTINGS).is_file()), folder)
            return chat_template.chosen(path, "data.chat_template", beside, tokenizer)
        for place in places:
            if (template := chat_template.load(place, tokenizer)) is not None:
                return template
        raise InputError(
            f"{source.key}: there is no chat template in {folder}; set data.chat_template to a "
            f"Jinja file, or to one of {', '.join(named_templates.NAMES)}"
        )

    def _report_skipped(self, source: Source, skipped: SkippedDocuments) -> None:
        """Check and report the skipped documents of tokens from an earlier run, as a scan does."""
        skipped.check(source, self._data.max_broken)
        if skipped.broken:
            self._say(skipped.summary(source))

    def _report_unknown(self, source: Source, *stores: TokenStore) -> None:
        """Report how much text the tokenizer drops or does not know."""
        dropped, unknown = (sum(store.sizes[name] for store in stores) for name in ("dropped_bytes", "unknown_tokens"))
        if dropped:
            whole = dropped + sum(store.predicted_bytes for store in stores)
            self._say(
                f"{dropped:,} of {whole:,} bytes of {source.name} are characters without a token: they are dropped, "
                "and bits per byte exclude them"
            )
        if unknown:
            tokens = sum(int(store.lengths.sum()) for store in stores)
            self._say(
                f"{unknown:,} of {tokens:,} tokens of {source.name} stand for text that the tokenizer does not know; "
                "bits per byte count all of its bytes"
            )

    def _train(self, name: str, kind: TokenizerKind, sources: Sequence[Source], vocabulary: int) -> Tokenizer:
        indexes = [self._index(source) for source in sources]
        if kind.shaped_by:
            size = sum(index.train_bytes for index in indexes)
            some = f" {units.size(TRAINING_BYTES)} of" if size > TRAINING_BYTES else ""
            called = name.upper() if name == "bpe" else name
            self._say(f"training a {called} tokenizer of {vocabulary} tokens on{some} {units.size(size)}")
        return kind.make(indexes, vocabulary, self._progress)

    def _index(self, source: Source) -> SourceIndex:
        if source.key not in self._indexes:
            for remark in source.remarks:
                self._say(remark)
            log = self._log(source)
            waiting = partial(self._say, f"another jaxlm reads {source.name}; waiting for it")
            with ExitStack() as until:
                with writing(self._data.cache):
                    alone = until.enter_context(locked(self._folder / "locks" / log.name, waiting))
                self._indexes[source.key] = scan_source(
                    source,
                    self._data.max_broken,
                    self._say,
                    self._progress,
                    log if alone else None,
                )
        return self._indexes[source.key]

    def _log(self, source: Source) -> Path:
        """Return the log file of the scan of a source."""
        described = {"held_out": source.held_out, "chunk_bytes": formats.CHUNK_BYTES, **source.described()}
        return self._directory("scans", described)

    @contextmanager
    def _dropping_stale_scans(self, *sources: Source) -> Iterator[None]:
        """Delete the scan logs of these sources if the block finds that their files changed."""
        try:
            yield
        except Changed:
            for source in sources:
                self._log(source).unlink(missing_ok=True)
            raise

    def _directory(self, kind: str, described: dict[str, Any]) -> Path:
        described = json.dumps({"format": _FORMAT, **described})
        return self._folder / kind / hashlib.sha256(described.encode()).hexdigest()[:20]


def _fitting(tokenizer: Tokenizer, vocabulary: int) -> Tokenizer:
    if tokenizer.vocab_size > vocabulary:
        raise InputError(
            f"model.vocab_size = {vocabulary} is smaller than the tokenizer's {tokenizer.vocab_size}; "
            f"set model.vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer
