"""The compiled table of characters in a SentencePiece normalizer, checked before a library uses the table."""

import numpy as np

from jaxlm.core.errors import InputError

_LEAF, _VALUE = 256, 2**31 - 1
_LETTERS = np.arange(1, 256, dtype=np.uint32)
_BYTES = [bytes([letter]) for letter in range(256)]
_LONGEST, _MOST_NODES = 256, 2**21  # bytes of an entry, and steps to all: a damaged array may lead in circles


class CharacterTable:
    """A table of what UTF-8 texts are replaced by: a double array (Darts-clone), and the texts that it points at.

    Raises InputError unless every step that any text can take in the array stays within the array, and every entry
    points at the beginning of a text: the library that uses the table checks neither.
    """

    def __init__(self, compiled: bytes):
        size = int.from_bytes(compiled[:4], "little")
        if len(compiled) < 4 or size % 4 or not 0 < size <= len(compiled) - 4:
            raise InputError("its table of characters is cut off")
        self._units, self._texts = np.frombuffer(compiled, "<u4", size // 4, 4), compiled[4 + size :]
        # The children of a node are at its place and offset, by exclusive or with a byte, and its value with none.
        places = np.arange(len(self._units), dtype=np.uint32)
        self._starts = places ^ ((self._units >> 10) << ((self._units & 512) >> 6))
        try:
            self._texts.decode()
        except UnicodeDecodeError:
            raise InputError("its table of characters holds no UTF-8") from None
        self._check()

    def _check(self) -> None:
        units, letters = self._units, _LETTERS
        reached, nodes = np.zeros(len(units), bool), np.zeros(1, np.uint32)
        while len(nodes):
            reached[nodes] = True
            starts = self._starts[nodes]
            if (starts | 255).max() >= len(units):
                raise InputError("its table of characters leads out of itself")
            for value in np.unique(units[starts[(units[nodes] & _LEAF) != 0]] & _VALUE).tolist():
                if self._texts.find(b"\0", value) < 0 or (value and self._texts[value - 1] != 0):
                    raise InputError("its table of characters points at no text")
            children = starts[:, None] ^ letters[None]
            children = children[(units[children] & (2**31 | 255)) == letters[None]]
            nodes = np.unique(children[~reached[children]])

    def entries(self) -> dict[str, str]:
        """Return the texts that are replaced, with what replaces them. Raises InputError for one that is no UTF-8."""
        labels = self._units & (2**31 | 255)
        children: dict[int, list[int]] = {}  # by the place of a node's value
        for place in np.flatnonzero((labels > 0) & (labels < 256)).tolist():
            children.setdefault(place ^ int(labels[place]), []).append(place)
        units, starts = self._units.tolist(), self._starts.tolist()
        text_of_key: dict[bytes, str] = {}
        nodes, seen = [(0, b"")], 0
        while nodes:
            node, key = nodes.pop()
            start, seen = starts[node], seen + 1
            if units[node] & _LEAF:
                text_of_key[key] = self._text_at(units[start] & _VALUE).decode()
            nodes += [(child, key + _BYTES[units[child] & 255]) for child in children.get(start, ())]
            if seen > _MOST_NODES or len(key) > _LONGEST:
                raise InputError("its table of characters has no end")
        try:
            return {key.decode(): text for key, text in text_of_key.items()}
        except UnicodeDecodeError:
            raise InputError("its table of characters replaces texts that are no UTF-8") from None

    def replaced(self, text: str) -> str:
        """Return a text after replacing, from its start on, the longest entry at each position."""
        content, output, at = text.encode(), b"", 0
        while at < len(content):
            size, replacement = self._longest(content, at)
            if not size:  # one character, as it is
                size = len(content[at : at + 4].decode(errors="ignore")[0].encode())
                replacement = content[at : at + size]
            output, at = output + replacement, at + size
        return output.decode()

    def _longest(self, content: bytes, start: int) -> tuple[int, bytes]:
        node, size, value = 0, 0, 0
        for at in range(start, len(content)):
            node = int(self._starts[node]) ^ content[at]
            if not content[at] or int(self._units[node]) & (2**31 | 255) != content[at]:
                break
            if self._units[node] & _LEAF:
                size, value = at + 1 - start, int(self._units[self._starts[node]]) & _VALUE
        return size, self._text_at(value)

    def _text_at(self, value: int) -> bytes:
        return self._texts[value : self._texts.find(b"\0", value)]
