"""Where text comes from and how it becomes tokens. Imports no JAX."""

import os
from typing import Annotated

from pydantic import Field, field_validator

from jaxlm.schema import Section

STANDARD_LIBRARY = "stdlib"
TOKENIZERS = ("bytes", "characters", "bpe")


def _cache() -> str:
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxlm")


class DataConfig(Section):
    """Text, tokenizer and split.

    `text`: files, directories and globs of `.txt`, `.md` and `.py`; "stdlib" is the Python standard library's
    own sources, found on every machine. `tokenizer`: "bytes", "characters", "bpe" (trained on the text, as
    large as `model.vocabulary`) or the path of a `tokenizer.json`. `held_out`: the share of documents (of one
    document: its end) that training never sees. `cache`: where token shards are kept.
    """

    text: tuple[str, ...] = (STANDARD_LIBRARY,)
    tokenizer: str = "bpe"
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    cache: str = Field(default_factory=_cache)

    @field_validator("text", mode="before")
    @classmethod
    def _one_or_many(cls, value):
        return (value,) if isinstance(value, str) else value

    @field_validator("text")
    @classmethod
    def _some(cls, value):
        if not all(value) or not value:
            raise ValueError('names no text; give files, directories or globs, or "stdlib"')
        return value

    @field_validator("tokenizer")
    @classmethod
    def _known(cls, value):
        if value not in TOKENIZERS and not value.endswith(".json"):
            raise ValueError(f'"{value}" is none of {", ".join(TOKENIZERS)} and no path of a tokenizer.json')
        return value
