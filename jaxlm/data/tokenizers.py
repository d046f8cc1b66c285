"""Tokenizers, each a `tokenizer.json` of the `tokenizers` library."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from jaxlm.core.errors import InputError
from jaxlm.data import control_tokens
from jaxlm.data.config import BYTES_VOCABULARY
from jaxlm.data.control_tokens import END_OF_TEXT
from jaxlm.data.stream_decoder import StreamDecoder, stream_decoder

# Characters per call of the encoder, and at least per piece of a long document.
_AT_ONCE = 2**20
_PIECE = 2**16
_ANYWHERE = re.compile(r"(?s:.)")
# Constructs that look before or after a match, except `\s+(?!\S)`: blanks without the last one.
_LOOKS_AROUND = re.compile(r"\(\?<|\(\?=|(?<!\\s\+)\(\?!|\(\?!(?!\\S\))|\\[ABbGKYyZz]|(?<!\[)\^|\$")
_ONE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_UNSURE = 8  # last splits of a window, which its end may have changed
_PRIVATE = "\uf8ff"  # a character that has tokens only if all bytes have
_NO_CHARACTER = "\ufdef"  # around the stand-in of a control token (Unicode 16, section 23.7)
_BEFORE_BLANK = re.compile(r"\S(?=[ \n])")  # GPT-2's pattern always splits there, independent of context


class Tokenizer:
    """A map from text to token ids and back. No text becomes a control token (`control_tokens.for_documents`).

    `vocab_size`: the largest id plus one. `separator`: the id that starts and ends a document, or None (characters).
    `begin`: the ids before a prompt. `stop_token_ids`: the ids that end what is drawn. Both are the separator unless a
    published model has others. `end`: the ids after a text that nothing continues. `dropout`: the probability of BPE
    dropout that the file asks for, which is switched off.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        begin: Sequence[int] | None = None,
        stop_token_ids: Collection[int] | None = None,
        end: Sequence[int] = (),
    ):
        self.dropout: float = getattr(backend.model, "dropout", None) or 0.0
        self._backend = backend = control_tokens.for_documents(backend)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # a special token spelled out in a document is ordinary text
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        separator = control_tokens.separator(backend)
        self.separator: int | None = None if separator is None else backend.token_to_id(separator)
        own = () if self.separator is None else (self.separator,)
        self.begin: tuple[int, ...] = own if begin is None else tuple(begin)
        self.end: tuple[int, ...] = tuple(end)
        self.stop_token_ids: frozenset[int] = frozenset(own if stop_token_ids is None else stop_token_ids)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without separators. Raise InputError for text without tokens."""
        (ids,) = self.encode_batch([text])
        if dropped := self.dropped(text):
            raise InputError(self._unknown_character(dropped[0]))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of many texts, in parallel, without their `dropped` characters."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise InputError(self._why_not(texts) or f"the text cannot be tokenized: {error}") from error
        return [encoding.ids for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of the start of a document, after the ids that begin one."""
        return [*self.begin, *(self.encode(text) if text else [])]

    def encode_whole(self, text: str) -> list[int]:
        """Return the token ids of a text that nothing continues, between the ids that begin one and those that end
        one."""
        return [*self.encode_prompt(text), *self.end]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return where the characters of each token of a text begin and end in it."""
        return self._backend.encode(text, add_special_tokens=False).offsets

    @cached_property
    def controls(self) -> dict[str, int]:
        """The ids of the control tokens that a template may write, by their spelling."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special and token.content}

    def encode_rendered(self, pieces: Iterable[str | int]) -> list[int]:
        """Return the token ids of a text in which ids of control tokens stand between pieces of text.

        The text is encoded as a whole, cut at control tokens as the tokenizer cuts it there. Raises InputError for text
        that cannot be encoded.
        """
        backend, stand_ins = self._withstand_ins
        pieces = list(pieces)
        if any(_NO_CHARACTER in piece for piece in pieces if isinstance(piece, str)):
            raise InputError(f"the text holds U+{ord(_NO_CHARACTER):04X}, which is no character; leave it out")
        text = "".join(piece if isinstance(piece, str) else stand_ins[piece] for piece in pieces)
        control_of = {backend.token_to_id(name): number for number, name in stand_ins.items()}
        try:
            found = backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exception
            raise InputError(self._why_not([text]) or f"the text cannot be tokenized: {error}") from error
        return [control_of.get(token, token) for token in found]

    @cached_property
    def _withstand_ins(self) -> tuple[tokenizers.Tokenizer, dict[int, str]]:
        """A tokenizer that finds control tokens under names that no text holds, and these names by id."""
        backend = tokenizers.Tokenizer.from_str(self.to_json())
        backend.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        stand_ins = {number: f"{_NO_CHARACTER}{number}{_NO_CHARACTER}" for number in self.controls.values()}
        backend.add_tokens(
            [
                tokenizers.AddedToken(name, lstrip=added[number].lstrip, rstrip=added[number].rstrip, normalized=False)
                for number, name in stand_ins.items()
            ]
        )
        return backend, stand_ins

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of whole documents, between separators if the tokenizer has one."""
        dtype = self.dtype
        ends = np.array([] if self.separator is None else [self.separator], dtype)
        if self._of_bytes:
            encoded = (np.frombuffer(text.encode(), np.uint8) for text in texts)
            return [np.concatenate([ends, ids, ends]) for ids in encoded]
        found = [[ends] for _ in texts]
        for numbers, batch in self._batches(texts):
            for number, ids in zip(numbers, self.encode_batch(batch), strict=True):
                found[number].append(np.array(ids, dtype))
        return [np.concatenate([*arrays, ends]) for arrays in found]

    @cached_property
    def drops(self) -> Callable[[str], bool] | None:
        """A predicate: whether a character is dropped, wholly or in part. None if the tokenizer never drops any.

        Characters that the normalizer or pre-tokenizer remove, such as blanks between words, do not count as dropped.
        """
        model, vocabulary = self._backend.model, self._backend.get_vocab(with_added_tokens=True)
        if not isinstance(model, models.BPE) or model.unk_token is not None:
            return None
        if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
            return None
        prefix, suffix = model.continuing_subword_prefix or "", model.end_of_word_suffix or ""
        symbols = {token.removeprefix(prefix).removesuffix(suffix) for token in vocabulary}
        normalizer, pre_tokenizer = self._backend.normalizer, self._backend.pre_tokenizer

        @cache
        def is_dropped(character: str) -> bool:
            text = normalizer.normalize_str(character) if normalizer else character
            words = [word for word, _ in pre_tokenizer.pre_tokenize_str(text)] if pre_tokenizer else [text]
            return not symbols.issuperset("".join(words))

        bytes_are_known = symbols.issuperset(pre_tokenizers.ByteLevel.alphabet())
        return None if bytes_are_known and not is_dropped(_PRIVATE) else is_dropped

    def dropped(self, text: str) -> list[str]:
        """Return the distinct characters of a text that the library silently drops.

        A byte-pair encoding without an unknown token drops every character that it has no token for.
        """
        return sorted(filter(self.drops, set(text))) if self.drops else []

    @cached_property
    def unknown(self) -> int | None:
        """The id of the unknown token, or None."""
        model = self._backend.model
        if isinstance(model, models.Unigram):
            return json.loads(self.to_json())["model"]["unk_id"]
        return self._backend.token_to_id(model.unk_token or "")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without separators. Broken UTF-8 becomes U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder of tokens by name, one by one, to the text that `decode` gives for all of them."""
        return stream_decoder(self._decoder_steps, self.decode_names, _bytes_of)

    def decode_names(self, names: list[str]) -> str:
        """Return the text of tokens that are given as the vocabulary spells them."""
        return self._backend.decoder.decode(names) if self._backend.decoder else " ".join(names)

    def name_in_text(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it; None for a token that has no text: a control token, or an id
        without a token."""
        return None if token in self._control_ids else self._backend.id_to_token(token)

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self.controls.values())

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _decoder_steps(self) -> list[dict[str, Any]]:
        decoder = self._backend.decoder
        return control_tokens.steps(json.loads(decoder.__getstate__()) if decoder else None)

    def spelled_out(self, ids: Iterable[int]) -> str:
        """Return the text of token ids with the names of control tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def size(self, token: int) -> int:
        """Return the UTF-8 bytes of a token. A byte-level token may be part of a character."""
        if isinstance(self._backend.decoder, decoders.ByteLevel):
            return len(_bytes_of(self._backend.id_to_token(token)))
        return len(self.decode([token]).encode())

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text that it does not begin: of a byte-level token, maybe a
        part of a character; of a control token, its name; of an id without a token, none."""
        name = self._backend.id_to_token(token)
        if name is None:
            return b""
        if token in self._added_ids:
            return name.encode()
        if isinstance(self._backend.decoder, decoders.ByteLevel):
            return _bytes_of(name)
        if _ONE_BYTE.fullmatch(name) and self.decode([token]) != name:
            return bytes.fromhex(name[3:5])
        before = self.decode([self._ordinary])
        return self.decode([self._ordinary, token])[len(before) :].encode()

    @cached_property
    def _ordinary(self) -> int:
        """The first token that has a text by itself."""
        return next(token for token in range(self.vocab_size) if self.decode([token]).strip(" \ufffd"))

    def name_of(self, token: int) -> str:
        """Return a token as the vocabulary spells it."""
        return self._backend.id_to_token(token)

    def valid_token_mask(self, size: int) -> np.ndarray:
        """Return whether each of `size` ids has a token, bool [size]: a model may have rows for more, even between
        them."""
        ids = [*self._backend.get_vocab(with_added_tokens=True).values()]
        return np.isin(np.arange(size), ids)

    def has_tokens_of(self, other: "Tokenizer") -> bool:
        """Return whether each id is the same token in both."""
        own, its = (each._backend.get_vocab(with_added_tokens=True) for each in (self, other))
        return own == its

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integer type that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json`. Raise OSError on failure, unlike the library's own `save`."""
        path.write_text(self._backend.to_str(pretty=True), encoding="utf-8")

    def to_json(self) -> str:
        """Return the content of its `tokenizer.json`."""
        return self._backend.to_str()

    def _batches(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
        """Yield batches of pieces of the texts, with the text number of each piece.

        Batches are bounded, since the library takes some hundred bytes per token.
        """
        numbers, batch, size = [], [], 0
        for number, text in enumerate(texts):
            for piece in self._pieces(text) if len(text) > _PIECE else (text,):
                numbers.append(number)
                batch.append(piece)
                size += len(piece)
                if size >= _AT_ONCE:
                    yield numbers, batch
                    numbers, batch, size = [], [], 0
        yield numbers, batch

    @cached_property
    def _of_bytes(self) -> bool:
        return self.to_json() == bytes_tokenizer().to_json()

    @cached_property
    def _pieces(self) -> Callable[[str], Iterable[str]]:
        """A function that cuts a text only where no token can cross, if such places are known."""
        described = json.loads(self.to_json())
        if described["normalizer"] or not all(token["special"] for token in described["added_tokens"]):
            return _uncut
        match described["pre_tokenizer"], described["model"]:
            case {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}, _:
                return partial(pieces, end=_ANYWHERE)
            case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}, {"type": "BPE"}:
                return pieces
            case {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
                ],
            }, {"type": "BPE"} if not _LOOKS_AROUND.search(pattern):
                return partial(_pieces_of_splits, split=pre_tokenizers.Split(Regex(pattern), "isolated"))
        return _uncut

    def _why_not(self, texts: Sequence[str]) -> str | None:
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                return f"the text is not UTF-8 after its first {error.start} characters"
        if not isinstance(self._backend.model, models.WordLevel):
            return None
        known = self._backend.get_vocab()
        strange = next((c for text in texts for c in text if c not in known), None)
        return strange and self._unknown_character(strange)

    def _unknown_character(self, character: str) -> str:
        return (
            f"the character {character!r} is not among the {self.vocab_size} tokens of the tokenizer, nor made of them"
        )


