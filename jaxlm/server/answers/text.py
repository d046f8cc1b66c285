"""The parts of an answer while its tokens are drawn."""

import copy
import os
import re
from types import MappingProxyType

from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.detokenizer import Detokenizer
from jaxlm.inference.requests import Request
from jaxlm.inference.stop_strings import StopScanner
from jaxlm.server.answers.answer_formats import AnswerFormat
from jaxlm.server.answers.call_syntax import Schemas
from jaxlm.server.answers.calls import AnswerParts, CalledFunction


class AnswerText:
    """The text of an answer, as `ContinuationText` gives it; `taken` gives what is thought, and calls.

    Args:
      schemas: of the functions that it may call.
      prompt_end: the end of what the answer follows, with control tokens.
      begun: the text that the answer begins with already, as a part of the prompt.
      continued: the beginning of the answer, which was given before: it is read, and is no part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        form: AnswerFormat,
        schemas: Schemas = MappingProxyType({}),
        prompt_end: str = "",
        begun: str = "",
        continued: str = "",
    ):
        self._tokenizer, self._request = tokenizer, request
        self._shown = {id: name for name, id in tokenizer.controls.items() if name in form.marks(schemas)}
        self._decoder, self._tokens = Detokenizer(tokenizer, []), []
        self._reader = form.reader(schemas, prompt_end)
        self._scanner = StopScanner(request.stop, tokenizer.controls if request.stop else {}, request.includes_stop)
        self._thought, self._calls, self._count = "", [], 0
        self._given_said = self._given_thought = ""  # what the reader holds back of what was given before
        if continued:
            self._reader.add(continued)
            held = copy.deepcopy(self._reader).rest()
            self._given_said, self._given_thought = held.said, held.thought
        self._begun = self._said(self._reader.add(begun)) if begun else ""

    @property
    def stopped(self) -> bool:
        """True once a stop string was found: nothing follows."""
        return self._scanner.found

    @property
    def is_inside(self) -> bool:
        """True while what comes is thought."""
        return self._reader.is_inside

    def add(self, token: int) -> str:
        """Return the text that a token adds."""
        self._count += 1
        begun, self._begun = self._begun, ""
        piece = self._shown.get(token)
        self._tokens.append(token)
        if piece is None:
            piece, mark = self._decoder.add(token), "" if self.is_inside else self._scanner.mark(token)
            if mark:  # behind all text before it
                piece += self._decoder.rest()
                self._decoder = Detokenizer(self._tokenizer, self._tokens)
            return begun + self._said(self._reader.add(piece), mark)
        before, self._decoder, self._tokens = self._decoder.rest(), Detokenizer(self._tokenizer, []), []
        return begun + self._said(self._reader.add(before + piece))

    def rest(self, ended_by: int | None = None) -> str:
        """Return what was held back, after the last token. `ended_by`: the id that ended the answer, if one did, of
        which the request may want the text."""
        if self.stopped:
            return ""
        text = self.add(ended_by) if ended_by is not None and self._request.includes_stop else ""
        if self.stopped:
            return text
        begun, self._begun = self._begun, ""
        text += begun + self._said(self._reader.add(self._decoder.rest()))
        return text if self.stopped else text + self._said(self._reader.rest()) + self._scanner.rest()

    def taken(self) -> tuple[str, tuple[CalledFunction, ...]]:
        """Return what was thought and the calls since the last call of this method."""
        thought, calls = self._thought, tuple(self._calls)
        self._thought, self._calls = "", []
        return thought, calls

    def _said(self, parts: AnswerParts, mark: str = "") -> str:
        said, self._given_said = _without(self._given_said, parts.said)
        thought, self._given_thought = _without(self._given_thought, parts.thought)
        text = self._scanner.add(said + mark, self._count <= self._request.min_tokens)
        self._thought += thought
        if not self.stopped:
            self._calls += parts.calls
        return text


def _without(given: str, piece: str) -> tuple[str, str]:
    """Return a piece of text without the beginning that was given before, and what may come of that yet."""
    same = len(os.path.commonprefix([given, piece]))
    return piece[same:], given[same:] if same == len(piece) else ""


def with_controls(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text in which names of control tokens are these tokens. No user may have written the text."""
    names = sorted(tokenizer.controls, key=len, reverse=True)
    cut = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return tokenizer.encode_rendered([tokenizer.controls.get(piece, piece) for piece in cut if piece])
