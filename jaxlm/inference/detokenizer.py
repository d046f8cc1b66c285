"""Token ids to text, as they are drawn. Imports no JAX."""

import os
from collections.abc import Sequence

from jaxlm.data.tokenizers import Tokenizer

_PATIENCE = 8  # tokens: bytes that by then have ended no character never will


class Detokenizer:
    """The text of tokens that follow a prompt, one token at a time.

    How a token is written may depend on those before it (the first of a text loses its blank), and a character may take
    several of them. So the tokens since the last whole character are decoded behind those that ended with it, and no
    others again: the work does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._before, self._open = list(prompt), []
        self._written = tokenizer.decode(prompt)

    def add(self, token: int) -> str:
        """The text that one more token completes; "" within a character."""
        self._open.append(token)
        text = self.rest()
        if (not text or text.endswith("\ufffd")) and len(self._open) < _PATIENCE:
            return ""
        if text:
            self._before, self._written = self._open, self._tokenizer.decode(self._open)
        self._open = []
        return text

    def rest(self) -> str:
        """The text that is not complete: U+FFFD for bytes of a character whose others did not come."""
        text = self._tokenizer.decode([*self._before, *self._open])
        return text[len(os.path.commonprefix([self._written, text])) :]
