"""Continuations of prompts as text, while they are drawn."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.continuation import ContinuationText
from jaxlm.inference.engine import Engine, Event
from jaxlm.inference.generation import EndReason
from jaxlm.inference.requests import Request


class TextChunk(NamedTuple):
    """The text that one token adds to the continuation of request `row`. The last piece of a continuation has no token,
    the text that was held back, and says why the continuation ended. `text` is None without a tokenizer."""

    row: int
    token_id: int | None
    text: str | None
    finish_reason: EndReason | None = None


class Completion(NamedTuple):
    """The continuation of one prompt: its text up to a stop string, and its tokens, without a token that ended it.
    `text` is None without a tokenizer."""

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: EndReason


class Completer:
    """A generator of continuations by an engine.

    Args:
      tokenizer: None gives token ids alone.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None):
        self._engine, self._tokenizer = engine, tokenizer

    def __call__(self, requests: Sequence[Request], seed: int = 0) -> Iterator[TextChunk]:
        """Yield the pieces of all continuations, until each has met an end, a stop string or its `max_tokens`.

        Raises InputError for a request that the engine cannot run, and where logits are not finite.
        """
        rows: dict[int, int] = {}
        texts: dict[int, ContinuationText | None] = {}
        try:
            for row, request in enumerate(requests):
                id = self._engine.submit(request, seed=seed)
                rows[id], texts[id] = row, self._tokenizer and ContinuationText(self._tokenizer, request)
            for event in self._engine.answers(rows):
                yield from self._pieces(event, rows[event.id], texts[event.id])
        finally:
            for id in rows:
                self._engine.cancel(id)

    def _pieces(self, event: Event, row: int, text: ContinuationText | None) -> Iterator[TextChunk]:
        if event.error:
            raise event.error
        if text is not None and text.stopped:
            return  # what was drawn before the stop string was found
        if event.token is not None:
            yield TextChunk(row, event.token.id, text and text.add(event.token.id))
        if text is not None and text.stopped:
            self._engine.finish(event.id)
            yield TextChunk(row, None, "", "stop")
        elif event.end:
            rest = text and text.rest(event.ended_by)
            stopped = text is not None and text.stopped  # by a stop string in what was held back
            yield TextChunk(row, None, rest, "stop" if stopped else event.end)


def in_order(pieces: Iterable[TextChunk]) -> Iterator[TextChunk]:
    """Yield pieces row by row: pieces of the first incomplete row as they come, pieces of a later row after
    that row is complete."""
    waiting: dict[int, deque[TextChunk]] = defaultdict(deque)
    row = 0
    for piece in pieces:
        waiting[piece.row].append(piece)
        while waiting[row]:
            first = waiting[row].popleft()
            yield first
            row += first.finish_reason is not None


def completions(pieces: Iterable[TextChunk], rows: int) -> list[Completion]:
    """Gather all pieces into the continuation of each of the `rows` requests."""
    ids: list[list[int]] = [[] for _ in range(rows)]
    texts: list[list[str]] = [[] for _ in range(rows)]
    reasons: list[EndReason] = ["length"] * rows
    for row, token, text, reason in pieces:
        if token is not None:
            ids[row].append(token)
        if text is not None:
            texts[row].append(text)
        if reason is not None:
            reasons[row] = reason
    has_text = any(texts)
    return [
        Completion("".join(text) if has_text else None, tuple(tokens), reason)
        for text, tokens, reason in zip(texts, ids, reasons, strict=True)
    ]
