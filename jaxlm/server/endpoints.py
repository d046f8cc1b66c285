"""The paths that take a body, with the types of bodies and answers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from jaxlm.server.chat import ChatAnswer, ChatBody, ChatChunk, answer_chat
from jaxlm.server.completions import CompletionAnswer, CompletionBody, complete
from jaxlm.server.embeddings import EmbeddingsAnswer, EmbeddingsBody, embed
from jaxlm.server.request_body import RequestBody
from jaxlm.server.responses import ResponseAnswer, ResponseEvent, ResponsesBody, respond
from jaxlm.server.served import Caller, ServedModel
from jaxlm.server.tokens import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody, detokenize, tokenize

PREFIX = "/v1"  # of every path, which may be left out


@dataclass(frozen=True)
class Endpoint:
    """A path that takes a body and answers it.

    Attributes:
      answer: the function that does.
      gives, streams: the types of an answer, and of a chunk of one in a stream; None where there are no streams.
    """

    path: str
    takes: type[RequestBody]
    answer: Callable[[ServedModel, Caller, Any], Awaitable[Any]]
    gives: type
    streams: type | None = None


ENDPOINTS = (
    Endpoint("/completions", CompletionBody, complete, CompletionAnswer, CompletionAnswer),
    Endpoint("/chat/completions", ChatBody, answer_chat, ChatAnswer, ChatChunk),
    Endpoint("/responses", ResponsesBody, respond, ResponseAnswer, ResponseEvent),
    Endpoint("/embeddings", EmbeddingsBody, embed, EmbeddingsAnswer),
    Endpoint("/tokenize", TokenizeBody, tokenize, TokenizeAnswer),
    Endpoint("/detokenize", DetokenizeBody, detokenize, DetokenizeAnswer),
)
