"""The training loop: steps, and between them records, evaluations and checkpoints."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.core import collector
from jaxlm.core.errors import RunFailed
from jaxlm.data.dataset import Dataset
from jaxlm.data.loader import training_batches
from jaxlm.data.packing import PreferenceRows, rows_of
from jaxlm.models.tree import Tree, joined, placed
from jaxlm.parallel.batches import process_rows, put_batch
from jaxlm.parallel.processes import StopConsensus, barrier, failing_as_one, first_process_first, is_first
from jaxlm.training import checkpoints, manifests, memory_copies, references
from jaxlm.training.checkpoints import Checkpoints, bytes_of, items_of
from jaxlm.training.config import RunConfig
from jaxlm.training.display import Display
from jaxlm.training.environment import memory_use
from jaxlm.training.evaluation import Evaluation, evaluate_sources
from jaxlm.training.goodput import DATA, DATA_WAIT, DEVICE, HOST, Attempts, Clock, ThroughputMeter
from jaxlm.training.interrupt import OUT_OF_TIME, StopRequest
from jaxlm.training.memory_copies import MemoryCopies
from jaxlm.training.paths import RunPaths
from jaxlm.training.profile import Profiler
from jaxlm.training.recorder import Recorder
from jaxlm.training.state import TrainState
from jaxlm.training.step import TrainPrograms, TrainStep

# Metrics of a step that a line of metrics.jsonl names otherwise, or not; all others it has.
_NAMED = frozenset(("loss", "grad_norm", "learning_rate", "tokens", "learned_tokens", "skipped", "skipped_in_a_row"))
# For what comes behind the last checkpoint.
_END_S = 2.0


class Diverged(RunFailed):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The context of one attempt of a run.

    Attributes:
      profiler: traces the steps that are to be traced.
      trains_from: called with the number of this attempt's first step, once that step is trained.
      weights: returns the float32 parameters that a new run begins with, or None to draw them from the run's seed; with
        adapters, the weights that the adapters adapt, in the dtype of the computation.
    """

    clock: Clock
    display: Display
    profiler: Profiler
    stop: StopRequest
    trains_from: Callable[[int], None]
    weights: Callable[[], Tree | None] = lambda: None


class Result(NamedTuple):
    """The end of a run: its step, its parameters with those of a base, and the reason (`interrupt.named`) if it stopped
    early."""

    step: int
    parameters: Tree
    reason: int


