"""The inference engine: requests in, tokens out, each step dispatched before the one before it is read."""

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.core.errors import InputError
from jaxlm.inference.acceptance import DraftWorth
from jaxlm.inference.adapters import NamedAdapter, adapter_set, beside
from jaxlm.inference.commands import EngineCommand, encode_commands
from jaxlm.inference.draft_model import DraftModel
from jaxlm.inference.generation import EndReason, Token
from jaxlm.inference.grammar import CompiledGrammar, Grammars
from jaxlm.inference.pages import GroupHit, Pages
from jaxlm.inference.programs import EnginePrograms
from jaxlm.inference.requests import Request, check_biases, check_prompts, check_stop_tokens
from jaxlm.inference.runner import PendingStep, Reading, Runner, Scores
from jaxlm.inference.sampling import NO_TOKEN, NotFinite
from jaxlm.inference.scheduler import NeverFits, Scheduler, StepPlan
from jaxlm.inference.settings import EngineSettings
from jaxlm.inference.step_shapes import TILE
from jaxlm.models.config import ModelConfig
from jaxlm.models.execution_config import Kernels
from jaxlm.models.positions import angle_classes
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.tree import Tree
from jaxlm.parallel.rules import ENGINE


class Event(NamedTuple):
    """One thing that happened to a request.

    Attributes:
      id: of the request.
      token: the token that was drawn; None where no token was drawn, or where the token's id ended the request.
      ended_by: the id that ended the request, if one did.
      end: why the request ended; None while the request goes on.
      error: where `end` is "error": what happened to this request alone.
      hidden: float32 [D], the normalised residual that the token was drawn from, where the request asks for it.
      scores: of tokens of the prompt, as far as the request asks for scores; the scores come in parts, each part before
        the first token that is drawn after that part.
      cached: with a token, how many tokens of the prompt were found in the cache.
    """

    id: int
    token: Token | None = None
    ended_by: int | None = None
    end: EndReason | None = None
    error: InputError | None = None
    hidden: np.ndarray | None = None
    scores: Scores | None = None
    cached: int = 0


