"""Incremental decoding of token ids to text. Imports no JAX."""

import os
from collections.abc import Sequence

from jaxlm.data.tokenizers import Tokenizer

_PROMPT_END = 64  # tokens of a prompt that are decoded first, which usually suffice
_ENOUGH = 8  # characters: after so much text, what stood before it has no influence on what follows


# Not tokenizers' DecodeStream: it repeats a character within which the prompt ends, has no rest() for an incomplete
# end, decodes bytes that form no character again at each token, and gives out bytes that a later byte token changes.
class Detokenizer:
    """An incremental decoder of the tokens that follow a prompt.

    The text of the prompt and all texts that `add` and `rest` return, joined, are the text of all tokens; a character
    that begins in the prompt is returned whole. No text is taken back. The work does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer, self._stream = tokenizer, tokenizer.stream_decoder()
        self._shown = ""  # by the prompt, of the text that comes next
        size, text = _PROMPT_END, ""
        while prompt and len(text) < _ENOUGH and size < 2 * len(prompt) + _PROMPT_END:
            self._stream = tokenizer.stream_decoder()
            text = "".join(map(self._decoded, prompt[-size:]))
            size *= 2
        self._shown = self._stream.rest()

    def add(self, token: int) -> str:
        """Return the text that one more token completes; "" within a character, and for a control token."""
        return self._unseen(self._decoded(token))

    def rest(self) -> str:
        """Return the text that is held back, if no token follows: U+FFFD for bytes that form no character."""
        return self._unseen(self._stream.rest())

    def _decoded(self, token: int) -> str:
        name = self._tokenizer.name_in_text(token)
        return "" if name is None else self._stream.add(name)

    def _unseen(self, text: str) -> str:
        """Return a text without the part that the prompt has shown."""
        if not (text and self._shown):
            return text
        same = len(os.path.commonprefix([self._shown, text]))
        self._shown = self._shown[same:] if same == len(text) else ""
        return text[same:]
