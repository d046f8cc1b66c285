"""The thread that runs an engine, and asynchronous streams of what happens to requests."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxlm.inference.engine import Engine, Event
from jaxlm.inference.generation import EndReason
from jaxlm.inference.grammar import CompiledGrammar
from jaxlm.inference.pages import GroupHit
from jaxlm.inference.requests import Request

_POLL_S = 0.02  # between looks at what is left, while it drains
_LAST_STEP_S = 10.0  # that the step under way is waited for at the end
_LONGEST_WAIT_S = 60  # that a client is told to wait


class EngineFailed(RuntimeError):
    """An engine that has failed, and every request with it. The message says why."""


class Draining(RuntimeError):
    """A service that ends, and takes no more requests."""


@dataclass(slots=True)
class TextCounts:
    """Counts of the requests of one adapter, or of the model itself.

    Attributes:
      ended: requests that have ended, by the reason.
      prompt_tokens, cached_tokens: tokens of prompts of requests that have drawn, and how many of these tokens were
        found in the cache.
      tokens: that were drawn.
    """

    ended: dict[EndReason, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error"), 0)
    )
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0


class ServiceStatistics(NamedTuple):
    """Counts of a service since it began, and its state now.

    Attributes:
      waiting, running: requests now.
      pages, pages_held, pages_cached: of all groups of layers and all shards: all pages, pages of running
        requests, and pages that nobody holds and that may be found again.
      texts: the counts of the model itself (None) and of each adapter, by name.
      group_hits: by group of pages, tokens of prompts that this group had, and that it alone lacked, when requests
        began.
      preemptions: times that a request lost its pages to others.
      drafted, accepted: drafts that steps have read, and those of them that were drawn in their places.
      steps: that were dispatched.
      step_seconds: the time of the last step.
    """

    waiting: int
    running: int
    pages: int
    pages_held: int
    pages_cached: int
    texts: dict[str | None, TextCounts]
    group_hits: dict[str, GroupHit]
    preemptions: int
    drafted: int
    accepted: int
    steps: int
    step_seconds: float


class ServiceObserver:
    """A listener to the times of tokens, in seconds. It is called by the engine's thread and must return soon."""

    def first_token(self, seconds: float) -> None:
        """Take the time from the submission of a request to its first token."""

    def next_token(self, seconds: float) -> None:
        """Take the time between two tokens of a request."""


@dataclass(slots=True, eq=False)
class _Listener:
    """A request under way, its stream and its index there, and the time when it was submitted or last drew a token."""

    stream: "EventStream"
    index: int
    request: Request
    since: float
    has_drawn: bool = False


class EventStream:
    """Events of requests that were submitted together, as pairs of a request's index and an event.

    A context, which cancels at its end the requests that have not ended. The iteration ends once all requests have
    ended, and raises EngineFailed or Draining where the service ends before the requests. Events wait here for a reader
    however slow, as many as there are tokens.
    """

    def __init__(self, service: "EngineService"):
        self._service = service
        self._open: dict[int, int] = {}  # ids by index
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._events: deque[tuple[int, Event] | Exception] = deque()

    async def __aenter__(self) -> "EventStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> tuple[int, Event]:
        while self._open:
            while not self._events:
                self._ready.clear()
                await self._ready.wait()
            item = self._events.popleft()
            if isinstance(item, Exception):
                self._open.clear()
                raise item
            index, event = item
            if index in self._open:
                if event.end:
                    del self._open[index]
                return index, event
        raise StopAsyncIteration

    def finish(self, index: int) -> None:
        """End a request whose text has met a stop string; no event of it follows."""
        if (id := self._open.pop(index, None)) is not None:
            self._service._finish(id)

    def close(self) -> None:
        """Cancel all requests that have not ended; their pages are free at once."""
        self._service._cancel(self._open.values())
        self._open.clear()

    def _put(self, events: Iterable[tuple[int, Event] | Exception]) -> None:
        """Take events, in the thread of the reader."""
        self._events.extend(events)
        self._ready.set()


