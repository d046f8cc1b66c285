"""Incremental decoding of token ids to text. Imports no JAX."""

import os
from collections.abc import Sequence

from jaxlm.data.tokenizers import Tokenizer

_PATIENCE = 8  # tokens: bytes that have not completed a character by then never will


# Not tokenizers' DecodeStream: after a prompt that ends within a character, it repeats that character ("the 😀" for
# "😀"); it has no rest() for an incomplete end; and it holds bytes that form no character, decoding all of these bytes
# again at each token.
class Detokenizer:
    """An incremental decoder of the tokens that follow a prompt.

    The text of a token may depend on the tokens before it (the first of a text loses its blank), and a character may
    take several tokens. Each call therefore decodes the tokens since the last complete character together with the
    tokens that completed it, and no earlier tokens: the work does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._before, self._open = list(prompt), []
        self._written = tokenizer.decode(prompt)

    def add(self, token: int) -> str:
        """Return the text that one more token completes; "" within a character."""
        self._open.append(token)
        text = self.rest()
        if (not text or text.endswith("\ufffd")) and len(self._open) < _PATIENCE:
            return ""
        if text:
            self._before, self._written = self._open, self._tokenizer.decode(self._open)
        self._open = []
        return text

    def rest(self) -> str:
        """Return the incomplete text: U+FFFD for bytes of a character whose other bytes did not come."""
        text = self._tokenizer.decode([*self._before, *self._open])
        return text[len(os.path.commonprefix([self._written, text])) :]
