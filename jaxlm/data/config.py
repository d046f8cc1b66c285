"""Configuration of text sources, tokenizer and held-out split. Imports no JAX."""

import math
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from jaxlm.core import copies
from jaxlm.core.addresses import is_address, place
from jaxlm.core.errors import InputError
from jaxlm.core.files import default_cache
from jaxlm.core.schema import InWords, Section

STANDARD_LIBRARY = "stdlib"
HUGGING_FACE = "hf:"  # prefix of a dataset name
_KINDS = ("text", "chat", "preferences")  # keys of files
TOKENIZERS = ["bytes", "characters", "bpe"]  # `tokenizer_training.register` adds to them
BYTES_VOCABULARY = 257  # bytes and the separator
_MIN_WEIGHT = 1e-9  # of a source, relative to the largest


def expanded(text: str, key: str) -> Path:
    """Return the path given by a key, with `~` expanded; of an address that of its copy, which is made or renewed.

    Raise InputError if it is not a path.
    """
    try:
        if "\0" in text:
            raise ValueError("embedded null byte")
        path = place(text)
        copies.pull(path)
        return path.expanduser()
    except InputError:
        raise
    except (RuntimeError, ValueError) as error:  # an unknown user
        raise InputError(f"{key}: {text!r} is not a path ({error}); give one") from None


def _not_empty(text: tuple[str, ...]) -> tuple[str, ...]:
    if not all(text) or not text:
        raise ValueError('names no text; give files, directories or globs, or "stdlib"')
    return text


def _known_tokenizer(tokenizer: str) -> str:
    if tokenizer not in TOKENIZERS and not tokenizer.endswith(".json"):
        raise ValueError(f'"{tokenizer}" is neither one of {", ".join(TOKENIZERS)} nor the path of a tokenizer.json')
    return tokenizer


def _of_this_machine(folder: str) -> str:
    if is_address(folder):
        raise ValueError(f"{folder} is in a bucket, and token shards are mapped into memory; give a folder here")
    return folder


Name = Annotated[str, Field(min_length=1)]
Text = Annotated[
    tuple[str, ...],
    InWords(type="string | list of strings"),
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    AfterValidator(_not_empty),
]


