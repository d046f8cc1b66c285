"""The text of a continuation while its tokens are drawn: whole characters, up to a stop string."""

from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.detokenizer import Detokenizer
from jaxlm.inference.requests import Request
from jaxlm.inference.stop_strings import StopScanner


class ContinuationText:
    """The text of the continuation of one request. What may be the beginning of a stop string, or is part of a
    character, is held back."""

    def __init__(self, tokenizer: Tokenizer, request: Request):
        self._tokenizer, self._request = tokenizer, request
        self._tokens = [] if request.is_answer else [*request.prompt]
        self._decoder = Detokenizer(tokenizer, self._tokens)
        self._scanner = StopScanner(request.stop, tokenizer.controls if request.stop else {}, request.includes_stop)
        self._count = 0  # of tokens

    @property
    def stopped(self) -> bool:
        """True once a stop string was found: nothing follows."""
        return self._scanner.found

    def add(self, token: int) -> str:
        """Return the text that a token adds."""
        self._count += 1
        self._tokens.append(token)
        piece = self._decoder.add(token)
        if mark := self._scanner.mark(token):  # behind all text before it
            piece += self._decoder.rest() + mark
            self._decoder = Detokenizer(self._tokenizer, self._tokens)
        return self._scanned(piece)

    def rest(self, ended_by: int | None = None) -> str:
        """Return what was held back, after the last token. `ended_by`: the id that ended the continuation, if one did,
        of which the request may want the text."""
        if self.stopped:
            return ""
        text = self.add(ended_by) if ended_by is not None and self._request.includes_stop else ""
        return text if self.stopped else text + self._scanned(self._decoder.rest()) + self._scanner.rest()

    def _scanned(self, piece: str) -> str:
        return self._scanner.add(piece, self._count <= self._request.min_tokens)
