"""A server over loopback, and what its engine draws for one request by itself, which every answer is held against."""

import asyncio
import contextlib
import socket
import threading
from dataclasses import replace

import tokenizer_fixtures
import uvicorn
from engine_fixtures import check_pages

from jaxlm.costs.serving import TokenCost
from jaxlm.data.chat_template import ChatTemplate
from jaxlm.inference.requests import Request, Sampling
from jaxlm.inference.service import EngineService
from jaxlm.server.app import make_app
from jaxlm.server.metrics import ServerMetrics
from jaxlm.server.served import ServedModel

CONTEXT = 256
SEED = 11


@contextlib.contextmanager
def serving(engine, tokenizer, **options):
    """Serve an engine over loopback; yield what is served, with its address. Nothing is left in the engine after it."""
    metrics = ServerMetrics()
    service = EngineService(engine, metrics)
    metrics.watch(service)
    template = ChatTemplate(tokenizer_fixtures.CHATML, tokenizer, {}, "chat_template.jinja")
    given = {"chat_template": template, "cost": TokenCost(128, 1_234_000, 4_567_000, 0.002), **options}
    served = ServedModel("tiny", service, tokenizer, **given)
    adapted = [replace(served, name=name, adapter=name, cost=None) for name in engine.adapters]
    served = replace(served, adapted=adapted)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(make_app(served, metrics), log_level="warning", timeout_graceful_shutdown=10)
    )
    thread = threading.Thread(target=asyncio.run, args=[server.serve([listening])])
    thread.start()
    try:
        yield served, f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        asyncio.run(service.drain(0))
        check_pages(engine)
        assert engine.is_idle and not engine.pages_held


def tokens_alone(served, prompt, max_tokens, sampling=Sampling(temperature=0.8), seed=SEED, stream=0):
    """Return the tokens that follow a prompt of ids."""

    async def run():
        request = Request(prompt, max_tokens, sampling, stream=stream, adapter=served.adapter)
        async with served.service.stream([request], seeds=[seed]) as events:
            return [event.token.id async for _, event in events if event.token is not None]

    return asyncio.run(run())


def text_alone(served, prompt, max_tokens, **options):
    """Return the text that follows a prompt of ids."""
    tokens = tokens_alone(served, prompt, max_tokens, **options)
    decode = served.tokenizer.decode
    return decode([*prompt, *tokens])[len(decode(prompt)) :]
