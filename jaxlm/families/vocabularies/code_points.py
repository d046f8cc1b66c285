"""The table of characters of a SentencePiece normalizer as steps of a tokenizer.json, code point by code point.

The step `Precompiled` of the `tokenizers` library looks up a grapheme, and loses characters where the grapheme has
several. SentencePiece replaces the longest entry at each position. Here a text is cut into such entries by marks, the
entries of several characters are composed by a normalization form, and `Precompiled` sees single characters alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from tokenizers import Regex, normalizers

from jaxlm.core.errors import InputError
from jaxlm.families.vocabularies.charsmap import CharacterTable

# Code points that are no characters (Unicode 16, section 23.7). `_MARK` begins each mark; one of the text is escaped.
_MARK, _ESCAPED, _ENTRY, _SINGLE, _SEPARATOR = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufddf"
_KEPT = "\ufdd4"  # and those after it: characters that the normalization form would change
_MOST_KEPT, _MOST_REPLACED = 8, 1000
_COMBINING = r"\p{M}"
# Before these, and after a format character, a grapheme of fewer than six bytes may go on.
_EXTENDING = r"(?<!\A)(?=[\p{M}\p{Cf}\x{E33}\x{EB3}\x{FF9E}\x{FF9F}\x{1F3FB}-\x{1F3FF}])|(?<=\p{Cf})|(?<=\r)(?=\n)"
_FEW = 8  # sequences that are replaced one by one, without a look at a normalization form
# Characters that NFKC may change: not Han, Hangul syllables or private ones.
_CHANGING = [
    chr(code)
    for first, end in ((1, 0x3400), (0xA000, 0xAC00), (0xF900, 0xFDD0), (0xFDF0, 0x20000), (0x2F800, 0x2FA20))
    for code in range(first, end)
]
_SAMPLE = 16  # of so many entries one is replaced as a check


def steps(table: CharacterTable, compiled: bytes) -> list[normalizers.Normalizer]:
    """Return the steps that replace each text by what the table replaces it by.

    Raises InputError where no normalization form composes the entries of several characters.
    """
    entries = table.entries()
    several = {key: text for key, text in entries.items() if len(key) > 1}
    singles = {ord(key): text for key, text in entries.items() if len(key) == 1}
    if any(_MARK <= character <= _SEPARATOR for key in entries for character in key):
        raise InputError("its table of characters replaces code points that are no characters")
    best = _Composition(None, singles, several)
    if best.exceptions > _FEW:
        best = min(best, _Composition(normalizers.NFKC, singles, several), key=lambda way: way.exceptions)
    replacing = best.steps(compiled)
    given, wanted = (_SEPARATOR.join([*texts][::_SAMPLE]) for texts in (entries, entries.values()))
    if best.exceptions > _MOST_REPLACED or normalizers.Sequence(replacing).normalize_str(given) != wanted:
        raise InputError("its table of characters replaces sequences in a way that a tokenizer.json cannot say")
    return replacing


class _Composition:
    """A way to replace the entries of several characters: by a normalization form, and singly where that differs."""

    def __init__(self, form: type | None, singles: Mapping[int, str], several: Mapping[str, str]):
        self._form, self._several = form, several
        self._kept: list[str] = []
        if form is not None and several:
            composed = zip(_CHANGING, self._composed(_CHANGING, singles), strict=True)
            self._kept = [one for one, text in composed if text != singles.get(ord(one), one)]
        pairs = zip(several.values(), self._composed(several, singles), strict=True)
        self._replaced = {other: text for text, other in pairs if other != text}
        self.exceptions = len(self._replaced) + (
            0 if len(self._kept) <= _MOST_KEPT else len(self._kept) * _MOST_REPLACED
        )

    def _composed(self, texts: Iterable[str], singles: Mapping[int, str]) -> list[str]:
        """Return texts after the form, the table's single characters, and the composing form."""
        joined = _SEPARATOR.join(texts)
        if not joined:
            return []
        if self._form is not None:
            return _normalized(_normalized(joined, self._form).translate(singles), normalizers.NFC).split(_SEPARATOR)
        return joined.translate(singles).split(_SEPARATOR)

    def steps(self, compiled: bytes) -> list[normalizers.Normalizer]:
        replace = normalizers.Replace
        kept = [(character, _MARK + chr(ord(_KEPT) + at)) for at, character in enumerate(self._kept[:_MOST_KEPT])]
        form = [self._form()] if self._form and self._several else []
        before = [replace(Regex(_units(self._several)), _MARK + _ENTRY), *(replace(*pair) for pair in kept), *form]
        longest_first = sorted(self._replaced.items(), key=lambda pair: -len(pair[0]))
        after = [
            *([normalizers.NFC()] if form else []),
            *(replace(text, other) for text, other in longest_first),
            *(replace(mark, character) for character, mark in kept),
            replace(_MARK + _ENTRY, ""),
        ]
        return [
            replace(_MARK, _MARK + _ESCAPED),
            *(before if self._several else []),
            replace(Regex(_EXTENDING), _MARK + _SINGLE),
            normalizers.Precompiled(compiled),
            replace(_MARK + _SINGLE, ""),
            *(after if self._several else []),
            replace(_MARK + _ESCAPED, _MARK),
        ]


def _normalized(text: str, form: type) -> str:
    return form().normalize_str(text)


def _units(several: Iterable[str]) -> str:
    """Return a pattern of the places after which an entry ends and, before an entry or a character that composes, one
    begins."""
    following = f"[{_COMBINING}{_ranges({character for key in several for character in key[1:]})}]"
    entry = _longest(several)
    return rf"(?m)(?=..?{following})(?>(?:{entry})\K|.\K(?={following}|{entry}))"


def _longest(texts: Iterable[str]) -> str:
    """Return a pattern of the longest of some texts, whose first characters are grouped by what follows them."""
    rests: dict[str, set[str]] = defaultdict(set)
    for text in texts:
        rests[text[0]].add(text[1:])
    firsts: dict[frozenset[str], set[str]] = defaultdict(set)
    for first, rest in rests.items():
        firsts[frozenset(rest)].add(first)
    return "|".join(f"[{_ranges(group)}]{_optional(rest)}" for rest, group in firsts.items())


def _optional(rests: frozenset[str]) -> str:
    more = rests - {""}
    return f"(?:{_longest(more)}){'?' if '' in rests else ''}" if more else ""


def _ranges(characters: Iterable[str]) -> str:
    """Return the ranges of a set of characters, as they stand in brackets."""
    ranges: list[list[int]] = []
    for code in sorted(map(ord, characters)):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(rf"\x{{{first:X}}}-\x{{{last:X}}}" for first, last in ranges)
