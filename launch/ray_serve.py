"""Several replicas of a model behind one address, by Ray Serve.

    pip install -e '.[serve,ray]'
    python launch/ray_serve.py MODEL --replicas 2 [--port 8000] [--gpus 1] [-- --max-context 8192 …]

Each replica is a `jaxlm serve` of its own, with what stands behind `--` given to it. An ingress reads what comes in,
chooses the replica that has read the beginning of the prompt, as long as it is not busier than the others, and relays
the answer as it comes; a client that goes away ends its request there too. The ingress listens on loopback unless
--host says otherwise, and leaves keys of the API to the replicas (--api-key-file).
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import httpx
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jaxlm.server.routing import PrefixRouter, prompt_of

_HOP = {
    "connection",
    "content-length",
    "date",
    "host",
    "keep-alive",
    "server",
    "transfer-encoding",
}  # of one connection
_PATIENCE_S = 3600.0


@serve.deployment(max_ongoing_requests=10_000)
class Replica:
    """A server of the model in a process of its own, which ends with it."""

    def __init__(self, model: str, options: list[str]):
        command = [sys.executable, "-m", "jaxlm", "serve", model, *options, "--port", "0", "--json"]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"jaxlm serve {model} ended with status {self._server.wait()}")
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=json.loads(line)["url"], timeout=_PATIENCE_S, limits=limits)

    def __del__(self):
        self._server.terminate()
        self._server.wait()

    async def check_health(self) -> None:
        """Raise where the server does not serve: Ray then starts another replica."""
        if self._server.poll() is not None:
            raise RuntimeError(f"the server ended with status {self._server.returncode}")
        (await self._client.get("/health", timeout=30.0)).raise_for_status()

    async def relay(
        self, method: str, path: str, headers: dict[str, str], content: bytes
    ) -> AsyncIterator[tuple[int, dict[str, str]] | bytes]:
        """Yield the status and headers of an answer, and then its body as it comes."""
        async with self._client.stream(method, path, headers=headers, content=content) as answer:
            yield answer.status_code, _passed_on(answer.headers)
            async for part in answer.aiter_raw():
                yield part


@serve.deployment(max_ongoing_requests=10_000)
class Ingress:
    """The one address: it reads the body of a request, and relays it to a replica."""

    def __init__(self, *replicas: Any):
        self._replicas, self._router = replicas, PrefixRouter(len(replicas))

    async def __call__(self, request: Request) -> Response:
        """Answer as a replica answers."""
        content = await request.body()
        prompt, lost = prompt_of(content), []
        while len(lost) < len(self._replicas):
            with ExitStack() as entered:
                number = entered.enter_context(self._router.routed(prompt, lost))
                target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                asked = self._replicas[number].options(stream=True).relay
                parts = asked.remote(request.method, target, _passed_on(request.headers), content)
                try:
                    status, headers = await anext(parts)
                    return StreamingResponse(_relayed(parts, entered.pop_all()), status, headers)
                except Exception:  # it is lost before it answered; Ray starts another, which has read nothing
                    self._router.forget(number)
                    lost.append(number)
        described = {"message": "no replica answers; try again", "type": "server_error", "param": None}
        return JSONResponse({"error": described | {"code": "replica_lost"}}, 503, {"Retry-After": "5"})


async def _relayed(parts: Any, under_way: ExitStack) -> AsyncIterator[bytes]:
    """Yield the body of an answer; a client that goes away ends it."""
    with under_way:
        try:
            async for part in parts:
                yield part
        except asyncio.CancelledError:
            parts.cancel()
            raise


def _passed_on(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}


def main() -> None:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("model")
    described.add_argument("--replicas", type=int, default=2)
    described.add_argument("--gpus", type=float, default=0, help="of each replica")
    described.add_argument("--cpus", type=float, default=1, help="of each replica")
    described.add_argument("--host", default="127.0.0.1")
    described.add_argument("--port", type=int, default=8000)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    asked, options = described.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    ray.init(include_dashboard=False, log_to_driver=True)
    serve.start(http_options={"host": asked.host, "port": asked.port})
    actor = {"num_cpus": asked.cpus, "num_gpus": asked.gpus}
    replicas = [
        Replica.options(name=f"replica-{i}", ray_actor_options=actor).bind(asked.model, options)
        for i in range(asked.replicas)
    ]
    serve.run(Ingress.options(ray_actor_options={"num_cpus": 0}).bind(*replicas), route_prefix="/")
    print(f"serving {asked.model} by {asked.replicas} replicas at http://{asked.host}:{asked.port}/v1", flush=True)
    signal.sigwait([signal.SIGINT, signal.SIGTERM])
    serve.shutdown()


if __name__ == "__main__":
    main()
