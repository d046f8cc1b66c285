"""Decoding token by token, to exactly the text that a tokenizer gives for all tokens at once. Imports no JAX."""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Decoders of the `tokenizers` library that look at one token, and at whether it is the first or the last.
_OF_ONE_TOKEN = {"Replace", "Metaspace", "WordPiece", "ByteFallback", "Strip", "BPEDecoder"}
_LETTER = "a"  # a token that stands for those before and after: no decoder changes it


class StreamDecoder(Protocol):
    """A decoder that is given the names of tokens one by one.

    `add` returns text that no further token can change; `rest` returns the text still held back, as it is if no token
    follows. The texts of all `add` and the last `rest`, joined, are what the library decodes.
    """

    def add(self, name: str) -> str: ...
    def rest(self) -> str: ...


def stream_decoder(
    steps: Sequence[Mapping[str, Any]], decode: Callable[[list[str]], str], bytes_of: Callable[[str], bytes]
) -> StreamDecoder:
    """Return a decoder for texts that come token by token.

    Args:
      steps: the decoders in a tokenizer.json, sequences taken apart; of an unknown kind, all text is held back.
      decode: returns the text of the names of all tokens.
      bytes_of: returns the bytes that the byte-level name of a token stands for.
    """
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteStream(bytes_of)
    fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    is_known = _OF_ONE_TOKEN.issuperset(kinds[:fused]) and all(map(_is_of_one_character, steps[fused:]))
    return _PieceStream(
        decode,
        holds_all=not is_known,
        joins_bytes="ByteFallback" in kinds,
        sees_next="BPEDecoder" in kinds,
    )


def _is_of_one_character(step: Mapping[str, Any]) -> bool:
    """Return whether a decoder changes each character of a whole text by itself, or its beginning alone."""
    match step:
        case {"type": "Fuse"} | {"type": "Strip", "stop": 0}:
            return True
        case {"type": "Replace", "pattern": {"String": pattern}}:
            return len(pattern) == 1
    return False


class _ByteStream:
    """A decoder of tokens that are bytes of UTF-8: what may become a character is held back."""

    def __init__(self, bytes_of: Callable[[str], bytes]):
        self._bytes_of, self._utf8 = bytes_of, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, name: str) -> str:
        return self._utf8.decode(self._bytes_of(name))

    def rest(self) -> str:
        return self._utf8.getstate()[0].decode(errors="replace")


class _PieceStream:
    """A decoder of tokens that are pieces of text.

    A unit is one token, or a run of byte tokens: one byte that fits nowhere makes the whole run U+FFFD, so the run is
    held back to its end. A unit is decoded between letters that stand for the tokens around it.
    """

    def __init__(self, decode: Callable[[list[str]], str], holds_all: bool, joins_bytes: bool, sees_next: bool):
        self._decode = decode
        self._holds_all, self._joins_bytes, self._sees_next = holds_all, joins_bytes, sees_next
        self._before: list[str] = []  # a letter; or the first tokens, while they have no text
        self._unit: list[str] = []

    def add(self, name: str) -> str:
        is_byte = self._joins_bytes and _BYTE.fullmatch(name) is not None
        goes_on = self._holds_all or (is_byte and bool(self._unit) and _BYTE.fullmatch(self._unit[-1]) is not None)
        text = "" if goes_on or not self._unit else self._ended([_LETTER] if self._sees_next else [])
        self._unit.append(name)
        return text if is_byte or self._holds_all or self._sees_next else text + self._ended([])

    def rest(self) -> str:
        return self._text([]) if self._unit else ""

    def _text(self, after: list[str]) -> str:
        start, end = (len(self._decode(names)) if names else 0 for names in (self._before, after))
        text = self._decode([*self._before, *self._unit, *after])
        return text[start : len(text) - end]

    def _ended(self, after: list[str]) -> str:
        text = self._text(after)
        self._before = [_LETTER] if text or self._before == [_LETTER] else [*self._before, *self._unit]
        self._unit = []
        return text