def pieces(text: str, end: re.Pattern = _BEFORE_BLANK) -> Iterator[str]:
    """Cut a long text into pieces that end with the pattern `end`.

    At the default, our byte-pair encoding learns and produces the same tokens from the pieces as from the whole.
    """
    at = 0
    while found := end.search(text, at + _PIECE - 1):
        yield text[at : found.end()]
        at = found.end()
    if at < len(text) or not at:
        yield text[at:]


def _pieces_of_splits(text: str, split: pre_tokenizers.Split) -> Iterator[str]:
    """Cut a text into pieces that end at a split, after a non-blank, since the split of blanks depends on what follows.

    Assume that a split depends on nothing before it and, except for the last ones of a window, on nothing after it.
    This holds for runs of character classes, as in published patterns, but not where a match may fail far beyond its
    start.
    """
    at, size = 0, _PIECE
    while len(text) - at > size:
        splits = split.pre_tokenize_str(text[at : at + size])[:-_UNSURE]
        if length := next((end for word, (_, end) in reversed(splits) if not word[-1].isspace()), 0):
            yield text[at : at + length]
            at, size = at + length, _PIECE
        else:
            size *= 2
    yield text[at:]


def _uncut(text: str) -> Iterable[str]:
    return (text,)


def load(path: Path) -> Tokenizer:
    """Load a `tokenizer.json`. Raise InputError if the file is missing or invalid."""
    return Tokenizer(read(path))