class Trainer:
    """A run from its newest whole checkpoint, or from the start, to `training.steps`.

    Writes metrics (`Recorder`), the seconds of this attempt and checkpoints into RUN. `mfu` gives the MFU of a step
    from the step's seconds, or None if the peak is unknown.
    """

    def __init__(
        self,
        settings: RunConfig,
        dataset: Dataset,
        mesh: Mesh,
        paths: RunPaths,
        mfu: Callable[[float], float | None],
        start: Start,
    ):
        self._settings, self._mesh, self._paths, self._mfu = settings, mesh, paths, mfu
        assert settings.training.steps is not None  # `jaxlm.config.experiment.with_steps` where epochs were given
        self._last = settings.training.steps
        self._training, self._evaluation, self._checkpoint = settings.training, settings.evaluation, settings.checkpoint
        self._norms_every = settings.records.norms_every
        self._clock, self._display, self._profiler = start.clock, start.display, start.profiler
        self._stop, self._trains_from, self._weights = start.stop, start.trains_from, start.weights
        sequence, sources = self._training.sequence, dataset.sources
        with first_process_first("packing"):
            self._rows = [(rows_of(source.train, sequence), source.weight) for source in sources.values()]
            self._held_out_rows = {name: rows_of(source.held_out, sequence) for name, source in sources.items()}
        self._epoch_rows = sum(len(rows) for rows, _ in self._rows)
        one_document = all(rows.is_one_document for rows, _ in self._rows)
        if one_document:
            start.display.say("each row is a piece of one document: attention's mask is known before tracing")
        self._step = TrainStep.of(settings, mesh, one_document)
        self._programs = self._step.jitted(mesh)

        self._shapes = jax.eval_shape(self._step.init)._replace(base={}, working=None)
        self._state_bytes = bytes_of(self._shapes)
        self._consensus = StopConsensus(mesh)
        self._throughput = ThroughputMeter(self._clock)
        self._previous: tuple[int, dict[str, jax.Array]] | None = None

    def train(self) -> Result:
        """Train to the last step. A signal, or the end of the time given, ends it after the step in progress or in the
        midst of an evaluation, with a checkpoint.

        Raises Diverged and Unsaved; what was saved until then stays. Raises Stopped for a signal before the first step.
        """
        with self._clock.phase("restoring"):
            on_disk = manifests.resume_from(self._paths.checkpoints, self._display.say)
            in_memory = self._find_copies(on_disk)
        step = on_disk if in_memory is None else in_memory
        self._profiler.resume(step or 0)
        self._attempts = Attempts(self._paths.goodput, self._clock, step or 0)
        described = self._settings.model_dump(mode="json")
        with (
            ExitStack() as self._noting,  # to the very end: there is something to lose until all is written
            jax.set_mesh(self._mesh),
            Checkpoints(self._paths.checkpoints, self._checkpoint.keep, self._state_bytes) as self._saved,
            Recorder(self._paths, self._settings.records, step or 0, described) as self._recorder,
            failing_as_one(),  # here too: closing checkpoints waits for the others
        ):
            try:
                result = self._continue(step or 0, self._initial_state(on_disk, in_memory))
                if self._copies is not None:
                    self._copies.clear()
                return result
            finally:
                self._profiler.close()
                with self._clock.phase("checkpoint"):
                    self._saved.wait()
                self._attempts.write(now=True)

    def _like(self) -> TrainState:
        """Return the shapes of the state that a checkpoint has, laid out on the mesh."""
        return placed(self._shapes, self._step.shardings(self._mesh)._replace(base={}, working=None))

    def _find_copies(self, on_disk: int | None) -> int | None:
        """Return the step of the copy in memory that is newer than all checkpoints; None without one."""
        self._copies: MemoryCopies | None = None
        if self._checkpoint.memory_every is None:
            memory_copies.forget(self._paths)
            return None
        folder = Path(self._checkpoint.memory_folder)
        self._copies = MemoryCopies(folder, self._paths, items_of(self._like()), self._mesh)
        return self._copies.find(on_disk or 0)

    def _initial_state(self, on_disk: int | None, in_memory: int | None) -> TrainState:
        newest = on_disk if in_memory is None else in_memory
        if newest is None:
            with self._clock.phase("restoring"):
                weights = self._weights()
            with self._clock.phase("compilation"):
                initial = self._programs.init() if weights is None else self._programs.begin(weights)
            self._find_references(initial)
            return initial
        self._display.say(f"resuming from step {newest}{', which is in memory' if newest == in_memory else ''}")
        self._find_references(None)
        with self._clock.phase("restoring"):
            if self._copies is not None and in_memory is not None:
                restored = checkpoints.state_of(self._copies.restore())
            else:
                restored = checkpoints.restore_state(self._paths.checkpoints, newest, self._like())
            if self._settings.lora is not None:
                restored = restored._replace(base=self._weights())
            return self._programs.resume(restored)

    def _find_references(self, initial: TrainState | None) -> None:
        """Read the first model's log-probabilities of the preferences, or compute and keep them."""
        trained = zip(self._held_out_rows, [rows for rows, _ in self._rows], strict=True)
        sides = [*(("training", *named) for named in trained), *(("held-out", *n) for n in self._held_out_rows.items())]
        pairs = [(side, name, rows) for side, name, rows in sides if isinstance(rows, PreferenceRows)]
        for side, name, rows in pairs:
            kept = self._paths.reference / f"{name}-{side}.npy"
            if initial is None:
                rows.reference = references.read(kept, len(rows))
                continue
            with self._clock.phase("reference"):
                batch, logprobs = self._training.batch, self._programs.preference_logprobs
                self._display.say(f"log-probabilities of {len(rows):,} {side} pairs of {name} under the first model")
                first = joined(initial.parameters, initial.base)
                rows.reference = references.compute(logprobs, first, rows, batch, self._mesh, self._display.say)
                if is_first():
                    references.write(kept, rows.reference)

    def _continue(self, step: int, state: TrainState) -> Result:
        training, last, self._first = self._training, self._last, step + 1
        # An evaluation that was interrupted comes first.
        due = step > 0 and self._evaluates_at(step) and not self._recorder.holds("evaluation", step)
        if step >= last and not due:
            return Result(step, joined(state.parameters, state.base), 0)

        share = process_rows(training.batch, self._mesh)
        batches = training_batches(self._rows, training.batch, training.seed, start=step, share=share)
        batch = put_batch(next(batches), self._mesh)
        self._saved.check_room(self._state_bytes)
        programs = self._compile(state, batch)

        self._noting.enter_context(self._stop.noted())
        with self._clock.phase(HOST):
            self._propose()
            if due:
                compared = self._evaluate(step, programs, state)
                with self._clock.phase("checkpoint"):
                    self._saved.note(step, compared)
            self._display.begin(step, last)
            self._throughput.restart()
            collector.begin_as_usual()
            while step < last and not self._consensus.result():
                if self._norms_every and (step + 1) % self._norms_every == 0:
                    self._look_at_previous()
                    self._norms(step + 1, programs, state, batch)
                self._profiler.before(step + 1, self._look_at_previous)
                with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
                    state, metrics = programs.train(state, batch)
                step += 1
                if self._moves_outer(step):
                    state = programs.outer(state)
                self._propose()
                # The next batch travels while this step runs; only then is the step before it looked at.
                batch = self._next_batch(batches, running=metrics["loss"])
                self._look_at_previous()
                self._previous = step, metrics

                evaluating, saving = self._evaluates_at(step), step == last or step % self._checkpoint.every == 0
                copying = self._checkpoint.memory_every is not None and step % self._checkpoint.memory_every == 0
                if evaluating or saving or copying:
                    self._look_at_previous()
                if copying:
                    self._copy(state)
                compared = self._evaluate(step, programs, state) if evaluating else None
                if saving:
                    self._save(state, compared)

            self._look_at_previous()
            if step < last:
                self._save(state, None)
            with self._clock.phase("checkpoint"):
                self._saved.wait()
            if step >= last and self._recorder.holds("evaluation", step):  # hours were enough, but a signal may be new
                reason = self._stop.reason()
                self._consensus.propose(0 if reason == OUT_OF_TIME else reason)
            return Result(step, joined(state.parameters, state.base), self._consensus.result())

    def _compile(self, state: TrainState, batch: dict[str, jax.Array]) -> TrainPrograms:
        """Everything before the first step: until then there is nothing to lose."""
        began = time.perf_counter()
        self._display.say("compiling the training step")
        with self._clock.phase("compilation"):
            compiled = self._programs._replace(
                train=self._programs.train.lower(state, batch).compile(),
                evaluate=self._programs.evaluate.lower(joined(state.parameters, state.base), batch).compile(),
            )
            if self._training.local_sgd is not None:
                compiled = compiled._replace(outer=compiled.outer.lower(state).compile())
            if self._norms_every:
                compiled = compiled._replace(norms=compiled.norms.lower(state, batch).compile())
            barrier("compiled")
        self._display.say(f"compiled in {time.perf_counter() - began:.1f} s")
        return compiled

    def _propose(self) -> None:
        """Return this process's reason to stop, early enough to finish the step in progress and write a checkpoint."""
        saving_s = self._saved.expected_s(self._state_bytes)
        self._consensus.propose(self._stop.reason(ahead_s=3 * self._throughput.longest_s + saving_s + _END_S))

    def _goes_on(self) -> bool:
        stopping = self._consensus.result()
        self._propose()
        return not stopping

    def _next_batch(self, batches: Iterator, running: jax.Array) -> dict[str, jax.Array]:
        began = time.perf_counter()
        with self._clock.phase(DATA):
            host = next(batches)
        if running.is_ready():  # the device stood still meanwhile
            self._clock.move(time.perf_counter() - began, DATA, DATA_WAIT)
        return put_batch(host, self._mesh)

    def _look_at_previous(self) -> None:
        """Wait for the results of the previous step, and record them if a record is due."""
        if self._previous is None:
            return
        (step, arrays), self._previous = self._previous, None
        with self._clock.phase(DEVICE):
            metrics = to_host(arrays)
        if step == self._first:
            self._trains_from(step)
        self._throughput.add(int(metrics["tokens"]), int(metrics["learned_tokens"]))
        self._attempts.write(step)
        in_a_row = int(metrics["skipped_in_a_row"])
        row = None
        if step == 1 or step % self._training.log_every == 0 or step == self._last:
            rates = self._throughput.rates()
            row = {
                "step": step,
                "loss": _finite(metrics["loss"]),
                "epoch": step * self._training.batch / self._epoch_rows,
                **rates,
                "mfu": self._mfu(rates["step_s"]),
                "grad_norm": _finite(metrics["grad_norm"]),
                "learning_rate": _finite(metrics["learning_rate"]),
                **{name: _finite(value) for name, value in metrics.items() if name not in _NAMED},
                "skipped": int(metrics["skipped"]),
                **memory_use(self._mesh.local_devices),
            }
            self._recorder.write("train", row)
            self._throughput.restart()
        self._display.advance(step, row)
        if in_a_row >= self._training.max_skipped_in_a_row:
            wider = "" if self._settings.execution.dtype == "float32" else ", or set execution.dtype=float32"
            raise Diverged(
                f"the loss or gradient of steps {step - in_a_row + 1} to {step} was not finite, and their updates were "
                f"skipped; lower optimizer.learning_rate or optimizer.clip_norm{wider}"
            )

    def _moves_outer(self, step: int) -> bool:
        """Return whether replicas meet after a step: after each period, and after the last step."""
        settings = self._training.local_sgd
        return settings is not None and (step >= self._last or step % settings.period == 0)

    def _evaluates_at(self, step: int) -> bool:
        return step >= self._last or step % self._evaluation.every == 0

    def _evaluate(self, step: int, programs: TrainPrograms, state: TrainState) -> float | None:
        """Record the held-out loss, at the end on more rows. Returns what the checkpoints of a run are compared by, the
        loss on the rows of every evaluation; None where it is not finite, or the run is to stop before."""
        few, tokens = self._evaluation.batches, self._training.batch * self._training.sequence
        limit = math.ceil(self._evaluation.final_tokens / tokens) if step >= self._last else few

        def held_out(parameters: Tree, limit: int) -> Evaluation | None:
            rows, batch, whole = self._held_out_rows, self._training.batch, joined(parameters, state.base)
            return evaluate_sources(programs.evaluate, whole, rows, batch, self._mesh, limit, self._goes_on)

        with self._clock.phase("evaluation"):
            measured = held_out(state.parameters, limit)
            of_average = held_out(state.average, limit) if measured and state.average is not None else None
            compared = held_out(state.parameters, few) if measured and limit != few else measured
        if measured is None or compared is None or (state.average is not None and of_average is None):
            return None
        row = {"step": step, **measured.row()}
        said = f"step {step}: held-out loss {measured.loss:.4f}"
        if of_average is not None:
            row["ema_loss"] = _finite(of_average.loss)
            said += f", of the averaged weights {of_average.loss:.4f}"
        self._recorder.write("evaluation", row)
        self._display.say(said)
        return _finite(compared.loss)

    def _norms(self, step: int, programs: TrainPrograms, state: TrainState, batch: dict[str, jax.Array]) -> None:
        with self._clock.phase("norms"):
            norms = jax.device_get(programs.norms(state, batch))
        self._recorder.write("norms", {"step": step, **jax.tree.map(_finite_list, norms)})

    def _save(self, state: TrainState, held_out_loss: float | None) -> None:
        self._recorder.flush()  # a start that resumes here writes only what comes after
        with self._clock.phase("checkpoint"):
            self._saved.save(state, held_out_loss)

    def _copy(self, state: TrainState) -> None:
        """Keep a copy in memory, whole before the next step: then a loss undoes no more steps than lie between two."""
        assert self._copies is not None
        self._recorder.flush()
        with self._clock.phase("memory_copy"):
            self._copies.save(int(state.step), items_of(state))


def to_host(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """`jax.device_get`, at a fifth of its cost for a few numbers: that of each step."""
    for array in arrays.values():
        array.copy_to_host_async()
    return {name: np.asarray(array) for name, array in arrays.items()}


def _finite(x: Any) -> float | None:
    """A number that JSON can hold; None for infinities and NaN."""
    return float(x) if math.isfinite(x) else None


def _finite_list(x: np.ndarray) -> Any:
    return _finite(x) if x.ndim == 0 else [_finite(y) for y in x]
