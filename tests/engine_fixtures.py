"""Texts drawn by an engine, as its tests and those above it want them."""

from collections.abc import Callable, Collection, Iterable, Sequence

import meshes
import model_fixtures
import numpy as np
from flax import nnx

from jaxlm.inference.engine import Engine, Event
from jaxlm.inference.generation import Token
from jaxlm.inference.requests import Request, Sampling
from jaxlm.inference.settings import EngineSettings
from jaxlm.models.tree import Tree

SMALL = EngineSettings(slots=8, page=32, chunk_tokens=64)


def drawn(
    model,
    parameters,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    mesh=None,
    *,
    sampling: Sampling | Sequence[Sampling] = Sampling(),
    seed: int = 0,
    streams: Sequence[int] | None = None,
    valid_token_mask: np.ndarray | None = None,
) -> list[list[int]]:
    """Return the tokens that follow each prompt; streams are 0, 1, … where none are given."""
    engine = Engine(model, parameters, mesh or meshes.make(), SMALL, valid_token_mask=valid_token_mask)
    options = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    asked = zip(prompts, options, streams or range(len(prompts)), strict=True)
    ids = [engine.submit(Request(prompt, max_tokens, how, stream=n), seed=seed) for prompt, how, n in asked]
    found = {id: [] for id in ids}
    for event in engine.run():
        if event.error:
            raise event.error
        found[event.id].append(event.token and event.token.id)
    return [found[id] for id in ids]


def check_pages(engine: Engine) -> None:
    """Raise AssertionError unless the pages of each shard are as they should be."""
    for pages in engine.pages:
        pages.check()


class WrittenEngine:
    """An engine whose tokens are written for it.

    `following` gives the tokens that follow the prompt of a request; an exception among them is raised. `asked` are the
    requests that came.
    """

    def __init__(
        self, following: Callable[[Request], Iterable[int | BaseException]], stop_token_ids: Collection[int] = ()
    ):
        self._following, self._stop_token_ids = following, frozenset(stop_token_ids)
        self._left, self.asked = {}, []
        self.longest = 64

    def submit(self, request, *, seed=0):
        id = len(self.asked)
        self.asked.append(request)
        tokens = list(self._following(request))
        self._left[id] = iter(tokens), len(tokens), {*self._stop_token_ids, *request.stop_token_ids}
        return id

    def cancel(self, id):
        self._left.pop(id, None)

    finish = cancel

    def answers(self, ids):
        waiting = dict.fromkeys(ids, 0)
        while waiting := {id: n + 1 for id, n in waiting.items() if id in self._left}:
            for id, n in waiting.items():
                tokens, count, stop_token_ids = self._left[id]
                token = next(tokens)
                if isinstance(token, BaseException):
                    raise token
                end = "stop" if token in stop_token_ids else "length" if n == count else None
                if end:
                    self.cancel(id)
                has_ended = end == "stop"
                yield Event(id, None if has_ended else Token(token), token if has_ended else None, end)


def prefixes_read(engine: Engine, graph: nnx.GraphDef, parameters: Tree, *prompts: list[int]) -> list[int]:
    """Serve prompts greedily, check each token by a forward pass over the whole text, and return how many tokens of
    each prompt were read from the cache."""
    asked = {engine.submit(Request(prompt, 48, Sampling(temperature=0.0))): prompt for prompt in prompts}
    drawn, cached = {id: [] for id in asked}, {}
    for event in engine.run():
        drawn[event.id].append(event.token.id)
        cached[event.id] = event.cached
    for id, prompt in asked.items():
        logits = model_fixtures.full_logits(graph, parameters, prompt + drawn[id], engine.model.context_length)
        assert drawn[id] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return [cached[id] for id in asked]
