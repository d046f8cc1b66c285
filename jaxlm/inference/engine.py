"""The inference engine: requests in, tokens out, each step dispatched before the one before it is read."""

import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxlm.inference.pages import Pages
from jaxlm.inference.requests import Request
from jaxlm.inference.runner import TILE, PendingStep, Runner
from jaxlm.inference.sampling import NO_TOKEN, not_finite
from jaxlm.inference.scheduler import Chunk, EndReason, Scheduler
from jaxlm.models.config import Kernels, ModelConfig
from jaxlm.models.tree import Tree


@dataclass(frozen=True)
class EngineSettings:
    """The sizes of an engine.

    Attributes:
      context: the most tokens of a sequence; None is the model's context length.
      slots: the most sequences that are under way.
      cache_bytes: the most memory of keys and values, over all devices; fewer pages than all slots could need make some
        wait.
      page: tokens of a page, a multiple of `runner.TILE`.
      chunk_tokens: the most rows of prompts in a step, rounded up to whole tiles.
      max_queued, max_queued_tokens: the most requests that wait, and of their tokens.
      kernels: `training.kernels`.
      exact: compute each row in one way on a CPU, whatever shares its step; without it XLA may choose another way for
        each number of rows.
    """

    context: int | None = None
    slots: int = 64
    cache_bytes: int = 1 << 30
    page: int = 128
    chunk_tokens: int = 512
    max_queued: int = 1 << 20
    max_queued_tokens: int = 1 << 40
    kernels: Kernels = "auto"
    exact: bool = True


class EngineEvent(NamedTuple):
    """One thing that happened to a request.

    Attributes:
      id: of the request.
      token: that was drawn; None where nothing was, or where it is an id that ended it.
      end: why it ended; None while it goes on.
      error: one line, where `end` is "error".
      logprob: ln p of the token, and
      top: ids and ln p of the likeliest ones, as far as the request asks for them (`Sampling.logprobs`).
      hidden: float32 [D], the normalised stream that the token was drawn from.
      scores: for rows of the prompt from `first` on, ln p of the token after each, and whether it is the likeliest.
      first: see `scores`.
    """

    id: int
    token: int | None = None
    end: EndReason | None = None
    error: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    hidden: np.ndarray | None = None
    scores: tuple[np.ndarray, np.ndarray] | None = None
    first: int = 0


class Engine:
    """A model that serves requests together, each as if it were alone.

    `submit` and `cancel` may be called from any thread; `step` belongs to one. A token's logits depend on the tokens of
    its own sequence alone, to the bit on a CPU: not on other requests, on how a prompt is cut into chunks, on prefixes
    that were found in the cache, or on whether it was interrupted (`check` measures it).

    Args:
      parameters: on `mesh`, in the dtype to compute in.
      known: bool [V], whether an id has a token; others are never drawn. None where all have.
      ends: ids that end every request.

    Raises InputError for a model or a page that the engine cannot serve.
    """

    def __init__(
        self,
        model: ModelConfig,
        parameters: Tree,
        mesh: Mesh,
        settings: EngineSettings = EngineSettings(),
        *,
        known: np.ndarray | None = None,
        ends: Collection[int] = (),
    ):
        self.model, self.settings, self._ends = model, settings, frozenset(ends)
        context = min(settings.context or model.context_length, model.context_length)
        self.runner = Runner(
            model,
            parameters,
            mesh,
            known=known,
            page=settings.page,
            context=context,
            slots=settings.slots,
            chunk_tokens=settings.chunk_tokens,
            cache_bytes=settings.cache_bytes,
            kernels=settings.kernels,
            exact=settings.exact,
        )
        self.pages = Pages(self.runner.page_groups, settings.page)
        self._scheduler = Scheduler(
            self.pages,
            slots=settings.slots,
            chunk_tokens=self.runner.chunk_tokens,
            tile=TILE,
            max_queued=settings.max_queued,
            max_queued_tokens=settings.max_queued_tokens,
            max_context=context,
        )
        self._lock = threading.Lock()
        self._ahead: PendingStep | None = None

    @property
    def is_idle(self) -> bool:
        """True while nothing waits, runs or is to be read."""
        return self._ahead is None and not self._scheduler.waiting and not self._scheduler.admitted

    @property
    def preemptions(self) -> int:
        """The times that a request lost its pages to others, to be read again."""
        return self._scheduler.preemptions

    def warm(self, scores: bool = False) -> None:
        """Compile all programs before the first request."""
        self.runner.warm(scores)

    def check(self) -> bool:
        """Return whether a row is computed in one way by all programs, to the bit. To be called before requests."""
        return self.runner.check()

    def submit(
        self, request: Request, *, priority: int = 0, seed: int = 0, salt: bytes = b"", scores: bool = False
    ) -> int:
        """Put a request into the queue and return its id.

        Args:
          priority: smaller is sooner.
          seed: of the random numbers, of which the request takes its stream.
          salt: prefixes of prompts are shared under one salt alone.
          scores: also give the log-probabilities of the prompt's own tokens, which reads all of it anew.

        Raises `scheduler.NeverFits` if it could not run alone, and `scheduler.Full` if too many wait.
        """
        with self._lock:
            generation = self._scheduler.submit(
                request, priority=priority, seed=seed, salt=salt, ends=self._ends, is_cold=scores
            )
            return generation.id

    def cancel(self, id: int) -> None:
        """End a request that nobody waits for, without an event; an unknown one, or one that has ended, is left
        alone."""
        with self._lock:
            self._scheduler.cancel(id)

    def finish(self, id: int) -> None:
        """End a request whose text has met a stop string, without an event."""
        with self._lock:
            self._scheduler.finish(id)

    def step(self) -> list[EngineEvent]:
        """Dispatch the next step, read the one before it, and return what happened: nothing where all is idle."""
        with self._lock:
            plan = self._scheduler.plan()
            events = [
                EngineEvent(generation.id, end="error", error="the cache has no room for it to go on, even alone")
                for generation in self._scheduler.failed()
            ]
        # A generation that is cancelled meanwhile has its rows computed and dropped.
        scores = plan is not None and any(map(_is_scored, plan.chunks))
        done, self._ahead = self._ahead, plan and self.runner.dispatch(plan, scores)
        if done is None:
            return events
        reading = self.runner.read(done)
        with self._lock:
            tokens = {id: drawn.token for id, drawn in reading.tokens.items()}
            for generation in done.plan.draws:
                if tokens[generation.id] == NO_TOKEN and not generation.end:
                    self._scheduler.cancel(generation.id)
                    events.append(EngineEvent(generation.id, end="error", error=not_finite()))
            for chunk in done.plan.chunks:
                if _is_scored(chunk) and not chunk.generation.end:
                    id = chunk.generation.id
                    events.append(EngineEvent(id, scores=reading.scores[id], first=chunk.start))
            for draw in self._scheduler.commit(done.plan, tokens):
                id, ended_by = draw.generation.id, draw.token in draw.generation.ends
                drawn = reading.tokens[id]
                events.append(
                    EngineEvent(
                        id,
                        None if ended_by else draw.token,
                        draw.end,
                        logprob=drawn.logprob,
                        top=drawn.top,
                        hidden=reading.hidden[id],
                    )
                )
        return events

    def run(self) -> Iterator[EngineEvent]:
        """Yield what happens until all requests have ended."""
        while not self.is_idle:
            yield from self.step()


def _is_scored(chunk: Chunk) -> bool:
    """Return whether the log-probabilities of a chunk's own tokens are asked for: it is of a prompt that is read anew
    for them."""
    return chunk.generation.is_cold and chunk.start < chunk.generation.prompt
