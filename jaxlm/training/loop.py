"""The training loop: steps, and between them records, evaluations and checkpoints."""

import math
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from jaxlm import sharding
from jaxlm.data.dataset import Dataset
from jaxlm.data.loader import training_batches
from jaxlm.data.packing import Rows
from jaxlm.distributed import Agreement, ending_when_one_is_lost, is_first
from jaxlm.models.config import ModelConfig
from jaxlm.models.tree import Tree
from jaxlm.training import checkpoints
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.config import CheckpointConfig, EvaluationConfig, OptimizerConfig, TrainingConfig
from jaxlm.training.evaluation import Evaluation, evaluate_sources
from jaxlm.training.interrupt import StopRequest
from jaxlm.training.records import JsonLines
from jaxlm.training.step import TrainState, jit_steps, make_steps


class Diverged(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class Display(Protocol):
    """What the loop tells whoever watches."""

    def say(self, line: str) -> None:
        """Something happened."""

    def advance(self, step: int, metrics: dict[str, Any] | None) -> None:
        """`step` steps are done; metrics come with those that are recorded."""


class Result(NamedTuple):
    """How a run ended: at which step, with which parameters, and by which signal if one stopped it."""

    step: int
    parameters: Tree
    signal: signal.Signals | None


class Trainer:
    """A run from its newest whole checkpoint, or from the start, to `training.steps`.

    Writes `metrics.jsonl` and `evaluations.jsonl` (lines with their `step`) and `checkpoints/` into RUN.
    """

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        optimization: OptimizerConfig,
        evaluation: EvaluationConfig,
        checkpoint: CheckpointConfig,
        dataset: Dataset,
        mesh: Mesh,
        run: Path,
        display: Display,
    ):
        self._training, self._evaluation, self._checkpoint = training, evaluation, checkpoint
        self._mesh, self._display = mesh, display
        sources = dataset.sources
        self._rows = [(Rows(source.train, training.sequence), source.weight) for source in sources.values()]
        self._held_out_rows = {name: Rows(source.held_out, training.sequence) for name, source in sources.items()}
        self._steps = make_steps(model, training, optimization)
        self._compiled = jit_steps(self._steps, mesh)
        self._metrics = JsonLines(run / "metrics.jsonl")
        self._evaluations = JsonLines(run / "evaluations.jsonl")
        self._directory = run / "checkpoints"
        self._window = _Window()
        self._previous: tuple[int, dict[str, jax.Array]] | None = None

    def train(self) -> Result:
        """Train to the last step. A signal ends it after the step in progress, with a checkpoint.

        Raises Diverged; what was saved until then stays.
        """
        newest = checkpoints.resume_from(self._directory, self._display.say)
        with (
            StopRequest() as stop,
            jax.set_mesh(self._mesh),
            Checkpoints(self._directory, self._checkpoint.keep) as saved,
            ending_when_one_is_lost(),
        ):
            state = self._start(newest)
            return self._continue(newest or 0, state, saved, stop)

    def _continue(self, step: int, state: TrainState, saved: Checkpoints, stop: StopRequest) -> Result:
        training, last = self._training, self._training.steps
        if step >= last:
            return Result(step, state.parameters, None)

        share = sharding.process_rows(training.batch, self._mesh)
        batches = training_batches(self._rows, training.batch, training.seed, start=step, share=share)
        batch = sharding.put_batch(next(batches), self._mesh)
        began = time.perf_counter()
        self._display.say("compiling the training step")
        train_step = self._compiled.train.lower(state, batch).compile()
        self._display.say(f"compiled in {time.perf_counter() - began:.1f} s")

        self._window.restart()
        agreement = Agreement(self._mesh)
        while step < last and not agreement.settled():
            state, metrics = train_step(state, batch)
            step += 1
            agreement.propose(stop.signal or 0)
            # The next batch travels while this step runs; only then is the step before it looked at.
            batch = sharding.put_batch(next(batches), self._mesh)
            self._look_at_previous()
            self._previous = step, metrics

            ending = step == last
            evaluating = ending or step % self._evaluation.every == 0
            saving = ending or step % self._checkpoint.every == 0
            if evaluating or saving:
                self._look_at_previous()
            measured = None
            if evaluating:
                limit = None if ending else self._evaluation.batches
                measured = self._evaluate(step, state, limit)
            if saving:
                saved.save(state, measured and _finite(measured.loss))
            if evaluating or saving:
                self._window.restart()

        self._look_at_previous()
        if step < last:
            saved.save(state, None)
        return Result(step, state.parameters, signal.Signals(agreement.settled()) if step < last else None)

    def _start(self, newest: int | None) -> TrainState:
        if is_first():
            for file in (self._metrics, self._evaluations):
                file.cut_after(newest or 0)
        if newest is None:
            return self._compiled.init()
        self._display.say(f"resuming from step {newest}")
        like = checkpoints.shaped(jax.eval_shape(self._steps.init), self._steps.shardings(self._mesh))
        return checkpoints.restore_state(self._directory, newest, like)

    def _look_at_previous(self) -> None:
        """Wait for the last step that was not looked at, and record it where it is due."""
        if self._previous is None:
            return
        (step, arrays), self._previous = self._previous, None
        metrics = jax.device_get(arrays)
        self._window.add(int(metrics["tokens"]))
        in_a_row = int(metrics["skipped_in_a_row"])
        row = None
        if step == 1 or step % self._training.log_every == 0 or step == self._training.steps:
            row = {
                "step": step,
                "loss": _finite(metrics["loss"]),
                **self._window.rates(),
                "mfu": None,  # needs the peak of the chip
                "grad_norm": _finite(metrics["grad_norm"]),
                "learning_rate": float(metrics["learning_rate"]),
                **{name: _finite(metrics[name]) for name in ("z_loss",) if name in metrics},
                "skipped": int(metrics["skipped"]),
            }
            self._metrics.append(row)
            self._window.restart()
        self._display.advance(step, row)
        if in_a_row >= self._training.max_skipped_in_a_row:
            raise Diverged(
                f"the loss or gradient of steps {step - in_a_row + 1} to {step} was not finite, and their updates were "
                "skipped; lower optimizer.learning_rate or optimizer.clip_norm, or set training.dtype=float32"
            )

    def _evaluate(self, step: int, state: TrainState, limit: int | None) -> Evaluation:
        def held_out(parameters: Tree) -> Evaluation:
            rows, batch = self._held_out_rows, self._training.batch
            return evaluate_sources(self._compiled.evaluate, parameters, rows, batch, self._mesh, limit)

        measured = held_out(state.parameters)
        row = {"step": step, **measured.row()}
        said = f"step {step}: held-out loss {measured.loss:.4f}"
        if state.average is not None:
            of_average = held_out(state.average)
            row["ema_loss"] = _finite(of_average.loss)
            said += f", of the averaged weights {of_average.loss:.4f}"
        self._evaluations.append(row)
        self._display.say(said)
        return measured


class _Window:
    """Time and tokens since the last line of metrics, without what was done between steps."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._began, self._steps, self._tokens = time.perf_counter(), 0, 0

    def add(self, tokens: int) -> None:
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens

    def rates(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._began
        return {"step_s": seconds / self._steps, "tokens_per_s": self._tokens / seconds}


def _finite(x: Any) -> float | None:
    """A number that JSON can hold; None for infinities and NaN."""
    return float(x) if math.isfinite(x) else None
