"""The places of tokens in a text, as `text_offset` of completions gives them."""

import codecs
from collections.abc import Callable, Sequence
from itertools import accumulate

from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.detokenizer import Detokenizer


class TextOffsets:
    """The offsets of the tokens of one completion, in characters. The tokens of one character have the same; control
    tokens are no part of the text.

    Args:
      token_bytes: returns the bytes that a token adds to a text that it does not begin (`Tokenizer.bytes_of`).
      prompt: token ids.
    """

    def __init__(self, tokenizer: Tokenizer, token_bytes: Callable[[int], bytes], prompt: Sequence[int]):
        self._tokenizer, self._token_bytes, self._prompt = tokenizer, token_bytes, prompt
        self._controls = frozenset(tokenizer.controls.values())
        self._begin(0, is_first=self._controls.issuperset(prompt))

    def _begin(self, offset: int, is_first: bool) -> None:
        """Continue at an offset, with the first token of a text or with one behind others."""
        self._offset, self._is_first = offset, is_first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def echo(self, shown: str) -> list[int]:
        """Return the offsets of the prompt's tokens in the text of the prompt, as it is shown before what follows."""
        self._begin(0, is_first=True)
        offsets = [self.add(token) for token in self._prompt]
        if self._end != len(shown) or shown != self._tokenizer.decode(self._prompt):
            offsets = self._of_another_text(shown)
        self._begin(len(shown), self._is_first)
        return offsets

    def add(self, token: int) -> int:
        """Return the offset of the next token."""
        content = b"" if token in self._controls else self._token_bytes(token)
        if content and self._is_first:
            self._is_first = False
            alone = self._tokenizer.decode([token]).encode()  # without a blank that only begins a word
            content = alone if content.endswith(alone) else content
        if content and content[0] & 0xC0 != 0x80:  # a character begins: the one before is whole, or never will be
            self._offset = self._end
            self._decoder.reset()
        offset = self._offset
        self._offset += len(self._decoder.decode(content))
        return offset

    @property
    def _end(self) -> int:
        """The characters so far, one of which may lack bytes."""
        pending, _ = self._decoder.getstate()
        return self._offset + len(pending.decode(errors="replace"))

    def _of_another_text(self, shown: str) -> list[int]:
        """Return the offsets in a prompt whose text is not what its tokens add up to: a tokenizer changes the letters
        of a text, or a decoder does."""
        texts = self._tokenizer.spans(shown) if shown else []
        begin = len(self._prompt) - len(texts)
        if texts and begin >= 0 and self._tokenizer.encode(shown) == [*self._prompt[begin:]]:
            ends = [0, *(end for _, end in texts)]
            return [0] * begin + [min(start, end) for (start, _), end in zip(texts, ends, strict=False)]
        decoder = Detokenizer(self._tokenizer, [])
        lengths = accumulate((len(decoder.add(token)) for token in self._prompt), initial=0)
        return [*lengths][:-1]
