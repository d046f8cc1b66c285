"""From a data configuration to tokenized splits: built once, reused while nothing changed."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.core.files import building, leftovers, locked
from jaxlm.data import formats, tokenizers
from jaxlm.data.cache import reading, writing
from jaxlm.data.config import HUGGING_FACE, DataConfig, expanded
from jaxlm.data.scan import Losses, Progress, Survey, survey
from jaxlm.data.sources import Changed, Source, find_sources
from jaxlm.data.store import TokenStore
from jaxlm.data.tokenizer_training import TRAINING_BYTES, train_bpe, train_characters
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.data.tokenizing import SIDES, tokenize, unfinished

_FORMAT = 2  # of what lies in the cache; another number makes everything anew


class SplitSource(NamedTuple):
    """A source's tokens: what is trained on, what is held out, and its share of the rows of a batch."""

    train: TokenStore
    held_out: TokenStore
    weight: float

    @property
    def held_out_bytes(self) -> int:
        """UTF-8 bytes that the held-out targets stand for."""
        return self.held_out.predicted_bytes


class Dataset(NamedTuple):
    """Tokenized sources, by name. `digest` identifies tokens, tokenizer and weights, wherever the files lie."""

    tokenizer: Tokenizer
    sources: dict[str, SplitSource]
    digest: str

    @property
    def held_out_bytes(self) -> int:
        """UTF-8 bytes that the held-out targets of all sources stand for."""
        return sum(source.held_out_bytes for source in self.sources.values())


def _nobody(*_: object) -> None:
    """Nobody watches."""


def prepare(
    data: DataConfig, vocabulary: int, say: Callable[[str], None] = _nobody, progress: Progress = _nobody
) -> Dataset:
    """The dataset that the configuration describes, from the cache where it is there.

    Raises InputError for text that cannot be read, or a tokenizer with more tokens than `vocabulary`.
    """
    sources, cache = find_sources(data, say), _Cache(data, say, progress)
    try:
        tokenizer = cache.tokenizer(sources, vocabulary)
        found = {source.name: cache.split(source, tokenizer) for source in sources}
    except BrokenProcessPool:
        raise InputError("a process that read text was killed, perhaps for its memory; start again to go on") from None
    identity = [tokenizer.to_json()]
    for name, (source, digest) in found.items():
        for side, store in (("training", source.train), ("held-out", source.held_out)):
            if not store.targets:  # a loss of nothing would look perfect
                raise InputError(f"data.held_out = {data.held_out} leaves no target in the {side} text; give more text")
        identity += [name, str(source.weight), digest]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return Dataset(tokenizer, {name: source for name, (source, _) in found.items()}, digest)


def tokenize_whole(
    data: DataConfig,
    text: str,
    tokenizer: Tokenizer,
    say: Callable[[str], None] = _nobody,
    progress: Progress = _nobody,
) -> TokenStore:
    """Other text than `data` has, read as it says, as one store; all of it, unless it lies at Hugging Face. Raises
    InputError as `prepare` does."""
    documents = data.documents if text.startswith(HUGGING_FACE) else None
    data = data.model_copy(update={"text": (text,), "sources": {}, "held_out": 1.0, "documents": documents})
    (source,) = find_sources(data, say)
    return _Cache(data, say, progress).split(source, tokenizer)[0].held_out


