"""Continuations of prompts as text, while they are drawn."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.detokenizer import Detokenizer


class Piece(NamedTuple):
    """The text that one token adds to the continuation of prompt `row`. The last piece of a continuation has no token,
    and the text that waited for more bytes. `text` is None without a tokenizer."""

    row: int
    token_id: int | None
    text: str | None


class Completion(NamedTuple):
    """The continuation of one prompt, without the separator that ended it. `text` is None without a tokenizer."""

    text: str | None
    token_ids: tuple[int, ...]


def pieces(
    drawn: Iterable[np.ndarray], prompts: Sequence[Sequence[int]], tokenizer: Tokenizer | None
) -> Iterator[Piece]:
    """Yield what each drawn token adds, until every continuation has met the tokenizer's separator.

    Args:
      drawn: int32 [B] each, as `generate` yields them.
      prompts: B lists of token ids, which the text goes on from.
    """
    texts = [tokenizer and Detokenizer(tokenizer, prompt) for prompt in prompts]
    going = list(range(len(prompts)))
    for tokens in drawn:
        for row in list(going):
            token, text = int(tokens[row]), texts[row]
            if tokenizer and token == tokenizer.separator:
                going.remove(row)
            else:
                yield Piece(row, token, text.add(token) if text else None)
        if not going:
            break
    for row, text in enumerate(texts):
        if text:
            yield Piece(row, None, text.rest())


def completions(pieces: Iterable[Piece], rows: int) -> list[Completion]:
    """Gather pieces into the continuation of each of the `rows` prompts."""
    ids: list[list[int]] = [[] for _ in range(rows)]
    texts: list[list[str]] = [[] for _ in range(rows)]
    for row, token, text in pieces:
        if token is not None:
            ids[row].append(token)
        if text is not None:
            texts[row].append(text)
    has_text = any(texts)
    return [Completion("".join(t) if has_text else None, tuple(i)) for i, t in zip(ids, texts, strict=True)]
