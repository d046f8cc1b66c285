"""A converted tokenizer with independent code for the original format, and the probe that compares the two."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tokenizers as library
from tokenizers import AddedToken

from jaxlm.core.errors import InputError
from jaxlm.data.tokenizers import Tokenizer

_RUNS = (2, 3, 5, 8, 16, 17, 33)
# Each kind of text that tokenizers treat in a way of its own.
PROBE = (
    "",
    "Plain words, and\tmore  of   them: it's 'quoted', they'll say I'VE, don't",
    "0123456789 3.14159, 2024-01-02, 1,000,000 and ٣ or ½",
    "Grüße, Здравствуй, 你好世界, こんにちは, שלום, مرحبا, नमस्ते, é as e\u0301, ﬁ, Ⅷ",
    # Characters that only together, or only alone, are an entry of a normalizer: half-width kana, jamo, several marks.
    "ｶﾞﾊﾟｳﾞ か\u3099\u309a, \u1112\u1161\u11ab \u1100\u1161 ﾡￂ, e\u0323\u0302 a\u0301\u0301 ﬁ\u0301 Å\u0301 \u0301x",
    "😀👩‍👩‍👧 and 🇩🇪, a space \u00a0, \u3000, a joiner \u200d, a rare sign \U000104a7 and \uf8ff",
    "\n\nlines\r\nof every\rkind\n \n\n\n  indented\n\t\ttabs\n",
    " ".join(f"{' ' * run}x{chr(10) * run}" for run in _RUNS) + "  ends with blanks   ",
    "def f(x):\n    return {x**2: [y_z for y_z in x]}  # (((!!!)))\n",
    "<s>[INST] <|endoftext|> <|im_start|>user</s> <0x0A> <unk> [PAD] <bos> ▁and▁▁this [/INST]",
    " one blank before",
    "▁",
)
_NAMED = 16  # control tokens of its own that the probe spells out


class Conversion(NamedTuple):
    """A tokenizer converted from a file of another format.

    Attributes:
      backend: the tokenizer in the format of the `tokenizers` library.
      ids: the token ids that the original format gives a text without control tokens, computed without the backend;
        None for a text whose ids the original format leaves open.
      restored: the text that decoding must return for a text, which the format may have normalized.
      begin: the special token that the publisher puts before every text, or None.
      unknown: the id for characters without a token, or None.
    """

    backend: library.Tokenizer
    ids: Callable[[str], Sequence[int] | None]
    restored: Callable[[str], str]
    begin: str | None = None
    unknown: int | None = None


def verify(conversion: Conversion, tokenizer: Tokenizer) -> None:
    """Raise InputError if a text of the probe gets other ids than in the original format, gets the id of a control
    token, or differs after decoding.

    Args:
      tokenizer: the tokenizer that was made from the conversion.
    """
    controls = {*tokenizer.controls.values()} - {conversion.unknown}
    conversion.backend.encode_special_tokens = True  # of a text that spells one, no part is one
    for text in (*PROBE, " ".join([*tokenizer.controls][:_NAMED])):
        expected = conversion.ids(text)
        if expected is not None and conversion.backend.encode(text, add_special_tokens=False).ids != list(expected):
            raise InputError(f"it cannot be converted: {text!r} has other tokens in its own format")
        (ids,) = tokenizer.encode_batch([text])
        if expected is not None and ids != list(expected):
            raise InputError(f"it cannot be converted: {text!r} gets other tokens than in its own format")
        if controls.intersection(ids):
            raise InputError(f"it cannot be converted: a control token is made of the text {text!r}")
        if conversion.unknown not in ids and tokenizer.decode(ids) != conversion.restored(text):
            raise InputError(f"it cannot be converted: decoding does not give back {text!r}")


def add_special(backend: library.Tokenizer, names: Iterable[str]) -> None:
    """Make tokens of the vocabulary special."""
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])


def merged(symbols: Iterable[Any], rank: Callable[[Any, Any], float | None]) -> list[Any]:
    """Return symbols after byte-pair merging: always the pair of the lowest rank, and of equal ones the leftmost.

    Written plainly, as the specification of the libraries' fast code (Sennrich et al. 2016, arXiv:1508.07909).

    Args:
      symbols: strings, or bytes.
      rank: returns the rank of a pair of neighbours; None if the pair is not merged.
    """
    left = list(symbols)
    while True:
        ranks = [rank(*pair) for pair in zip(left, left[1:], strict=False)]
        found = [(value, at) for at, value in enumerate(ranks) if value is not None]
        if not found:
            return left
        _, at = min(found)
        left[at : at + 2] = [left[at] + left[at + 1]]


def table_in(content: bytes) -> dict[str, Any]:
    """Return the table in JSON. Raises InputError if there is none."""
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not valid JSON ({error})") from None
    if not isinstance(table, dict):
        raise InputError("it holds no table")
    return table
