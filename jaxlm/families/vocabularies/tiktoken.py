"""Files of tiktoken: a line for each byte string, in base64, with its rank."""

import base64
import binascii
import functools
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.families.vocabularies import byte_level
from jaxlm.families.vocabularies.byte_level import MOST_TOKENS, Splitting
from jaxlm.families.vocabularies.conversion import Conversion

_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,9})")


@functools.cache
def known() -> dict[int, dict[str, Any]]:
    """Return the vocabularies that jaxlm knows, by the number of their byte strings (tiktoken.toml)."""
    file = resources.files("jaxlm.families.vocabularies") / "tiktoken.toml"
    return {entry["ranks"]: entry for entry in tomllib.loads(file.read_text(encoding="utf-8"))["vocabulary"]}


def splitting(name: str) -> Splitting:
    """Return how a vocabulary that jaxlm knows splits texts, by its name in tiktoken.toml."""
    (entry,) = (entry for entry in known().values() if entry["name"] == name)
    return Splitting(entry["pattern"], "nfc" in entry)


def is_tiktoken(content: bytes) -> bool:
    """Return whether a file is of tiktoken, by its first line."""
    return _LINE.fullmatch(content[:4096].split(b"\n", 1)[0].rstrip()) is not None


def read(content: bytes) -> dict[bytes, int]:
    """Return the rank of each byte string. Raises InputError for an invalid line, or for a rank that comes twice."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.rstrip())
        try:
            token = base64.b64decode(match[1], validate=True) if match else b""
        except binascii.Error:
            token = b""
        if match is None or not token or token in ranks:
            raise InputError(f"its line {number} is no byte string in base64 with its rank, or comes twice")
        ranks[token] = int(match[2])
        if len(ranks) > MOST_TOKENS:
            raise InputError(f"it has more than {MOST_TOKENS:,} tokens")
    return ranks


def convert(content: bytes, named: Mapping[int, str]) -> Conversion:
    """Convert a file of tiktoken that jaxlm knows how to split texts for.

    Args:
      named: names of special tokens by id, which override the names that jaxlm knows.

    Raises InputError for a broken file, and for a vocabulary that jaxlm does not know.
    """
    ranks = read(content)
    if (entry := known().get(len(ranks))) is None:
        names = ", ".join(f"{entry['name']} ({number:,})" for number, entry in known().items())
        raise InputError(
            f"it has {len(ranks):,} tokens of bytes: which pattern splits texts for them is in code that is not "
            f"run; jaxlm knows {names}"
        )
    specials = _specials(entry, named, ranks)
    return byte_level.of_ranks(ranks, specials, entry.get("begin"), splitting(entry["name"]))


def _specials(entry: Mapping[str, Any], named: Mapping[int, str], ranks: Mapping[bytes, int]) -> dict[str, int]:
    found = {number: name for name, number in entry["specials"].items()}
    if rest := entry.get("rest"):
        places = range(rest["first"], rest["last"] + 1)
        found |= {number: rest["name"].format(rest["count"] + at) for at, number in enumerate(places)}
    given = {number: name for number, name in named.items() if number >= len(ranks)}
    known_names = {number: name for number, name in found.items() if name not in given.values()}
    return {name: number for number, name in sorted({**known_names, **given}.items())}