class Engine:
    """A model that serves requests together, each as if it were alone.

    `submit` and `cancel` may be called from any thread; `step` belongs to one. A token's logits depend on the tokens of
    its own sequence alone, to the bit on a CPU: not on other requests, on how a prompt is cut into chunks, on prefixes
    that were found in the cache, or on whether it was interrupted (`check` measures it).

    Args:
      parameters: on `mesh`, in the dtype to compute in, but for matrices that are quantised.
      valid_token_mask: bool [V], whether an id has a token; ids without a token are never drawn. None where all ids
        have one.
      stop_token_ids: ids that end every request.
      grammars: of the model's tokens; None where requests have no grammars.
      kernels: `execution.kernels`.
      draft: draws the drafts of `settings.speculation`, unless they are looked up.
      quantized: the form of the matrices of layers; None where they are in the dtype to compute in.
      adapters: that requests may ask for by name, of matrices that may have one (`jaxlm.models.tree.targets`).

    Raises InputError for a model, a page or adapters that the engine cannot serve.
    """

    def __init__(
        self,
        model: ModelConfig,
        parameters: Tree,
        mesh: Mesh,
        settings: EngineSettings = EngineSettings(),
        *,
        valid_token_mask: np.ndarray | None = None,
        stop_token_ids: Collection[int] = (),
        grammars: Grammars | None = None,
        kernels: Kernels = "auto",
        draft: DraftModel | None = None,
        quantized: Quantization | None = None,
        adapters: Sequence[NamedAdapter] = (),
    ):
        self.model, self.settings, self._stop_token_ids = model, settings, frozenset(stop_token_ids)
        if (settings.drafts > 0 and not settings.looks_up) != (draft is not None):
            raise InputError("a draft model is given exactly where speculation has a source other than ngram")
        self.grammars = grammars
        dtype, sizes = parameters["embedding"].dtype, adapter_set(model, adapters)
        programs = EnginePrograms.of(model, mesh, dtype, settings, kernels, quantized, sizes)
        self.adapters = [adapter.name for adapter in adapters]
        self.runner = Runner(
            programs,
            beside(model, parameters, adapters, sizes, mesh, ENGINE, dtype, quantized),
            valid_token_mask=valid_token_mask,
            context=settings.context,
            cache_bytes=settings.cache_bytes,
            draft=draft,
            adapters=self.adapters,
        )
        groups = self.runner.page_groups(settings.states_every)
        self.pages = [Pages(groups, settings.page) for _ in range(programs.shards)]
        self._worth = DraftWorth(programs.shapes.decode, jax.process_count() == 1) if settings.drafts else None
        self._scheduler = Scheduler(
            self.pages,
            slots=programs.slots,
            chunk_tokens=self.runner.chunk_tokens,
            tile=TILE,
            max_queued=settings.max_queued,
            max_queued_tokens=settings.max_queued_tokens,
            max_context=self.longest,
            drafts=settings.drafts,
            worth=self._worth,
            steps_of=self.runner.steps_of,
        )
        self._lock = threading.Lock()
        self.steps = 0  # dispatched, each of those of one dispatch
        self._read_at = 0.0  # when the last step was read, if another one was under way
        self._ahead: PendingStep | None = None
        self._commands: list[EngineCommand] = []  # not sent to the other processes yet
        self._tell: Callable[[str], None] | None = None
        self._kept: list[Event] = []  # of requests that no call of `answers` has waited for yet

    @property
    def is_idle(self) -> bool:
        """True while nothing waits, runs or is to be read."""
        return self._ahead is None and not self.waiting and not self.running

    @property
    def longest(self) -> int:
        """The most tokens of a sequence."""
        return self.runner.cache.context

    @property
    def waiting(self) -> int:
        """The requests that wait."""
        return self._scheduler.waiting

    @property
    def running(self) -> int:
        """The requests that are under way."""
        return self._scheduler.admitted

    @property
    def pages_held(self) -> int:
        """The pages of all groups and shards that requests hold."""
        return sum(sum(pages.held) for pages in self.pages)

    @property
    def pages_cached(self) -> int:
        """The pages of all groups and shards that nobody holds and that may be found again."""
        return sum(sum(pages.cached) for pages in self.pages)

    @property
    def group_hits(self) -> dict[str, GroupHit]:
        """By the name of each group of pages (`PageLayout.names`), the tokens of prompts that it had, and that it alone
        lacked, when requests began."""
        return dict(zip(self.runner.programs.layout.names, self._scheduler.hits, strict=True))

    @property
    def preemptions(self) -> int:
        """The times that a request lost its pages to others, to be read again."""
        return self._scheduler.preemptions

    @property
    def drafted(self) -> int:
        """The drafts that steps have read."""
        return self._scheduler.drafted

    @property
    def accepted(self) -> int:
        """The drafts that were drawn in their places."""
        return self._scheduler.accepted

    def warm(self, scores: bool = False) -> None:
        """Compile all programs before the first request."""
        self.runner.warm(scores, masks=self.grammars is not None)

    def check(self) -> bool:
        """Return whether texts are computed in one way by all programs, alone and beside others, to the bit. To be
        called before requests."""
        return self.runner.check()

    def submit(
        self,
        request: Request,
        *,
        priority: int = 0,
        seed: int = 0,
        salt: bytes = b"",
        compiled: CompiledGrammar | None = None,
    ) -> int:
        """Put a request into the queue and return its id.

        Args:
          priority: smaller is sooner.
          seed: of the random numbers, of which the request takes its stream.
          salt: prefixes of prompts are shared under one salt alone.
          compiled: the request's grammar; it is compiled here where it is not given.

        Raises InputError as `check_prompts`, `check_biases`, `check_stop_tokens`, `Grammars.compile` and
        `Grammars.matcher` do, for an adapter that is not there, and where `min_tokens` bars more ids than a row keeps;
        `scheduler.NeverFits` if it could not run alone, and `scheduler.Full` if too many wait.
        """
        check_prompts(self.model, [request.prompt], request.max_tokens)
        check_biases(self.model, request.sampling)
        check_stop_tokens(self.model, request.stop_token_ids)
        matcher = None
        if request.grammar is not None:
            if self.grammars is None:
                raise InputError("a grammar is of texts, and the model has no tokenizer; leave the grammar out")
            ends = request.ending_ids(self._stop_token_ids)
            compiled = compiled or self.grammars.compile(request.grammar)
            matcher = self.grammars.matcher(compiled, ends, request.min_tokens)
        if request.adapter is not None and request.adapter not in self.adapters:
            raise InputError(f"there is no adapter {request.adapter!r}; take {', '.join(self.adapters) or 'none'}")
        # Where rotary angles depend on the length of a sequence, keys are shared within one class of lengths; and
        # always within one adapter.
        adapter = 0 if request.adapter is None else 1 + self.adapters.index(request.adapter)
        classes = np.array([adapter, *angle_classes(self.model, request.most_tokens)], np.int64)
        key_salt = classes.tobytes() + salt
        with self._lock:
            id = self._scheduler.submit(
                request,
                priority=priority,
                seed=seed,
                salt=key_salt,
                stop_token_ids=self._stop_token_ids,
                matcher=matcher,
            ).id
            if self._tell is not None:
                self._commands.append(EngineCommand("submit", id, request, priority, seed, salt.hex()))
            return id

    def cancel(self, id: int) -> None:
        """End a request that nobody waits for, without an event; an unknown request, or a request that has
        ended, is left alone."""
        self._end("cancel", id)

    def finish(self, id: int) -> None:
        """End a request whose text has met a stop string, without an event."""
        self._end("finish", id)

    def tell(self, send: Callable[[str], None]) -> None:
        """Send this engine's commands before each step, for engines that follow it (`leader.follow`). `cancel` and
        `finish` then wait for the next step, so that all processes end a request at the same step."""
        self._tell = send

    def _end(self, method: Literal["cancel", "finish"], id: int) -> None:
        with self._lock:
            self._kept = [event for event in self._kept if event.id != id]  # of tokens after those that were read
            if self._tell is None:
                getattr(self._scheduler, method)(id)
            elif id in self._scheduler.live:
                self._commands.append(EngineCommand(method, id))

    def _tell_others(self) -> None:
        """Send the commands since the last step, after cancelling and finishing the requests that they end."""
        if self._tell is not None:
            commands, self._commands = self._commands, []
            for each in commands:
                if each.method != "submit":
                    getattr(self._scheduler, each.method)(each.id)
            self._tell(encode_commands(commands))

    def step(self) -> list[Event]:
        """Dispatch the next step, read the one before it, and return what happened: nothing where all is idle."""
        with self._lock:
            self._tell_others()
            plan = self._scheduler.plan()
            events = [Event(failed.id, end="error", error=_no_room()) for failed in self._scheduler.failed()]
        # A generation that is cancelled meanwhile has its rows computed and dropped.
        done, late = self._ahead, None
        self._ahead = None
        if done is None:
            self._read_at = time.monotonic()
        self.steps += 0 if plan is None else plan.steps
        if plan is not None and plan.steps > 1:
            self._ahead = self.runner.run(plan)
        elif plan is not None:
            begun = self.runner.begin(plan)
            # Where a grammar waits for the draw before, tokens are drawn behind it, while the devices read the rows.
            if any(generation.awaits_draw for generation in plan.draws):
                late = begun
            else:
                self._ahead = self.runner.draw(begun)
        if done is None:
            return events
        reading = self.runner.read(done)
        self._note_time(done, is_followed=plan is not None)
        with self._lock:
            for chunk in done.plan.chunks:
                if chunk.scored and not chunk.generation.end:
                    events.append(Event(chunk.generation.id, scores=reading.scores[chunk.generation.id]))
            events += self._committed(done.plan, reading)
        if late is not None:
            self._ahead = self.runner.draw(late)
        return events

    def _note_time(self, done: PendingStep, is_followed: bool) -> None:
        """Measure a step that was read now, from when the step before it was read, or else from when it was planned."""
        began, self._read_at = self._read_at, time.monotonic() if is_followed else 0.0
        shape = done.shape
        if self._worth and began and not shape.tiles:
            self._worth.note(shape.decode, time.monotonic() - began)

    def _committed(self, plan: StepPlan, reading: Reading) -> Iterator[Event]:
        """Commit the draws of a step, and yield the events of the tokens."""
        ids = {id: [token.id for token in tokens] for id, tokens in reading.tokens.items()}
        drawn = {id: [*itertools.takewhile(NO_TOKEN.__ne__, some)] for id, some in ids.items()}
        for generation, count in self._scheduler.commit(plan, drawn, reading.foreseen):
            id, left = generation.id, count
            hidden_ND = reading.hidden.get(id)
            for n, token in enumerate(reading.tokens[id][:count]):
                left -= 1
                has_ended = token.id in generation.stop_token_ids
                yield Event(
                    id,
                    None if has_ended else token,
                    token.id if has_ended else None,
                    None if left else generation.end,
                    generation.matcher.error if generation.matcher and generation.end == "error" else None,
                    hidden=None if hidden_ND is None else hidden_ND[n],
                    cached=generation.cached,
                )
        for generation in plan.draws:
            if NO_TOKEN in ids[generation.id] and not generation.end:
                self._scheduler.cancel(generation.id)
                yield Event(generation.id, end="error", error=NotFinite())

    def run(self) -> Iterator[Event]:
        """Yield what happens until all requests have ended."""
        while not self.is_idle:
            yield from self.step()

    def answers(self, ids: Collection[int]) -> Iterator[Event]:
        """Yield what happens to some requests until these have ended, and keep the events of other requests for other
        calls.

        Requests that have not ended when the iterator is closed are cancelled.
        """
        waiting = set(ids)
        try:
            while waiting:
                at = next((at for at, event in enumerate(self._kept) if event.id in waiting), None)
                if at is None:
                    waiting &= self._scheduler.live  # a request that is cancelled or finished has no event
                    self._kept += self.step()
                    continue
                event = self._kept.pop(at)
                if event.end:
                    waiting.discard(event.id)
                yield event
        finally:
            for id in waiting:
                self.cancel(id)
            self._kept = [event for event in self._kept if event.id not in waiting]


def _no_room() -> NeverFits:
    return NeverFits("the cache has no room for it to go on, even alone")
