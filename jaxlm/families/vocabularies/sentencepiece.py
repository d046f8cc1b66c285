"""SentencePiece models of kinds BPE and Unigram (Kudo and Richardson 2018, arXiv:1808.06226)."""

import math
import re
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import tokenizers as library
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jaxlm.core.errors import InputError
from jaxlm.families.vocabularies import code_points, protobuf
from jaxlm.families.vocabularies.byte_level import MOST_TOKENS, check_ids
from jaxlm.families.vocabularies.charsmap import CharacterTable
from jaxlm.families.vocabularies.conversion import Conversion, add_special, merged

_BLANK = "▁"
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_UNKNOWN_PENALTY = 10.0  # below the least likely piece, as in SentencePiece


class PieceKind(IntEnum):
    """The kinds of pieces, as the file numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class VocabularyPiece(NamedTuple):
    """A piece of the vocabulary, whose index is its id."""

    text: str
    score: float
    kind: PieceKind


class SentencePieceModel:
    """The content of a `tokenizer.model`, with the ids that the model gives a text.

    Raises InputError where the file is broken or of a kind that cannot be converted.
    """

    def __init__(self, content: bytes):
        messages: dict[int, list[bytes]] = {1: [], 2: [b""], 3: [b""]}
        for number, value in protobuf.fields(content):
            if number in messages and isinstance(value, bytes):
                messages[number].append(value)
        if len(messages[1]) > MOST_TOKENS:
            raise InputError(f"it has more than {MOST_TOKENS:,} pieces")
        self.pieces = [_piece(message) for message in messages[1]]
        # Later fields go before earlier ones: messages that are repeated are one.
        trained, normalized = (dict(protobuf.fields(b"".join(messages[number]))) for number in (2, 3))

        def number(key: int, default: int) -> int:
            value = trained.get(key, default)
            if not isinstance(value, int):
                raise InputError("its training's settings are broken")
            return protobuf.signed(value)

        self.kind = _KINDS.get(number(3, 1))
        self.byte_fallback = bool(number(35, 0))
        self.unknown, self.begin = number(40, 0), number(41, 1)
        table = normalized.get(2, b"")
        if not isinstance(table, bytes):
            raise InputError("its normalizer's settings are broken")
        self.charsmap = table
        self.dummy_prefix, self.one_blank, escapes = (bool(normalized.get(key, 1)) for key in (3, 4, 5))
        if self.kind not in ("unigram", "bpe"):
            raise InputError(f"it is of kind {self.kind or 'unknown'}; jaxlm reads bpe and unigram")
        if number(24, 0) or not escapes:
            raise InputError(f"it does not write {_BLANK} for a blank before a word")
        self._check()

    def _check(self) -> None:
        check_ids({piece.text: number for number, piece in enumerate(self.pieces)}, len(self.pieces))
        unknown = [number for number, piece in enumerate(self.pieces) if piece.kind == PieceKind.UNKNOWN]
        if unknown != [self.unknown]:
            raise InputError(f"it has the unknown pieces {unknown}, and not {self.unknown} alone")
        if self.begin >= len(self.pieces):
            raise InputError(f"it begins texts with the id {self.begin}, which it does not have")
        texts = {piece.text for piece in self.pieces if piece.kind == PieceKind.BYTE}
        if self.byte_fallback and texts != {f"<0x{byte:02X}>" for byte in range(256)}:
            raise InputError("it falls back to bytes and has not all of them")
        if self.kind == "unigram" and any(piece.kind == PieceKind.UNUSED for piece in self.pieces):
            raise InputError("it has pieces that are not used")
        # A merge needs both parts in the vocabulary.
        merging = [piece.text for piece in self.pieces if piece.kind == PieceKind.NORMAL]
        letters = {text for text in merging if len(text) == 1}
        if self.kind == "bpe" and (lost := next((text for text in merging if not letters.issuperset(text)), None)):
            raise InputError(f"the letters of its piece {lost!r} are no pieces")

    @cached_property
    def id_of(self) -> dict[str, int]:
        """The ids of the pieces that a text may become."""
        kinds = PieceKind.NORMAL, PieceKind.USER_DEFINED
        return {piece.text: number for number, piece in enumerate(self.pieces) if piece.kind in kinds}

    @cached_property
    def table(self) -> CharacterTable | None:
        """The characters that the normalizer replaces. Raises InputError as `CharacterTable`."""
        return CharacterTable(self.charsmap) if self.charsmap else None

    def of_kind(self, kind: PieceKind) -> list[str]:
        """Return the pieces of a kind, by id."""
        return [piece.text for piece in self.pieces if piece.kind == kind]

    def normalized(self, text: str) -> str:
        """Return the text that is cut into pieces."""
        text = self.table.replaced(text) if self.table else text
        if self.one_blank:
            text = re.sub(" +", " ", text.lstrip(" "))
        text = text.replace(" ", _BLANK)
        text = _BLANK + text if text and self.dummy_prefix else text
        return text.rstrip(_BLANK) if self.one_blank else text  # also where a text ends with ▁ itself

    def restored(self, text: str) -> str:
        """Return the text that decoding gives back."""
        text = self.normalized(text).replace(_BLANK, " ")
        return text.removeprefix(" ") if self.dummy_prefix or self.one_blank else text

    def ids(self, text: str) -> list[int] | None:
        """Return the ids of a text, computed by the format's rules; None for a Unigram text that spells out a piece
        without an id for texts, such as a control token: a tokenizer.json would cut the text there."""
        if self.kind == "unigram" and any(piece.text in text for piece in self.pieces if piece.text not in self.id_of):
            return None
        token_ids: list[int] = []
        for part in self._parts(self.normalized(text)):
            if part in self._user_defined:
                token_ids.append(self.id_of[part])
            else:
                for piece in self._merged(part) if self.kind == "bpe" else self._likeliest(part):
                    self._append(token_ids, piece)
        return token_ids

    def _append(self, token_ids: list[int], piece: str) -> None:
        if piece in self.id_of:
            token_ids.append(self.id_of[piece])
        elif self.byte_fallback:
            token_ids += [self._byte[byte] for byte in piece.encode()]
        elif token_ids[-1:] != [self.unknown]:
            token_ids.append(self.unknown)

    @cached_property
    def _byte(self) -> dict[int, int]:
        return {int(p.text[3:5], 16): number for number, p in enumerate(self.pieces) if p.kind == PieceKind.BYTE}

    @cached_property
    def _user_defined(self) -> frozenset[str]:
        return frozenset(self.of_kind(PieceKind.USER_DEFINED))

    def _parts(self, text: str) -> list[str]:
        """Return a text cut around user-defined pieces, of which the longest goes first."""
        pattern = "|".join(map(re.escape, sorted(self._user_defined, key=len, reverse=True)))
        return [part for part in (re.split(f"({pattern})", text) if pattern else [text]) if part]

    def _merged(self, text: str) -> list[str]:
        def rank(left: str, right: str) -> float | None:
            number = self.id_of.get(left + right)
            return None if number is None else -self.pieces[number].score

        return merged(text, rank)

    def _likeliest(self, text: str) -> list[str]:
        """Return the likeliest pieces of a text (Viterbi); a character without a piece is less likely than all."""
        scores = {piece: self.pieces[number].score for piece, number in self.id_of.items()}
        normal = [piece.score for piece in self.pieces if piece.kind == PieceKind.NORMAL]
        longest, unknown = max(map(len, scores)), min(normal, default=0.0) - _UNKNOWN_PENALTY
        best: list[tuple[float, int]] = [(0.0, 0)]
        for end in range(1, len(text) + 1):
            ways = []
            for start in range(max(0, end - longest), end):
                score = scores.get(text[start:end], unknown if start == end - 1 else -math.inf)
                ways.append((best[start][0] + score, -start))
            score, start = max(ways)  # of equal ones that with the longest piece
            best.append((score, -start))
        found, end = [], len(text)
        while end:
            start = best[end][1]
            found.append(text[start:end])
            end = start
        return found[::-1]


def convert(content: bytes) -> Conversion:
    """Convert a `tokenizer.model` of SentencePiece.

    A text between two control tokens begins as a whole text does. Raises InputError as `SentencePieceModel`.
    """
    model = SentencePieceModel(content)
    backend = library.Tokenizer(_bpe(model) if model.kind == "bpe" else _unigram(model))
    backend.normalizer = normalizers.Sequence(_normalizers(model))
    if user_defined := model.of_kind(PieceKind.USER_DEFINED):
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(_any_of(user_defined)), "isolated")
    steps = [
        decoders.Replace(_BLANK, " "),
        *([decoders.ByteFallback()] if model.byte_fallback else []),
        decoders.Fuse(),
    ]
    if model.dummy_prefix or model.one_blank:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    add_special(backend, [*model.of_kind(PieceKind.UNKNOWN), *model.of_kind(PieceKind.CONTROL)])
    begin = model.pieces[model.begin].text if model.begin >= 0 else None
    return Conversion(backend, model.ids, model.restored, begin, model.unknown)


def _piece(message: bytes) -> VocabularyPiece:
    found: dict[int, int | bytes] = dict(protobuf.fields(message))
    text, score, kind = found.get(1, b""), found.get(2, b"\0\0\0\0"), found.get(3, 1)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4 or not isinstance(kind, int):
        raise InputError("it has a piece that is broken")
    try:
        piece = VocabularyPiece(text.decode(), protobuf.float32(score), PieceKind(kind))
    except ValueError:
        raise InputError(f"it has a piece {text!r} of kind {kind}, which is none") from None
    if not piece.text or not math.isfinite(piece.score):
        raise InputError(f"it has a piece {piece.text!r} of score {piece.score}")
    return piece


def _bpe(model: SentencePieceModel) -> models.BPE:
    """Return the pairs that make a piece, the one of the highest score first."""
    parts = {piece.text for piece in model.pieces if piece.kind == PieceKind.NORMAL}
    # Of equal scores the longest first: SentencePiece takes the leftmost pair, so that runs of blanks grow from there.
    splits = sorted(
        (-model.pieces[model.id_of[text]].score, -len(text), model.id_of[text], text[:at], text[at:])
        for text in parts
        for at in range(1, len(text))
        if text[:at] in parts and text[at:] in parts
    )
    return models.BPE(
        {piece.text: number for number, piece in enumerate(model.pieces)},
        [(left, right) for *_, left, right in splits],
        unk_token=model.pieces[model.unknown].text,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        ignore_merges=bool(model.of_kind(PieceKind.USER_DEFINED)),  # which no merges make
    )


def _unigram(model: SentencePieceModel) -> models.Unigram:
    pieces = [(piece.text, piece.score) for piece in model.pieces]
    return models.Unigram(pieces, model.unknown, model.byte_fallback)


def _normalizers(model: SentencePieceModel) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if model.table:
        steps += code_points.steps(model.table, model.charsmap)
    if model.one_blank:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", _BLANK))
    if model.dummy_prefix:
        steps.append(normalizers.Prepend(_BLANK))
    if model.one_blank:
        steps.append(normalizers.Replace(Regex(rf"{_BLANK}+\z"), ""))
    return steps


def _any_of(texts: list[str]) -> str:
    """Return a pattern of the longest of some texts that is there, grouped by first characters to be found fast."""
    groups: dict[str, list[str]] = {}
    for text in sorted(texts, key=len, reverse=True):
        groups.setdefault(text[0], []).append(re.escape(text[1:]))
    return "|".join(f"{re.escape(first)}(?:{'|'.join(rests)})" for first, rests in groups.items())
