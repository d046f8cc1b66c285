"""Byte-level byte-pair encodings, given as the ranks of byte strings or as merges."""

import unicodedata
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import tokenizers as library
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jaxlm.core.errors import InputError
from jaxlm.data.tokenizers import stand_in
from jaxlm.families.vocabularies.conversion import Conversion, add_special, merged

BYTES = [bytes([byte]) for byte in range(256)]
_CHARACTERS = [stand_in(byte) for byte in range(256)]
_BYTE_OF = {character: byte for byte, character in enumerate(_CHARACTERS)}
MOST_TOKENS = 2**22
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Splitting(NamedTuple):
    """The way that texts become words: by a `pattern` (Oniguruma; "" is GPT-2's), after normalization to NFC or not."""

    pattern: str
    nfc: bool = False


def spelled(token: bytes) -> str:
    """Return a byte string as a byte-level tokenizer.json spells it (GPT-2)."""
    return "".join(map(_CHARACTERS.__getitem__, token))


def bytes_of(name: str) -> bytes:
    """Return the byte string that a byte-level tokenizer.json spells so. Raises InputError if it spells none."""
    try:
        return bytes(_BYTE_OF[character] for character in name)
    except KeyError:
        raise InputError(f"its token {name!r} spells no bytes") from None


def of_ranks(ranks: Mapping[bytes, int], specials: Mapping[str, int], begin: str | None, how: Splitting) -> Conversion:
    """Convert the ranks of tiktoken: a word that is a token is one; otherwise the pair of lowest rank is merged.

    Args:
      ranks: id of each byte string, which is also its rank.
      specials: ids of special tokens.
      begin: as in `Conversion`.

    Raises InputError for ranks without all bytes, and for ids that two tokens have or that are out of bounds.
    """
    if missing := [byte for byte in BYTES if byte not in ranks]:
        raise InputError(f"it has no token of the byte {missing[0].hex()}")
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    check_ids({**vocabulary, **specials}, len(vocabulary) + len(specials))
    # Every split into two tokens: the original looks up what two neighbours make, however they came about.
    splits = sorted(
        (rank, len(token) - at, token[:at], token[at:])
        for token, rank in ranks.items()
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    )
    merges = [(spelled(left), spelled(right)) for _, _, left, right in splits]
    backend = library.Tokenizer(models.BPE({**vocabulary, **specials}, merges, ignore_merges=True))
    split = _split(backend, how)

    def ids(text: str) -> list[int]:
        token_ids: list[int] = []
        for word in map(str.encode, split(text)):
            whole = ranks.get(word)
            parts = (
                [word] if whole is not None else merged((word[i : i + 1] for i in range(len(word))), _rank_in(ranks))
            )
            token_ids += [ranks[part] for part in parts]
        return token_ids

    backend.decoder = decoders.ByteLevel()
    add_special(backend, specials)
    return Conversion(backend, ids, _restored(how), begin)


def of_merges(
    vocabulary: Mapping[str, int],
    merges: list[tuple[str, str]],
    specials: Collection[str],
    how: Splitting,
) -> Conversion:
    """Convert GPT-2's files: ids of tokens, and the pairs to merge, the first first. Raises InputError as `of_ranks`,
    and for a merge of what are no tokens."""
    if missing := [letter for letter in _CHARACTERS if letter not in vocabulary]:
        raise InputError(f"it has no token {missing[0]!r}, which stands for a byte")
    check_ids(vocabulary, len(vocabulary))
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    for left, right in ranks:
        if not {left, right, left + right} <= vocabulary.keys():
            raise InputError(f"it has no tokens for the merge of {left!r} and {right!r}")
    backend = library.Tokenizer(models.BPE(dict(vocabulary), [*ranks]))
    split = _split(backend, how)

    def ids(text: str) -> list[int]:
        words = (merged(spelled(word.encode()), lambda left, right: ranks.get((left, right))) for word in split(text))
        return [vocabulary[part] for word in words for part in word]

    backend.decoder = decoders.ByteLevel()
    add_special(backend, specials)
    return Conversion(backend, ids, _restored(how))


def check_ids(vocabulary: Mapping[str, int], expected: int) -> None:
    """Raise InputError where two tokens have one spelling or id, or where an id is out of bounds."""
    if len(vocabulary) != expected or len({*vocabulary.values()}) != expected:
        raise InputError("it has two tokens of one spelling or id")
    if not all(0 <= number < MOST_TOKENS for number in vocabulary.values()):
        raise InputError(f"it has an id that is not from 0 to {MOST_TOKENS - 1:,}")


def _rank_in(ranks: Mapping[bytes, int]) -> Callable[[bytes, bytes], int | None]:
    return lambda left, right: ranks.get(left + right)


def _split(backend: library.Tokenizer, how: Splitting) -> Callable[[str], list[str]]:
    """Have a backend split texts, and return a function that gives the words of one."""
    if how.nfc:
        backend.normalizer = normalizers.NFC()
    try:
        splitter = pre_tokenizers.Split(Regex(how.pattern or _GPT2), "isolated")
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"the pattern {how.pattern!r} is none that can be read: {error}") from None
    if how.pattern:
        steps = [splitter, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:  # the library's own form of it, by which `Tokenizer.encode_documents` cuts long documents
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    normalized = _restored(how)
    return lambda text: [word for word, _ in splitter.pre_tokenize_str(normalized(text))]


def _restored(how: Splitting) -> Callable[[str], str]:
    return lambda text: unicodedata.normalize("NFC", text) if how.nfc else text
