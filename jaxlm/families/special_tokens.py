"""Special tokens of a published model, merged from the five files that list some of them. Imports no JAX."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.families.files import (
    ADDED_TOKENS,
    CONFIG,
    GENERATION,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    read_json,
    text_of,
)

_SWITCHES = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_END, _BEGIN = "eos_token", "bos_token"


class AddedSpelling(NamedTuple):
    """A token that a file adds: its spelling, its id, its switches for a tokenizer.json, and the file."""

    text: str
    number: int
    switches: dict[str, bool]
    file: Path


class SpecialTokens:
    """The special tokens in the files of a folder other than tokenizer.json.

    Ids are read from config.json and generation_config.json, names from tokenizer_config.json, special_tokens_map.json
    and added_tokens.json. Raises InputError for a broken file, and for files that contradict each other.

    Attributes:
      settings: the content of tokenizer_config.json.
    """

    def __init__(self, folder: Path):
        names = CONFIG, GENERATION, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS
        found = [read_json(folder / name) if (folder / name).is_file() else {} for name in names]
        config, self._generation, self.settings, self._map, added = found
        self._folder, self._configs = folder, [config, text_of(config)]
        self._names = {text for table in (self.settings, self._map) for text in _special(table)}
        self.added = [*self._described(), *self._listed(added)]

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids that end what is drawn, of `eos_token_id` in all files that have one. Raises InputError where one has
        what is no id."""
        return frozenset(number for table in (*self._configs, self._generation) for number in self._ids(table, _END))

    def _ids(self, table: Mapping[str, Any], key: str) -> list[int]:
        found = table.get(f"{key}_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(isinstance(number, int) for number in ids):
            file = self._folder / (GENERATION if table is self._generation else CONFIG)
            raise InputError(f"{key}_id = {found!r} of {file} is no id, nor a list of ids")
        return ids

    @property
    def end_names(self) -> list[str]:
        """The spellings of `eos_token`: one, none, or two where files differ."""
        return self._named(_END)

    @property
    def begin_names(self) -> list[str]:
        """The spellings of `bos_token`."""
        return self._named(_BEGIN)

    def _named(self, key: str) -> list[str]:
        texts = (_text(table.get(key)) for table in (self.settings, self._map))
        return list(dict.fromkeys(text for text in texts if text))

    @property
    def special(self) -> set[str]:
        """The spellings that are special in some file. A single letter is one of the text."""
        found = self._names | {token.text for token in self.added if token.switches["special"]}
        return {text for text in found if len(text) > 1}

    def _described(self) -> Iterator[AddedSpelling]:
        file = self._folder / TOKENIZER_CONFIG
        described = self.settings.get("added_tokens_decoder") or {}
        for number, token in described.items() if isinstance(described, dict) else [("", None)]:
            text = _text(token) if isinstance(token, dict) else None
            if text is None or not number.isdecimal():
                raise InputError(f"{file} has an added_tokens_decoder that is no table of ids and tokens")
            yield AddedSpelling(text, int(number), {key: token.get(key) is True for key in _SWITCHES}, file)

    def _listed(self, added: Mapping[str, Any]) -> Iterator[AddedSpelling]:
        file = self._folder / ADDED_TOKENS
        for text, number in added.items():
            if not text or not isinstance(number, int) or number < 0:
                raise InputError(f"{file} is no table of tokens and ids")
            special = text in self._names
            switches = {**dict.fromkeys(_SWITCHES, False), "special": special, "normalized": not special}
            yield AddedSpelling(text, number, switches, file)

    def complete(self, described: dict[str, Any], rows: int) -> bool:
        """Change a tokenizer.json to have all tokens of the folder, and return whether anything changed.

        Tokens that a file calls special become special. Special tokens and missing tokens with an id of `rows` or more
        are left out: the model has no rows for them.

        Args:
          described: the content of the tokenizer.json, changed in place.
          rows: the rows of the model's vocabulary.

        Raises InputError if files give a token two ids, or an id two tokens.
        """
        vocabulary = described["model"]["vocab"]
        listed = isinstance(vocabulary, list)
        own = {text: number for number, (text, _) in enumerate(vocabulary)} if listed else vocabulary
        entries: dict[str, dict[str, Any]] = {entry["content"]: entry for entry in described["added_tokens"]}
        ids = {**own, **{text: entry["id"] for text, entry in entries.items()}}
        text_of_id = {number: text for text, number in ids.items()}
        before = [dict(entry) for entry in entries.values()]
        origin: dict[str, str] = {}
        for token in self.added:
            if ids.setdefault(token.text, token.number) != token.number:
                raise InputError(
                    f"{token.text!r} has the id {token.number} in {token.file.name}, and {ids[token.text]} in "
                    f"{origin.get(token.text, 'it')}"
                )
            if (other := text_of_id.setdefault(token.number, token.text)) != token.text:
                raise InputError(
                    f"the id {token.number} is {token.text!r} in {token.file.name}, and {other!r} in "
                    f"{origin.get(other, 'it')}"
                )
            origin.setdefault(token.text, token.file.name)
            if token.text not in entries and (token.number < rows or token.text in own):
                entries[token.text] = {"id": token.number, "content": token.text, **token.switches}
        for text in self.special & ids.keys():
            if text not in entries and ids[text] < rows:
                entries[text] = {"id": ids[text], "content": text, **dict.fromkeys(_SWITCHES, False)}
            if text in entries:
                entries[text]["special"] = True
        kept = [e for e in entries.values() if e["id"] < rows or not e["special"] or e["content"] in own]
        described["added_tokens"] = sorted(kept, key=lambda entry: entry["id"])
        if described["added_tokens"] == sorted(before, key=lambda entry: entry["id"]):
            return False
        if not listed:  # or the library numbers them anew, in order
            vocabulary |= {entry["content"]: entry["id"] for entry in kept}
        return True


def _special(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the spellings of special tokens under the keys of tokenizer_config.json or special_tokens_map.json."""
    values = [value for key, value in table.items() if key.endswith("_token")]
    for key in _LISTS:
        several = table.get(key)
        values += several.values() if isinstance(several, dict) else several if isinstance(several, list) else []
    yield from filter(None, map(_text, values))


def _text(token: Any) -> str | None:
    """Return the spelling of a token, which may be described by a table."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None