class EngineService:
    """An engine in a thread of its own, which serves streams of any event loop.

    A request's failure is an event of its stream alone; an exception of the engine ends every stream with
    EngineFailed, and `failure` is why.

    Args:
      engine: which nobody else steps from now on.
      observer: is told the times of tokens.
      on_failure: is called once, by the engine's thread, after all streams were told.
    """

    def __init__(
        self,
        engine: Engine,
        observer: ServiceObserver | None = None,
        on_failure: Callable[[], None] | None = None,
    ):
        self.engine = engine
        self.failure: str | None = None
        self._observer, self._on_failure = observer or ServiceObserver(), on_failure
        self._wake = threading.Condition()
        self._listeners: dict[int, _Listener] = {}
        self._finished: deque[int] = deque()
        self._draining = self._closing = False
        self._resting, self._beat = True, time.monotonic()
        self._texts: dict[str | None, TextCounts] = {name: TextCounts() for name in (None, *engine.adapters)}
        self._step_seconds = 0.0
        self._ended, self._between_ends = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_draining(self) -> bool:
        """True once the service takes no more requests."""
        return self._draining

    def stream(
        self,
        requests: Sequence[Request],
        *,
        seeds: Sequence[int],
        priority: int = 0,
        salt: bytes = b"",
        compiled: CompiledGrammar | None = None,
    ) -> EventStream:
        """Submit requests, all of them or none, and return the stream of what happens to them.

        Args:
          seeds: of each.
          priority, salt, compiled: see `Engine.submit`; all requests have one grammar.

        Raises InputError and Full as `Engine.submit` does, EngineFailed, and Draining.
        """
        stream = EventStream(self)
        with self._wake:
            if self.failure:
                raise EngineFailed(self.failure)
            if self._draining:
                raise Draining("the server ends and takes no more requests")
            try:
                for index, (request, seed) in enumerate(zip(requests, seeds, strict=True)):
                    id = self.engine.submit(request, priority=priority, seed=seed, salt=salt, compiled=compiled)
                    stream._open[index] = id
                    self._listeners[id] = _Listener(stream, index, request, time.monotonic())
            except Exception:
                for id in stream._open.values():
                    self.engine.cancel(id)
                    del self._listeners[id]
                raise
            self._wake.notify()
        return stream

    def statistics(self) -> ServiceStatistics:
        """Return the counts of the service so far, and its state now."""
        engine = self.engine
        return ServiceStatistics(
            waiting=engine.waiting,
            running=engine.running,
            pages=len(engine.pages) * sum(count - 1 for count in engine.runner.cache.counts),
            pages_held=engine.pages_held,
            pages_cached=engine.pages_cached,
            texts={name: replace(counts, ended=dict(counts.ended)) for name, counts in self._texts.items()},
            group_hits=engine.group_hits,
            preemptions=engine.preemptions,
            drafted=engine.drafted,
            accepted=engine.accepted,
            steps=engine.steps,
            step_seconds=self._step_seconds,
        )

    def stalled_seconds(self) -> float:
        """Return how long the step under way has taken; 0 while there is nothing to do."""
        return 0.0 if self._resting else time.monotonic() - self._beat

    def retry_after(self) -> int:
        """Return after how many seconds a full queue may take a request: the expected wait of the requests in the
        queue."""
        return min(max(math.ceil(self._between_ends * self.engine.waiting), 1), _LONGEST_WAIT_S)

    async def drain(self, seconds: float) -> None:
        """Take no more requests, and return when all have ended or after so many seconds; requests that are left then
        end with Draining."""
        self._draining = True
        deadline = time.monotonic() + seconds
        while self._listeners and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        with self._wake:
            left = list(self._listeners.items())
            self._listeners.clear()
            for _, listener in left:
                self._counts(listener).ended["cancelled"] += 1
            self._closing = True
            self._wake.notify()
        for id, _ in left:
            self.engine.cancel(id)
        _tell({listener.stream for _, listener in left}, Draining("the server ends; ask again later"))
        await asyncio.to_thread(self._thread.join, _LAST_STEP_S)  # one that hangs does not keep the process

    def _finish(self, id: int) -> None:
        with self._wake:
            if listener := self._listeners.pop(id, None):
                self._count_end(listener, "stop")
                self._finished.append(id)  # the engine's thread alone may end a request early
                self._wake.notify()

    def _cancel(self, ids: Iterable[int]) -> None:
        for id in ids:
            with self._wake:
                if listener := self._listeners.pop(id, None):
                    self._count_end(listener, "cancelled")
            self.engine.cancel(id)

    def _run(self) -> None:
        try:
            while self._has_work():
                while self._finished:
                    self.engine.finish(self._finished.popleft())
                begun = time.monotonic()
                events = self.engine.step()
                self._step_seconds = time.monotonic() - begun
                if events:
                    self._deliver(events)
        except BaseException as error:
            self._fail(error)

    def _has_work(self) -> bool:
        """Wait for something to do. Return False where nothing is left and it closes."""
        with self._wake:
            while self.engine.is_idle and not self._finished and not self._closing:
                self._resting = True
                self._wake.wait()
            self._beat = time.monotonic()
            if self._resting:  # nothing has ended because nothing was asked
                self._ended, self._resting = self._beat, False
            return not (self._closing and self.engine.is_idle)

    def _deliver(self, events: Sequence[Event]) -> None:
        now = time.monotonic()
        events_of: dict[EventStream, list[tuple[int, Event]]] = {}
        with self._wake:
            for event in events:
                listener = self._listeners.get(event.id)
                if listener is None:
                    continue
                if event.scores is None and event.error is None:
                    self._observe(listener, event, now)
                if event.end:
                    del self._listeners[event.id]
                    self._count_end(listener, event.end)
                if not listener.request.hidden:
                    event = event._replace(hidden=None)  # a row, which would keep its whole array
                events_of.setdefault(listener.stream, []).append((listener.index, event))
        loops: dict[asyncio.AbstractEventLoop, list] = {}
        for stream, batch in events_of.items():
            loops.setdefault(stream._loop, []).append((stream, batch))
        for loop, batches in loops.items():
            _call(loop, _put_all, batches)

    def _observe(self, listener: _Listener, event: Event, now: float) -> None:
        seconds, listener.since = now - listener.since, now
        counts = self._counts(listener)
        if listener.has_drawn:
            self._observer.next_token(seconds)
        else:
            listener.has_drawn = True
            self._observer.first_token(seconds)
            counts.prompt_tokens += len(listener.request.prompt)
            counts.cached_tokens += event.cached
        counts.tokens += event.token is not None

    def _counts(self, listener: _Listener) -> TextCounts:
        return self._texts[listener.request.adapter]

    def _count_end(self, listener: _Listener, end: EndReason) -> None:
        self._counts(listener).ended[end] += 1
        now = time.monotonic()
        between, self._ended = now - self._ended, now
        self._between_ends += 0.1 * (min(between, _LONGEST_WAIT_S) - self._between_ends)  # over the last ten or so

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self.failure = f"the engine has failed: {type(error).__name__}: {error}"
            left = list(self._listeners.values())
            self._listeners.clear()
            for listener in left:
                self._counts(listener).ended["error"] += 1
        _tell({listener.stream for listener in left}, EngineFailed(self.failure))
        if self._on_failure:
            self._on_failure()


def _put_all(batches: Iterable[tuple[EventStream, list[tuple[int, Event]]]]) -> None:
    for stream, batch in batches:
        stream._put(batch)


def _tell(streams: Iterable[EventStream], error: Exception) -> None:
    """End streams with an error."""
    for stream in streams:
        _call(stream._loop, stream._put, [error])


def _call(loop: asyncio.AbstractEventLoop, function: Callable, argument: list) -> None:
    """Call a function in the thread of a loop, unless the loop is closed: then nobody reads."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        pass
