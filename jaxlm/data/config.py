"""Where text comes from and how it becomes tokens. Imports no JAX."""

import math
import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from jaxlm.core.errors import InputError
from jaxlm.core.schema import Section

STANDARD_LIBRARY = "stdlib"
HUGGING_FACE = "hf:"  # begins the name of a dataset there
TOKENIZERS = ("bytes", "characters", "bpe")
_LEAST = 1e-9  # weight of a source, of the largest


def default_cache() -> str:
    """Where what can be made anew is kept, not expanded: `$XDG_CACHE_HOME/jaxlm`, or under `~/.cache`."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxlm")


def expanded(text: str, key: str) -> Path:
    """The path that a key gives, `~` replaced. Raises InputError where it is none."""
    try:
        if "\0" in text:
            raise ValueError("embedded null byte")
        return Path(text).expanduser()
    except (RuntimeError, ValueError) as error:  # a user who is not
        raise InputError(f"{key}: {text!r} is no path ({error}); give one") from None


def _some(text: tuple[str, ...]) -> tuple[str, ...]:
    if not all(text) or not text:
        raise ValueError('names no text; give files, directories or globs, or "stdlib"')
    return text


def _known(tokenizer: str) -> str:
    if tokenizer not in TOKENIZERS and not tokenizer.endswith(".json"):
        raise ValueError(f'"{tokenizer}" is none of {", ".join(TOKENIZERS)} and no path of a tokenizer.json')
    return tokenizer


Text = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    AfterValidator(_some),
]


class SourceConfig(Section):
    """One text of a mixture. `field` and `documents` are those of [data] where they are not given; of the rows of a
    batch a source gives its share of all weights, to within 1 %."""

    text: Text
    field: Annotated[str, Field(min_length=1)] | None = None
    documents: PositiveInt | None = None
    weight: PositiveFloat = 1.0


class DataConfig(Section):
    """Text, tokenizer and split.

    `text`: files, directories and globs of `.txt`, `.md`, `.py` (a file is a document), `.jsonl`, `.jsonl.gz`,
    `.jsonl.zst` and `.parquet` (a line or row is one, its text in `field`); "stdlib" is the Python standard library's
    own sources, found on every machine; "hf:OWNER/NAME:CONFIG@SPLIT" streams from Hugging Face, configuration and
    split (train) where they are needed. In its place `sources`, by name, are mixed by their weights.
    `documents`: take the first so many of a source; a Hugging Face source needs it.
    `max_broken`: the share of a source's documents that may be unreadable, and are then left out.
    `tokenizer`: "bytes", "characters", "bpe" (trained on the text, as large as `model.vocab_size`) or the path of a
    `tokenizer.json`. `held_out`: the share of a source's documents (of a single document: its end) that training
    never sees. `cache`: where token shards are kept.
    """

    text: Text | None = None
    field: Annotated[str, Field(min_length=1)] = "text"
    documents: PositiveInt | None = None
    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    max_broken: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.001
    tokenizer: Annotated[str, AfterValidator(_known)] = "bpe"
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    cache: Annotated[str, Field(min_length=1)] = Field(default_factory=default_cache)

    @model_validator(mode="before")
    @classmethod
    def _the_standard_library_unless_said(cls, values):
        if isinstance(values, dict) and not values.get("sources") and values.get("text") is None:
            return {**values, "text": STANDARD_LIBRARY}
        return values

    @model_validator(mode="after")
    def _consistent(self):
        if self.text and self.sources:
            raise ValueError(
                "data.text and data.sources are both given; leave one out, or make the text one of the sources: "
                "[data.sources.NAME]"
            )
        for name in self.sources:  # it becomes a key of results
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ValueError(f"data.sources.{name!r} is no name of letters, digits, _ and -")
        weights = {name: source.weight for name, source in self.sources.items()}
        if math.isinf(sum(weights.values())):
            raise ValueError("the weights of data.sources add up to more than a number holds; make all of them smaller")
        for name, weight in weights.items():
            if weight < _LEAST * max(weights.values()):
                raise ValueError(
                    f"data.sources.{name}.weight = {weight} is less than {_LEAST} of the largest, "
                    f"{max(weights.values())}, and would give no row; leave the source out, or give it more"
                )
        return self

    def described(self) -> dict[str, SourceConfig]:
        """The sources, whole, by the key under which their text is configured; weights add up to 1."""
        given = {f"data.sources.{name}.text": source for name, source in self.sources.items()}
        given = given or {"data.text": SourceConfig(text=self.text)}
        total = sum(source.weight for source in given.values())
        return {
            key: SourceConfig(
                text=source.text,
                field=source.field or self.field,
                documents=source.documents or self.documents,
                weight=source.weight / total,
            )
            for key, source in given.items()
        }
