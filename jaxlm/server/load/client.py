"""Requests sent over HTTP, and when their tokens came. Imports no JAX."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import httpx

from jaxlm.core.errors import InputError, RunFailed, in_one_line
from jaxlm.server.load.workload import LoadRequest

_TIMEOUT_S = 3600.0


class Answered(NamedTuple):
    """A request that has ended: times in seconds of one clock.

    Attributes:
      chunks: when each part of the text came; a part may hold several tokens.
      error: why there is no whole text; None where there is.
    """

    prompt_tokens: int
    output_tokens: int
    sent: float
    chunks: tuple[float, ...]
    ended: float
    error: str | None


class ServerClient:
    """A client of a server for loads. Close it by leaving its context."""

    def __init__(self, url: str, key: str | None = None):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(
            base_url=self._url, headers=headers, timeout=_TIMEOUT_S, limits=httpx.Limits(max_connections=None)
        )

    async def __aenter__(self) -> "ServerClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """Return the name of the model that is served. Raises InputError where no server answers so."""
        try:
            answer = (await self._client.get("/v1/models")).raise_for_status()
            return answer.json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise InputError(f"--url {self._url} has no model in /v1/models: {_reason(error)}") from None

    async def send(self, model: str, text: LoadRequest) -> Answered:
        """Ask for one text, as a stream, and return when its parts came."""
        body = {
            "model": model,
            "prompt": text.prompt,
            "max_tokens": text.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        chunks, usage, sent = [], None, time.perf_counter()
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    error = f"{answer.status_code}: {_message(await answer.aread())}"
                    return Answered(len(text.prompt), 0, sent, (), time.perf_counter(), error)
                async for line in answer.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ValueError(_message(line.removeprefix("data: ").encode()))
                    usage = event.get("usage") or usage
                    if any(choice.get("text") for choice in event["choices"]):
                        chunks.append(time.perf_counter())
            tokens = int(usage["completion_tokens"]) if usage else len(chunks)
            return Answered(len(text.prompt), tokens, sent, tuple(chunks), time.perf_counter(), None)
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            return Answered(len(text.prompt), 0, sent, tuple(chunks), time.perf_counter(), _reason(error))


async def run(
    client: ServerClient,
    model: str,
    texts: Sequence[LoadRequest],
    times: Sequence[float],
    concurrency: int | None,
    answered: Callable[[Answered], None],
) -> None:
    """Send requests at times from now on, at most `concurrency` at once, and pass each to `answered` at its end."""
    room = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    begun = time.perf_counter()

    async def send(text: LoadRequest, has_room: asyncio.Event) -> None:
        async with room:
            has_room.set()
            answered(await client.send(model, text))

    async with asyncio.TaskGroup() as group:
        for text, at in zip(texts, times, strict=True):
            await asyncio.sleep(begun + at - time.perf_counter())
            has_room = asyncio.Event()
            group.create_task(send(text, has_room))
            await has_room.wait()  # or later requests would crowd before the door


def checked(answered: Sequence[Answered]) -> list[Answered]:
    """Return the requests that have their text. Raises RunFailed where no request has its text."""
    complete = [each for each in answered if each.error is None]
    if answered and not complete:
        raise RunFailed(f"all {len(answered)} requests failed: {answered[0].error}")
    return complete


def _reason(error: Exception) -> str:
    return in_one_line(error) or str(error) or type(error).__name__


def _message(content: bytes) -> str:
    """Return the message of an error as OpenAI's API has them, or what came in its place."""
    try:
        described: Any = json.loads(content)
        return str(described["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return content[:200].decode(errors="replace")
