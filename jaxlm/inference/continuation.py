"""The text of a continuation while its tokens are drawn: whole characters, up to a stop string."""

from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.detokenizer import Detokenizer
from jaxlm.inference.requests import Request
from jaxlm.inference.stop_strings import StopScanner


class ContinuationText:
    """The text of the continuation of one request. What may be the beginning of a stop string, or is part of a
    character, is held back."""

    def __init__(self, tokenizer: Tokenizer, request: Request):
        self._decoder = Detokenizer(tokenizer, request.prompt if request.stop_token_ids is None else [])
        self._scanner = StopScanner(request.stop)

    @property
    def stopped(self) -> bool:
        """True once a stop string was found: nothing follows."""
        return self._scanner.found

    def add(self, token: int) -> str:
        """Return the text that a token adds."""
        return self._scanner.add(self._decoder.add(token))

    def rest(self) -> str:
        """Return what was held back, after the last token."""
        if self.stopped:
            return ""
        return self._scanner.add(self._decoder.rest()) + self._scanner.rest()