def read(path: Path) -> tokenizers.Tokenizer:
    """Return what a `tokenizer.json` describes. Raise InputError if the file is missing or invalid."""
    if not path.is_file():
        raise InputError(f"data.tokenizer: there is no file {path}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"data.tokenizer: {path} is not a tokenizer.json ({error})") from error


def checked(made: Any, name: str) -> Tokenizer:
    """Return a tokenizer that code of another made. Raises InputError for one that no tokenizer.json holds."""
    if not isinstance(made, tokenizers.Tokenizer):
        raise InputError(f"data.tokenizer = {name!r} gives a {type(made).__name__}; return a tokenizers.Tokenizer")
    try:
        return Tokenizer(tokenizers.Tokenizer.from_str(made.to_str()))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"data.tokenizer = {name!r} cannot be kept as a tokenizer.json: {error}") from error


def bytes_tokenizer() -> Tokenizer:
    """Make a tokenizer whose ids are the UTF-8 byte values; 256 separates documents."""
    # The byte-level alphabet lists printable stand-ins for the 256 bytes; token i must stand for byte i.
    vocabulary = {stand_in(byte): byte for byte in range(256)}
    return _byte_level(models.BPE(vocab=vocabulary, merges=[]))


def characters_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Make a tokenizer with a token per character of the texts, in code-point order, and no separator."""
    characters = sorted(set().union(*texts))
    model = models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def train_bpe(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909; GPT-2).

    It has `vocabulary` tokens, or fewer if the text has too few pairs to merge.
    """
    if vocabulary < BYTES_VOCABULARY:
        raise InputError(
            f'model.vocab_size = {vocabulary} is too small for data.tokenizer = "bpe": '
            f"{BYTES_VOCABULARY} are bytes and the separator"
        )
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer._backend.train_from_iterator(texts, trainer)
    return Tokenizer(tokenizer._backend)


def _byte_level(model: models.Model) -> Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if isinstance(model, models.BPE) and backend.get_vocab_size() == 256:
        backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend)


def stand_in(byte: int) -> str:
    """Return GPT-2's printable character for a byte: itself if printable, otherwise moved past U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + sum(b not in printable for b in range(byte)))


_BYTES = {stand_in(byte): byte for byte in range(256)}


def _bytes_of(name: str) -> bytes:
    """Return the bytes that a byte-level name stands for. A name of other characters stands for its UTF-8."""
    try:
        return bytes(map(_BYTES.__getitem__, name))
    except KeyError:
        return name.encode()
