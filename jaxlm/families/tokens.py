"""The tokenizer of a published model, with the ids that begin a prompt and the ids that end a generated text."""

import fnmatch
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers as library

from jaxlm.core.errors import InputError
from jaxlm.core.files import default_cache, replace
from jaxlm.data import tokenizers
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.families import post_processor
from jaxlm.families.files import (
    ADDED_TOKENS,
    MERGES,
    SENTENCEPIECE,
    SPECIAL_TOKENS,
    TEKKEN,
    TIKTOKEN,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
    read_json,
)
from jaxlm.families.special_tokens import SpecialTokens
from jaxlm.families.vocabularies import conversion, gpt2, sentencepiece, tekken, tiktoken
from jaxlm.families.vocabularies.conversion import Conversion

_EDITION = 2  # of converted tokenizers: a higher number leaves older files of the cache unused


def load(file: Path, folder: Path) -> Tokenizer:
    """Load the tokenizer.json of a published model whose small files are in a folder.

    A prompt begins with the ids that the file's post-processor puts before a text, and a text that is not continued
    ends with those that it puts after it, whatever `add_bos_token` and `add_eos_token` in another file say (as in
    transformers 5). A generated text ends with any id of `eos_token_id` in generation_config.json and
    config.json, and of `eos_token` in tokenizer_config.json and special_tokens_map.json. Raises InputError for a file
    that is missing or invalid.
    """
    backend, special = tokenizers.read(file), SpecialTokens(folder)
    stop_token_ids = special.stop_token_ids | _ids_of(backend, special.end_names)
    begin, end = post_processor.ids_around(backend)
    return Tokenizer(backend, begin, stop_token_ids or None, end)


def _ids_of(backend: library.Tokenizer, names: list[str]) -> set[int]:
    return {number for name in names if (number := backend.token_to_id(name)) is not None}


def files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer in a folder: the first of tokenizer.json, tekken.json, one of tiktoken, one of
    SentencePiece, and vocab.json with merges.txt. Empty where there is none."""
    return [folder / name for name in among(file.name for file in folder.glob("*") if file.is_file())]


def among(names: Iterable[str]) -> list[str]:
    """Return those of a folder's file names that `files` returns."""
    there = sorted(names)
    for pattern in (TOKENIZER, TEKKEN, *TIKTOKEN, SENTENCEPIECE):
        if found := fnmatch.filter(there, pattern):
            return found[:1]
    return [VOCABULARY, MERGES] if {VOCABULARY, MERGES} <= {*there} else []


def code(folder: Path) -> str | None:
    """Return the name of the Python code for the tokenizer of a folder, which is never run; None if no file names
    code."""
    if here := sorted(file.name for file in folder.glob("tokenization_*.py")):
        return here[0]
    named = SpecialTokens(folder).settings.get("auto_map")
    found = named.get("AutoTokenizer") if isinstance(named, dict) else None
    found = found if isinstance(found, list) else [found]
    return next((name for name in found if isinstance(name, str)), None)


def complete(folder: Path, rows: int) -> Path:
    """Return a tokenizer.json with all tokens of the model in a folder: the folder's own, or one in the cache.

    A file in the cache is written if the folder has the tokenizer in another format (`jaxlm.families.vocabularies`), or
    if the folder's tokenizer.json lacks tokens that the folder's other files have (`SpecialTokens.complete`).

    Args:
      rows: the rows of the model's vocabulary.

    Raises InputError for files that are broken, contradict each other or cannot be converted.
    """
    sources = files(folder)
    beside = [folder / name for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS)]
    digest = hashlib.sha256(f"{_EDITION} {rows}".encode())
    for file in (*sources, *beside):
        content = file.read_bytes() if file.is_file() else b""
        digest.update(f"\n{file.name} {len(content)}\n".encode() + content)
    cache_file = Path(default_cache(), "tokenizers", f"{digest.hexdigest()}.json").expanduser()
    if cache_file.is_file():
        return cache_file
    special = SpecialTokens(folder)
    own = read_json(sources[0]) if sources[0].name == TOKENIZER else None
    try:
        described = _converted(sources, special, rows) if own is None else _completed(own, special, rows)
    except InputError as error:
        raise InputError(f"{sources[0]}: {error}") from None
    if described is None:
        return sources[0]
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        replace(cache_file, json.dumps(described, ensure_ascii=False))
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"{cache_file} cannot be written ({why}); set XDG_CACHE_HOME to a folder that can") from None
    return cache_file


def _completed(described: dict[str, Any], special: SpecialTokens, rows: int) -> dict[str, Any] | None:
    """Return the content of a tokenizer.json with missing tokens added; None if no token is missing."""
    try:
        lacked = special.complete(described, rows)
    except InputError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise InputError(f"it is not a tokenizer.json ({error})") from None
    if not lacked:
        return None
    _made(described)
    return described


def _converted(sources: list[Path], special: SpecialTokens, rows: int) -> dict[str, Any]:
    """Return the content of a tokenizer.json that is converted from files of another format and verified."""
    converted = _convert(sources, special)
    described = json.loads(converted.backend.to_str())
    special.complete(described, rows)
    begins, backend = special.settings.get("add_bos_token"), _made(described)
    begin = next(iter(special.begin_names), converted.begin) if begins else converted.begin
    if begins is not False and begin is not None and (number := backend.token_to_id(begin)) is not None:
        described["post_processor"] = post_processor.template(begin, number)
    conversion.verify(converted, Tokenizer(backend))
    return described


def _made(described: dict[str, Any]) -> library.Tokenizer:
    """Return the tokenizer for the content of a tokenizer.json. Raises InputError if the library gives a token another
    id."""
    try:
        backend = library.Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"it is not a tokenizer.json ({error})") from None
    for entry in described["added_tokens"]:
        if (number := backend.token_to_id(entry["content"])) != entry["id"]:
            raise InputError(f"{entry['content']!r} has the id {entry['id']}, and would become {number}")
    return backend


def _convert(sources: list[Path], special: SpecialTokens) -> Conversion:
    contents = [source.read_bytes() for source in sources]
    if sources[0].name == TEKKEN:
        return tekken.convert(contents[0])
    if sources[0].name == VOCABULARY:
        return gpt2.convert(*contents, special.settings.get("tokenizer_class"))
    if tiktoken.is_tiktoken(contents[0]):
        return tiktoken.convert(contents[0], {token.number: token.text for token in special.added})
    return sentencepiece.convert(contents[0])
