"""Tokenizers, all as one kind of thing: a `tokenizer.json` of the `tokenizers` library."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property, partial
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from jaxlm.core.errors import InputError

END_OF_TEXT = "<|endoftext|>"
BYTES_VOCABULARY = 257
# Names under which published tokenizers keep the token that separates documents; where one has <eos>, </s> is HTML.
_SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "<｜end▁of▁sentence｜>", "</s>")
# Characters that are encoded at once, and that a piece of a long document has at least.
_AT_ONCE = 2**20
_PIECE = 2**16
_ANYWHERE = re.compile(r"(?s:.)")
# What in a pattern sees what lies before or behind a match; but for `\s+(?!\S)`, blanks of which the last is left.
_LOOKS_AROUND = re.compile(r"\(\?<|\(\?=|(?<!\\s\+)\(\?!|\(\?!(?!\\S\))|\\[ABbGKYyZz]|(?<!\[)\^|\$")
_UNSURE = 8  # splits of a window that its end may have changed
_PRIVATE = "\uf8ff"  # a character that is a token only where its bytes are
_BEFORE_BLANK = re.compile(r"\S(?=[ \n])")  # GPT-2's pattern always splits there, whatever comes before and after


class Tokenizer:
    """Text to token ids and back.

    `vocabulary`: one more than the largest id. `separator`: the id that starts and ends a document, or None
    (characters).
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # a separator spelled out in a document is text, not a separator
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        known = (backend.token_to_id(token) for token in _SEPARATORS)
        self.separator: int | None = next((token for token in known if token is not None), None)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without separators. Raises InputError for text it has no tokens for."""
        (ids,) = self.encode_batch([text])
        if dropped := self.dropped(text):
            raise InputError(self._unknown_character(dropped[0]))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, in parallel, without what is `dropped` of them."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise InputError(self._why_not(texts) or f"the text cannot be tokenized: {error}") from error
        return [encoding.ids for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of the beginning of a document: behind a separator where the tokenizer has one."""
        return [*([] if self.separator is None else [self.separator]), *self.encode(text)]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of whole documents, between separators where the tokenizer has one."""
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
        """Whether a character is dropped, or a part of it; None where none ever is. What the normalizer or the
        pre-tokenizer take away, such as blanks between words, is no text to them."""
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
        """The characters of a text, each once, that the library leaves out without a word: a byte-pair encoding with no
        token for the unknown leaves out what it has no token for."""
        return sorted(filter(self.drops, set(text))) if self.drops else []

    @cached_property
    def unknown(self) -> int | None:
        """The token of all that has no other; None where there is none."""
        model = self._backend.model
        if isinstance(model, models.Unigram):
            return json.loads(self.to_json())["model"]["unk_id"]
        return self._backend.token_to_id(model.unk_token or "")

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, without separators; broken UTF-8 becomes U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def size(self, token: int) -> int:
        """UTF-8 bytes that a token stands for; a byte-level token may be part of a character."""
        if isinstance(self._backend.decoder, decoders.ByteLevel):
            return len(self._backend.id_to_token(token))
        return len(self.decode([token]).encode())

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json`. Raises OSError where it cannot be, which the library's own `save` does not."""
        path.write_text(self._backend.to_str(pretty=True), encoding="utf-8")

    def to_json(self) -> str:
        """The content of its `tokenizer.json`."""
        return self._backend.to_str()

    def _batches(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
        """Pieces of the texts, few enough at a time, and the number of the text of each: the library takes some
        hundred bytes per token."""
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
        """Cuts a text where tokens are known not to reach over the ends of its pieces."""
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
                return f"the text is not UTF-8 behind its first {error.start} characters"
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
    """A text, where it is long in pieces that end with `end`; if not said, where our byte-pair encoding learns and
    makes the same tokens of them as of the whole."""
    at = 0
    while found := end.search(text, at + _PIECE - 1):
        yield text[at : found.end()]
        at = found.end()
    if at < len(text) or not at:
        yield text[at:]


def _pieces_of_splits(text: str, split: pre_tokenizers.Split) -> Iterator[str]:
    """A text in pieces that end where it is split, behind something else than a blank, since how blanks are split
    depends on what follows. Splits depend on nothing before them, and but for the last of a window on nothing behind:
    so it is with runs of kinds of characters, as published patterns have them, and not where what begins a match may
    turn out, far behind, to begin none."""
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
    """Any `tokenizer.json`. Raises InputError where there is none."""
    if not path.is_file():
        raise InputError(f"data.tokenizer: there is no file {path}")
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"data.tokenizer: {path} is no tokenizer.json ({error})") from error


def bytes_tokenizer() -> Tokenizer:
    """Every byte of UTF-8 is the token of its value; 256 separates documents."""
    # The byte-level alphabet lists printable stand-ins for the 256 bytes; token i must stand for byte i.
    vocabulary = {_stand_in(byte): byte for byte in range(256)}
    return _byte_level(models.BPE(vocab=vocabulary, merges=[]))


def characters_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Every character that occurs is a token, in code-point order; no separator."""
    characters = sorted(set().union(*texts))
    model = models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def train_bpe(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909; GPT-2) of exactly `vocabulary` tokens
    where the text has that many pairs to merge, fewer otherwise."""
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


def _stand_in(byte: int) -> str:
    """GPT-2's printable character for a byte: itself where printable, otherwise moved past U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + sum(b not in printable for b in range(byte)))