class _Cache:
    """Tokenizers, notes of surveys and tokens under `data.cache`, each under a name made of all that shapes it."""

    def __init__(self, data: DataConfig, say: Callable[[str], None], progress: Progress):
        self._data, self._say, self._progress = data, say, progress
        self._folder = expanded(data.cache, "data.cache")
        self._surveys: dict[str, Survey] = {}

    def tokenizer(self, sources: Sequence[Source], vocabulary: int) -> Tokenizer:
        """The tokenizer of the configuration, trained if it must be; of at most `vocabulary` tokens."""
        match kind := self._data.tokenizer:
            case "bytes":
                return _fitting(tokenizers.bytes_tokenizer(), vocabulary)
            case "characters":
                shaped_by = {}
            case "bpe":
                shaped_by = {"vocabulary": vocabulary, "held_out": self._data.held_out}
            case path:
                return _fitting(tokenizers.load(expanded(path, "data.tokenizer")), vocabulary)
        described = {"tokenizer": kind, **shaped_by, "sources": [source.described() for source in sources]}
        directory = self._directory("tokenizers", described)
        if not directory.is_dir():
            with self._as_surveyed(*sources):
                tokenizer = _fitting(self._train(kind, sources, vocabulary), vocabulary)
                for source in sources:
                    source.check()
            with writing(self._data.cache), building(directory) as folder:
                tokenizer.save(folder / "tokenizer.json")
        with reading(directory):
            tokenizer = tokenizers.load(directory / "tokenizer.json")
        return _fitting(tokenizer, vocabulary)

    def split(self, source: Source, tokenizer: Tokenizer) -> tuple[SplitSource, str]:
        """A source's tokens, tokenized if they must be, and a digest of them."""
        shaped_by = {"tokenizer": tokenizer.to_json(), "held_out": self._data.held_out}
        if tokenizer.drops:
            shaped_by["dropped"] = "counted"  # older ones take what is dropped for predicted
        directory = self._directory("datasets", {**shaped_by, **source.described()})
        lock = self._folder / "locks" / directory.name
        if not directory.is_dir():
            survey = self._survey(source)
            waiting = partial(self._say, f"another jaxlm tokenizes {source.name}; waiting for it")
            with writing(self._data.cache), locked(lock, waiting) as alone:
                if not directory.is_dir():  # nobody else was first
                    for killed in leftovers(directory.parent, directory.name) if alone else ():
                        shutil.rmtree(killed, ignore_errors=True)
                    self._say(f"tokenizing {_shown(survey.train_bytes + survey.held_out_bytes)} of {source.name}")
                    with self._as_surveyed(source):
                        tokenize(survey, tokenizer, directory, self._progress)
        elif unfinished(directory).is_dir():  # of a process that was killed, unless another just ends with it
            with suppress(OSError), locked(lock, _nobody) as alone:
                if alone:
                    shutil.rmtree(unfinished(directory))
        with reading(directory):
            train, held_out = (TokenStore(directory / side) for side in SIDES)
            manifest = json.loads((directory / "manifest.json").read_text())
            digest, losses = manifest["digest"], Losses(**manifest.get("losses", {}))  # older ones have none
        if source.name not in self._surveys:
            self._look_again(source, losses)
        self._say_unread(source, train, held_out)
        return SplitSource(train, held_out, source.weight), digest

    def _look_again(self, source: Source, losses: Losses) -> None:
        """What a survey checks and says, of tokens that an earlier start made."""
        losses.check(source, self._data.max_broken)
        if losses.broken:
            self._say(losses.summary(source))

    def _say_unread(self, source: Source, *stores: TokenStore) -> None:
        """How much of the text the tokenizer does not know."""
        dropped, unknown = (sum(store.sizes[name] for store in stores) for name in ("dropped_bytes", "unknown_tokens"))
        if dropped:
            whole = dropped + sum(store.predicted_bytes for store in stores)
            self._say(
                f"{dropped:,} of {whole:,} bytes of {source.name} are characters without a token: they are left out, "
                "and bits per byte are of the others"
            )
        if unknown:
            tokens = sum(int(store.lengths.sum()) for store in stores)
            self._say(
                f"{unknown:,} of {tokens:,} tokens of {source.name} stand for text that the tokenizer does not know, "
                "of which bits per byte count every byte"
            )

    def _train(self, kind: str, sources: Sequence[Source], vocabulary: int) -> Tokenizer:
        surveys = [self._survey(source) for source in sources]
        if kind == "characters":
            return train_characters(surveys, self._progress)
        size = sum(survey.train_bytes for survey in surveys)
        some = f" {_shown(TRAINING_BYTES)} of" if size > TRAINING_BYTES else ""
        self._say(f"training a BPE tokenizer of {vocabulary} tokens on{some} {_shown(size)}")
        return train_bpe(surveys, vocabulary, self._progress)

    def _survey(self, source: Source) -> Survey:
        if source.name not in self._surveys:
            notes = self._notes(source)
            waiting = partial(self._say, f"another jaxlm reads {source.name}; waiting for it")
            with ExitStack() as until:
                with writing(self._data.cache):
                    alone = until.enter_context(locked(self._folder / "locks" / notes.name, waiting))
                self._surveys[source.name] = survey(
                    source,
                    self._data.held_out,
                    self._data.max_broken,
                    self._say,
                    self._progress,
                    notes if alone else None,
                )
        return self._surveys[source.name]

    def _notes(self, source: Source) -> Path:
        """Of a survey."""
        described = {"held_out": self._data.held_out, "part_bytes": formats.PART_BYTES, **source.described()}
        return self._directory("surveys", described)

    @contextmanager
    def _as_surveyed(self, *sources: Source) -> Iterator[None]:
        """A block that reads sources again: where they turn out to be others, they are to be counted anew."""
        try:
            yield
        except Changed:
            for source in sources:
                self._notes(source).unlink(missing_ok=True)
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


def _shown(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
