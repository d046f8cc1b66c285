"""/v1/embeddings: the model's stream after the last token of a text, as a vector of length 1."""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from anyio import to_thread
from pydantic import Field
from typing_extensions import TypedDict

from jaxlm.core.errors import InputError
from jaxlm.inference.requests import Request, Sampling, check_prompts
from jaxlm.server.refusals import Refusal
from jaxlm.server.request_body import RequestBody
from jaxlm.server.schema import in_words, neutral
from jaxlm.server.served import Caller, ServedModel

TokenId = Annotated[int, Field(ge=0)]


class EmbeddingsBody(RequestBody):
    """A request for vectors of texts."""

    model: str
    """The model's name, as /v1/models gives it."""
    input: Annotated[
        str | list[str] | list[TokenId] | list[list[TokenId]],
        in_words("a text, a list of texts, a list of token ids, or a list of lists of token ids"),
    ]
    """Texts, which begin and end as the tokenizer has it, or token ids as they are."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or the bytes of little-endian float32 in base64."""
    dimensions: neutral(why="a vector has the width of the model") = None
    user: str | None = None
    """A name for the caller's end user; nothing depends on it."""


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(TypedDict):
    """Vectors of texts, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


async def embed(served: ServedModel, caller: Caller, body: EmbeddingsBody) -> EmbeddingsAnswer:
    """Answer a request for vectors."""
    prompts = await to_thread.run_sync(_encoded, served, body)
    how = Sampling(temperature=0.0)
    requests = [Request(prompt, 1, how, hidden=True, adapter=served.adapter) for prompt in prompts]
    vectors: dict[int, np.ndarray] = {}
    stream = served.service.stream(requests, seeds=[0] * len(prompts), salt=caller.salt)
    async with stream:
        async for index, event in stream:
            if event.hidden is None:
                raise Refusal(f"the model failed: {event.error}", 500, code="generation_failed")
            vectors[index] = event.hidden / max(float(np.linalg.norm(event.hidden)), 1e-30)
    as_bytes = body.encoding_format == "base64"
    tokens = sum(map(len, prompts))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _shown(vectors[index], as_bytes)}
            for index in range(len(prompts))
        ],
        "model": served.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _shown(vector_D: np.ndarray, as_bytes: bool) -> list[float] | str:
    return base64.b64encode(vector_D.astype("<f4").tobytes()).decode() if as_bytes else vector_D.tolist()


def _encoded(served: ServedModel, body: EmbeddingsBody) -> list[list[int]]:
    texts: list[Any] = body.input if isinstance(body.input, list) else [body.input]
    if texts and isinstance(texts[0], int):
        texts = [texts]
    most = served.service.engine.settings.max_queued
    if not 1 <= len(texts) <= most:
        raise Refusal(f"input has {len(texts)} texts; give from 1 to {most}", param="input")
    model = served.service.engine.model
    encoded = [served.tokenizer.encode_whole(text) if isinstance(text, str) else text for text in texts]
    for place, prompt in enumerate(encoded):
        try:
            check_prompts(model, [prompt[: model.context_length]], 1)
        except InputError as error:
            raise Refusal(f"input {place}: {error}", param="input") from None
        if len(prompt) > served.longest:
            raise Refusal(
                f"input {place} has {len(prompt)} tokens, more than the {served.longest} of a text here; shorten it",
                param="input",
                code="context_length_exceeded",
            )
    return encoded
