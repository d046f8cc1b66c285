"""Continuations of prompts as text, while they are drawn, in batches of few shapes."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from jax.sharding import Mesh

from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference import generate
from jaxlm.inference.detokenizer import Detokenizer
from jaxlm.inference.requests import Request, max_prompt_tokens
from jaxlm.inference.scoring import padded_length
from jaxlm.inference.stop_strings import StopScanner
from jaxlm.models.config import Kernels, ModelConfig
from jaxlm.models.tree import Tree

# "stop": one of the `ends` of tokenizer or request, or a stop string; "length": `max_tokens`.
FinishReason = Literal["stop", "length"]


class Piece(NamedTuple):
    """The text that one token adds to the continuation of request `row`. The last piece of a continuation has no token,
    the text that was held back, and says why it ended. `text` is None without a tokenizer."""

    row: int
    token_id: int | None
    text: str | None
    finish_reason: FinishReason | None = None


class Completion(NamedTuple):
    """The continuation of one prompt: its text up to a stop string, and its tokens, without the one that ended it.
    `text` is None without a tokenizer."""

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


class Completer:
    """A generator of continuations under one model, at most `batch` at a time on a mesh.

    Requests are padded to a power of two of tokens, and batches to one of rows: few shapes are few programs to compile.

    Args:
      parameters: on `mesh`, in the dtype to compute in.
      tokenizer: None gives token ids alone, of all rows of the vocabulary.
      batch: the most requests that are drawn together.
      kernels: `training.kernels`.
    """

    def __init__(
        self,
        model: ModelConfig,
        parameters: Tree,
        tokenizer: Tokenizer | None,
        batch: int,
        mesh: Mesh,
        kernels: Kernels = "auto",
    ):
        self._model, self._parameters, self._mesh = model, parameters, mesh
        self._tokenizer, self._batch, self._kernels = tokenizer, batch, kernels
        self._known = tokenizer and tokenizer.known(model.vocab_size)

    def __call__(self, requests: Sequence[Request], seed: int = 0) -> Iterator[Piece]:
        """Yield the pieces of all continuations, until each has met an end, a stop string or its `max_tokens`.

        Raises InputError as `check_prompts` does, and where logits are not finite.
        """
        alike = defaultdict(list)  # the requests that one program serves
        for row, request in enumerate(requests):
            longest = max_prompt_tokens(self._model, request.max_tokens)
            alike[request.max_tokens, padded_length(len(request.prompt), longest)].append(row)
        for (max_tokens, length), rows in alike.items():
            for first in range(0, len(rows), self._batch):
                together = rows[first : first + self._batch]
                yield from self._continue(together, [requests[row] for row in together], max_tokens, length, seed)

    def _continue(
        self, rows: Sequence[int], requests: Sequence[Request], max_tokens: int, length: int, seed: int
    ) -> Iterator[Piece]:
        batch = min(self._batch, 1 << (len(rows) - 1).bit_length())
        filled = [*requests, *[requests[-1]] * (batch - len(rows))]
        drawn = generate.generate(
            self._model,
            self._parameters,
            [request.prompt for request in filled],
            max_tokens,
            self._mesh,
            sampling=[request.sampling for request in filled],
            seed=seed,
            streams=[request.stream for request in filled],
            known=self._known,
            pad_to=length,
            kernels=self._kernels,
        )
        going = {at: _Text(self._tokenizer, request) for at, request in enumerate(requests)}
        for tokens in drawn:
            for at, text in list(going.items()):
                token = int(tokens[at])
                if text.ends_with(token):
                    yield Piece(rows[at], None, going.pop(at).rest(), "stop")
                    continue
                yield Piece(rows[at], token, text.add(token))
                if text.stopped:
                    yield Piece(rows[at], None, going.pop(at).rest(), "stop")
            if not going:
                return
        for at, text in going.items():
            rest = text.rest()
            yield Piece(rows[at], None, rest, "stop" if text.stopped else "length")


class _Text:
    """The text of one continuation, up to a stop string; None everywhere without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request):
        self._ends = {*(request.ends or ()), *(tokenizer.ends if tokenizer else ())}
        self._decoder = tokenizer and Detokenizer(tokenizer, request.prompt if request.ends is None else [])
        self._scanner = StopScanner(request.stop)

    @property
    def stopped(self) -> bool:
        return self._scanner.found

    def ends_with(self, token: int) -> bool:
        return token in self._ends

    def add(self, token: int) -> str | None:
        return self._decoder and self._scanner.add(self._decoder.add(token))

    def rest(self) -> str | None:
        if self._decoder is None:
            return None
        if self.stopped:
            return ""
        return self._scanner.add(self._decoder.rest()) + self._scanner.rest()


def in_order(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield pieces row by row: those of the first row that is not complete as they come, later ones after it."""
    waiting: dict[int, deque[Piece]] = defaultdict(deque)
    row = 0
    for piece in pieces:
        waiting[piece.row].append(piece)
        while waiting[row]:
            first = waiting[row].popleft()
            yield first
            row += first.finish_reason is not None


def completions(pieces: Iterable[Piece], rows: int) -> list[Completion]:
    """Gather all pieces into the continuation of each of the `rows` requests."""
    ids: list[list[int]] = [[] for _ in range(rows)]
    texts: list[list[str]] = [[] for _ in range(rows)]
    reasons: list[FinishReason] = ["length"] * rows
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