class SourceConfig(Section):
    """One source of a data mixture, of text or of conversations."""

    text: Text | None = None
    """Its text, as `data.text`."""
    chat: Text | None = None
    """Its conversations, as `data.chat`, in place of text."""
    preferences: Text | None = None
    """Its preferences, as `data.preferences`, in place of text."""
    validation: Text | None = None
    """Its held-out text or records, as `data.validation`."""
    field: Annotated[Name | None, InWords(default="data.field")] = None
    """The field of a record that holds its text."""
    documents: Annotated[PositiveInt | None, InWords(default="data.documents")] = None
    """Take the first n documents."""
    if_missing: Annotated[Name | None, InWords(default="data.if_missing")] = None
    """How to get the text, for the message that it is missing."""
    weight: PositiveFloat = 1.0
    """The source gives weight / (sum of all weights) of the rows of a batch, to within 1 %."""

    @model_validator(mode="after")
    def _text_or_chat(self):
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given)} are both given" if given else "text is missing, or chat")
        return self

    @property
    def kind(self) -> str:
        """Return the key of its files."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    @property
    def entries(self) -> tuple[str, ...]:
        """Return its files, directories and globs."""
        return getattr(self, self.kind)


class DataConfig(Section):
    """Text, tokenizer and split."""

    text: Annotated[Text | None, InWords(default='"stdlib" without sources')] = None
    """Files, directories and globs of `.txt`, `.md`, `.py` (a file is a document), `.jsonl`, `.jsonl.gz`, `.jsonl.zst`
    and `.parquet` (a line or row is a document, its text in `field`). "stdlib" is the source code of the Python
    standard library, present on every machine. Addresses in buckets, such as "gs://BUCKET/FOLDER/*.jsonl", are read as
    streams. "hf:OWNER/NAME:CONFIG@SPLIT" streams from Hugging Face, CONFIG and SPLIT (default: train) where needed.
    Line ends stay as a file has them."""
    field: Name = "text"
    """The field of a record that holds its text."""
    documents: PositiveInt | None = None
    """Take the first n documents of a source; required for a Hugging Face source."""
    if_missing: Name | None = None
    """How to get the text, for the message that it is missing."""
    chat: Text | None = None
    """Conversations in place of text, in files of records (such as `.jsonl`): each has `messages`, or `prompt` and
    `completion`. The chat template beside the tokenizer shows them, and only what the assistant says is trained and
    measured, up to the end of its turn. One that is longer than `training.sequence` is cut there."""
    preferences: Text | None = None
    """Preferences in place of text, for `[dpo]`: records with `prompt`, `chosen` and `rejected`, shown as conversations
    are. A row holds one pair of answers, each with its prompt; longer ones are cut at their ends."""
    chat_template: Annotated[Name | None, InWords(default="that beside data.tokenizer")] = None
    """The path of a chat template, a Jinja file; or the name of one that comes with jaxlm: "chatml", "gemma", "llama3",
    "mistral" or "qwen3". Marks that the tokenizer has no control tokens for are then text, and an answer ends with the
    token that ends a text."""
    chat_template_kwargs: Annotated[dict[str, bool | int | float | str], InWords(type="table", default="none")] = Field(
        default_factory=dict
    )
    """Variables that the chat template reads, such as `enable_thinking = false`."""
    validation: Text | None = None
    """Text or records to measure the held-out loss on; of the others none is then held out."""
    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    """Named sources in place of `text`, mixed by weight."""
    max_broken: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.001
    """The largest fraction of a source's documents that may be unreadable; they are skipped."""
    tokenizer: Annotated[str, AfterValidator(_known_tokenizer)] = "bpe"
    """The path of a `tokenizer.json`, or "bytes", "characters" or "bpe" (trained on the text, `model.vocab_size`
    tokens)."""
    held_out: Annotated[
        float | None, Field(ge=0.0, lt=1.0), InWords(default="0.01, at least 1 MB and at most 50 MB")
    ] = None
    """The fraction of a source's documents (of a single document: its end) that training never sees; 0 where each has
    `validation` of its own. The default follows from the size of the source's files: 10 % of a source below 10 MB,
    1 MB up to 100 MB, then 1 %, and 50 MB from 5 GB on."""
    cache: Annotated[
        Name, AfterValidator(_of_this_machine), InWords(default="$XDG_CACHE_HOME/jaxlm, or ~/.cache/jaxlm")
    ] = Field(default_factory=default_cache)
    """The folder of token shards."""

    @model_validator(mode="before")
    @classmethod
    def _default_to_standard_library(cls, values):
        if isinstance(values, dict) and not values.get("sources") and all(values.get(kind) is None for kind in _KINDS):
            return {**values, "text": STANDARD_LIBRARY}
        return values

    @model_validator(mode="after")
    def _consistent(self):
        given = [f"data.{name}" for name in (*_KINDS, "sources") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given[:2])} are both given; remove one, or make each one of the sources: "
                "[data.sources.NAME]"
            )
        kinds = {source.kind for source in self.sources.values()}
        if "preferences" in kinds and len(kinds) > 1:
            raise ValueError("data.sources has preferences and others, which have another loss; keep one kind")
        if self.validation and self.sources:
            raise ValueError("data.validation is of a single source; give data.sources.NAME.validation")
        for name in self.sources:  # the name becomes a key of the results
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ValueError(f"data.sources.{name!r} is not a name of letters, digits, _ and -")
        weights = {name: source.weight for name, source in self.sources.items()}
        if math.isinf(sum(weights.values())):
            raise ValueError("the sum of the weights of data.sources overflows; make all of them smaller")
        for name, weight in weights.items():
            if weight < _MIN_WEIGHT * max(weights.values()):
                raise ValueError(
                    f"data.sources.{name}.weight = {weight} is less than {_MIN_WEIGHT} of the largest, "
                    f"{max(weights.values())}, and would give no row; remove the source or raise its weight"
                )
        described = self.described()
        if self.held_out == 0.0 and (bare := [key for key, source in described.items() if not source.validation]):
            raise ValueError(f"data.held_out = 0 leaves no held-out text of {bare[0]}; give it validation text")
        spoken = [key for key, source in described.items() if source.kind != "text"]
        if spoken and self.tokenizer in TOKENIZERS:
            raise ValueError(
                f'{spoken[0]} needs the tokenizer of a model that converses, and data.tokenizer = "{self.tokenizer}" '
                "has no control tokens; set it to the path of its tokenizer.json, or start --from that model"
            )
        return self

    @property
    def of_conversations(self) -> bool:
        """Return whether some of its sources hold conversations or preferences, which a chat template shows."""
        return any(source.kind != "text" for source in self.described().values())

    @property
    def of_preferences(self) -> bool:
        """Return whether its sources hold preferences."""
        return any(source.kind == "preferences" for source in self.described().values())

    def described(self) -> dict[str, SourceConfig]:
        """Return the sources with defaults filled in, by the key of their text. Weights sum to 1."""
        sources = {f"data.sources.{name}.{source.kind}": source for name, source in self.sources.items()}
        if not sources:
            single = SourceConfig(**{kind: getattr(self, kind) for kind in (*_KINDS, "validation")})
            sources = {f"data.{single.kind}": single}
        total = sum(source.weight for source in sources.values())
        return {
            key: SourceConfig(
                **{kind: getattr(source, kind) for kind in (*_KINDS, "validation")},
                field=source.field or self.field,
                documents=source.documents or self.documents,
                if_missing=source.if_missing or self.if_missing,
                weight=source.weight / total,
            )
            for key, source in sources.items()
        }
