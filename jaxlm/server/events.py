"""Answers by server-sent events (the WHATWG's HTML standard, section 9.2), ended by the client's going away."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxlm.server.refusals import Refusal
from jaxlm.server.texts import CompletionStream

Result = TypeVar("Result")

_DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """A client that closed its connection before its answer was ready."""


@dataclass(frozen=True)
class Streamed:
    """An answer in chunks of JSON, drawn from `texts`. A `type` of a chunk, as those of /v1/responses have it, is the
    name of its event; then nothing follows the last."""

    texts: CompletionStream
    chunks: AsyncIterator[Mapping[str, Any]]


class EventsResponse(Response):
    """A response that sends the chunks of an answer as they come.

    An error that comes up on the way is sent as a last event. The texts are cancelled where the client goes away, and
    where the answer takes longer than `seconds`.

    Args:
      refusal_of: gives the refusal that an exception means.
      ended: is called with the HTTP status that the answer would have had, were it not on its way.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Streamed,
        seconds: float,
        refusal_of: Callable[[Exception], Refusal],
        ended: Callable[[int], None],
    ):
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answer, self._seconds, self._refusal_of, self._ended = answer, seconds, refusal_of, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        status = 499
        async with self._answer.texts:
            try:
                status = await while_connected(receive, self._send(send))
            except (ClientGone, OSError):
                pass
            finally:
                self._ended(status)

    async def _send(self, send: Send) -> int:
        """Send all chunks, or an error after those that came before it. Return the status of the answer."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        status, named = 200, False
        try:
            async with asyncio.timeout(self._seconds):
                async for chunk in self._answer.chunks:
                    named = "type" in chunk
                    await send({"type": "http.response.body", "body": event(chunk), "more_body": True})
        except OSError as error:
            if not isinstance(error, TimeoutError):
                raise
            status = await self._send_error(error, named, send)
        except Exception as error:
            status = await self._send_error(error, named, send)
        await send({"type": "http.response.body", "body": b"" if named else _DONE, "more_body": False})
        return status

    async def _send_error(self, error: Exception, named: bool, send: Send) -> int:
        refusal = self._refusal_of(error)
        body: Mapping[str, Any] = refusal.body
        if named:
            detail = refusal.body["error"]
            body = {"type": "error", **{name: detail[name] for name in ("code", "message", "param")}}
        await send({"type": "http.response.body", "body": event(body), "more_body": True})
        return refusal.status


def event(chunk: Mapping[str, Any]) -> bytes:
    """Return a chunk as a server-sent event."""
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return f"{name}data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what `work` gives; cancel it, and raise ClientGone, where the client goes away before."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
