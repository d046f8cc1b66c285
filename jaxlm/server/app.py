"""The routes of a server: who may ask, what may be asked, and an answer to everything that comes in."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from jaxlm import __version__
from jaxlm.server.endpoints import ENDPOINTS, PREFIX, Endpoint
from jaxlm.server.events import ClientGone, EventsResponse, Streamed, while_connected
from jaxlm.server.metrics import ServerMetrics
from jaxlm.server.models import model_entry, models_list
from jaxlm.server.openapi import document
from jaxlm.server.refusals import Refusal, refusal_of, unexpected
from jaxlm.server.schema import parsed
from jaxlm.server.served import ServedModel
from jaxlm.server.tokens import tokenizer_info

_PAGE = Path(__file__).with_name("page.html")
_ALLOWED = (  # of the page: what it holds itself, and this server
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_SMALL = 1 << 16  # bytes that are read in no time

_log = logging.getLogger("jaxlm.server")


def make_app(served: ServedModel, metrics: ServerMetrics) -> Starlette:
    """Return the ASGI application that serves a model."""
    server = _Server(served, metrics)
    routes = []
    for endpoint in ENDPOINTS:
        routes += _both(endpoint.path, server.posted(endpoint), "POST")
    routes += _both("/models", server.read(lambda request: JSONResponse(models_list(served))), "GET")
    routes += _both("/models/{name:path}", server.read(server.model), "GET")
    routes.append(Route("/", server.page, methods=["GET"]))
    routes += _both("/tokenizer_info", server.read(lambda request: JSONResponse(tokenizer_info(served))), "GET")
    routes += _both("/metrics", server.read(server.metrics), "GET")
    routes += _both("/health", server.read(server.health, is_open=True), "GET")
    routes += _both("/version", server.read(lambda request: JSONResponse({"version": __version__})), "GET")
    described = document(served, ENDPOINTS)
    routes += _both("/openapi.json", server.read(lambda request: JSONResponse(described), is_open=True), "GET")
    return Starlette(
        routes=routes, exception_handlers={HTTPException: server.http_error, Exception: server.unexpected_error}
    )


def _both(path: str, handler: Callable[[Request], Awaitable[Response]], method: str) -> list[Route]:
    """Return the routes of a path, with the prefix and without."""
    return [Route(prefix + path, handler, methods=[method]) for prefix in (PREFIX, "")]


class _Server:
    """The handlers of the routes."""

    def __init__(self, served: ServedModel, metrics: ServerMetrics):
        self._served, self._metrics = served, metrics

    def posted(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of an endpoint."""

        async def handler(request: Request) -> Response:
            begun = time.monotonic()

            def ended(status: int) -> None:
                self._metrics.answered(endpoint.path, status, time.monotonic() - begun)

            try:
                answer = await self._answered(endpoint, request)
            except (ClientGone, ClientDisconnect):
                ended(499)
                return Response(status_code=499)
            except Exception as error:
                refusal = self._refusal(error)
                ended(refusal.status)
                return refusal.response()
            if isinstance(answer, Streamed):
                left = self._served.limits.seconds - (time.monotonic() - begun)
                return EventsResponse(answer, left, self._refusal, ended)
            ended(200)
            return JSONResponse(answer)

        return handler

    async def _answered(self, endpoint: Endpoint, request: Request) -> Any:
        caller = self._served.caller(request.headers.get("authorization"))
        async with asyncio.timeout(self._served.limits.seconds):
            content = await self._body(request)
            if len(content) > _SMALL:
                body: Any = await to_thread.run_sync(parsed, endpoint.takes, content)
            else:
                body = parsed(endpoint.takes, content)
            served = self._served.named(body.model)
            begun: list[Any] = []

            async def work() -> Any:
                begun.append(await endpoint.answer(served, caller, body))
                return begun[0]

            try:
                return await while_connected(request.receive, work())
            except BaseException:
                for answer in begun:  # its client went away, or its time was over, at this very moment
                    if isinstance(answer, Streamed):
                        answer.texts.close()
                raise

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another site may send any other kind unasked
            raise Refusal(
                "send JSON, with the header Content-Type: application/json", 415, code="unsupported_media_type"
            )
        most, content = self._served.limits.body_bytes, bytearray()
        too_large = Refusal(f"the body is larger than {most} bytes, the most that is read", 413, code="body_too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        async for chunk in request.stream():
            content += chunk
            if len(content) > most:
                raise too_large
        return bytes(content)

    def read(
        self, answer: Callable[[Request], Response], is_open: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a path that is only read; one that `is_open` needs no key."""

        async def handler(request: Request) -> Response:
            try:
                if not is_open:
                    self._served.caller(request.headers.get("authorization"))
                return answer(request)
            except Exception as error:
                return self._refusal(error).response()

        return handler

    async def page(self, request: Request) -> Response:
        """Answer with a page to try the model on, which speaks with this server alone."""
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": _ALLOWED})

    def model(self, request: Request) -> Response:
        """Answer with the model of a name."""
        return JSONResponse(model_entry(self._served.named(request.path_params["name"]), self._served))

    def metrics(self, request: Request) -> Response:
        """Answer with what Prometheus reads."""
        return Response(self._metrics.text(), media_type=self._metrics.content_type)

    def health(self, request: Request) -> Response:
        """Answer whether requests are served: a step has ended in time, or there is nothing to do."""
        service = self._served.service
        stalled = service.stalled_seconds()
        status = "ok"
        if service.failure:
            status = service.failure
        elif service.is_draining:
            status = "draining"
        elif stalled > self._served.limits.stalled_seconds:
            status = f"a step has taken {stalled:.0f} s"
        body = {
            "status": status,
            "model": self._served.name,
            "chat": self._served.chat_template is not None,
            "exact": self._served.exact,
            "dtype": self._served.dtype,
            "quantize": self._served.quantize,
            "cache_dtype": self._served.cache_dtype,
            "speculate": self._served.speculate,
            "mesh": {**self._served.layout},
        }
        return JSONResponse(body, 200 if status == "ok" else 503)

    def _refusal(self, error: Exception) -> Refusal:
        """Return the refusal that an exception means; one that nobody expects is logged."""
        refusal = refusal_of(error, self._served.service.retry_after())
        if refusal is None:
            _log.error("a request has failed", exc_info=error)
            refusal = unexpected(error)
        return refusal

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Answer to a path or a method that there is not."""
        assert isinstance(error, HTTPException)
        message = f"there is no {request.method} {request.url.path} here; {PREFIX}/models lists what is served"
        headers = dict(error.headers or {})
        return Refusal(message, error.status_code, code="not_found", headers=headers).response()

    async def unexpected_error(self, request: Request, error: Exception) -> Response:
        """Answer to an exception that nobody expects."""
        return unexpected(error).response()
