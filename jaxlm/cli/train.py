"""Train a model as a TOML file says; started again, it resumes where it left off."""

import argparse
import json
import math
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm.cli.paths import path
from jaxlm.core.errors import RunFailed

if TYPE_CHECKING:
    from jaxlm.training.ladder import Counted
    from jaxlm.training.paths import RunPaths

# Of a digest, to tell it from others.
_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=path, metavar="CONFIG", help="a TOML file, such as configs/quickstart.toml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as training.steps=100")
    parser.add_argument("--out", type=path, metavar="RUN", help="folder of the run (runs/<name of CONFIG>)")
    parser.add_argument("--profile", metavar="START:STOP", help="trace the steps from START to before STOP, for XProf")
    parser.add_argument(
        "--max-hours", type=float, metavar="X", help="stop with a checkpoint before this start has lasted X hours"
    )
    parser.add_argument(
        "--process",
        metavar="INDEX/COUNT@HOST:PORT",
        help="which process of a job this is, and where process 0 listens (Slurm, Open MPI and Cloud TPU say so)",
    )


def main(arguments: argparse.Namespace) -> int:
    from jaxlm import config
    from jaxlm.core import output
    from jaxlm.parallel import processes
    from jaxlm.run import Run
    from jaxlm.training import profile, sinks
    from jaxlm.training.environment import versions
    from jaxlm.training.goodput import Clock
    from jaxlm.training.interrupt import Stopped, StopRequest

    clock = Clock()
    experiment = config.load(arguments.config, arguments.overrides)
    traced = spec = None
    if arguments.profile is not None:
        traced = profile.ProfiledSteps.parse(arguments.profile).check(experiment.training.steps)
    if arguments.process is not None:
        spec = processes.ProcessSpec.parse(arguments.process)
    sinks.check_installed(experiment.records.wandb_project)
    run = Run(arguments.out or Path("runs") / arguments.config.stem)
    run.check(experiment)
    end = _End(run.paths, arguments.json)
    stop = StopRequest(end.early, arguments.max_hours)
    with output.ignoring_closed_output(), processes.failing_as_one(), stop:
        try:
            run.check_free()
            processes.join(spec)
            # Each computes its part of a step by its own: with others the replicas drift apart, or wait for ever.
            processes.check_same("versions", versions("jaxlm", "jax", "jaxlib"), "install the same for all")
            settings = {"COUNT": processes.process_count(), **experiment.model_dump(mode="json")}
            processes.check_same("settings", settings, "start all with the same CONFIG, key=value and COUNT")
            if processes.is_first():
                run.claim()
            return _train(experiment, run, traced, stop, clock, end)
        except Stopped as stopped:
            status = end.early(stopped.reason)
            os._exit(status)  # a compiler may still be at work in its threads, and would be waited for


def _train(experiment, run, traced, stop, clock, end) -> int:
    from jaxlm import config
    from jaxlm.cli.progress import Bar
    from jaxlm.data.dataset import prepare
    from jaxlm.parallel import processes

    with Bar(experiment.training.steps, quiet=not processes.is_first()) as bar:
        with clock.phase("data_preparation"):
            with processes.first_process_first("data"):
                dataset = prepare(experiment.data, experiment.model.vocab_size, bar.say, bar.progress)
            found = {"digest": dataset.digest[:_SHOWN]}
            processes.check_same("data", found, "let data.text and data.tokenizer be the same for all")

        from jaxlm.cli.devices import calibrated, describe, make_mesh
        from jaxlm.cli.ladder import say_counted, say_replicated
        from jaxlm.models.tree import parameter_count
        from jaxlm.parallel.layout import Layout
        from jaxlm.training.environment import environment
        from jaxlm.training.ladder import counted
        from jaxlm.training.loop import Start, Trainer
        from jaxlm.training.profile import Profiler
        from jaxlm.training.records import JsonLines

        with clock.phase("calibration"), processes.first_process_first("calibration"):
            calibrated(bar.say)
        mesh = make_mesh(experiment)
        bar.say(f"{parameter_count(experiment.model):,} parameters on {describe(mesh)}")
        end.counted = counted(config.workload(experiment, Layout(mesh.shape)), mesh)
        if replicated := say_replicated(end.counted.work):
            bar.say(replicated)
        bar.say(say_counted(end.counted))
        ends = getattr(experiment.optimizer.schedule, "decay_steps", experiment.training.steps)
        if ends < experiment.training.steps:
            bar.say(
                f"optimizer.schedule.decay_steps = {ends}: from there to training.steps = {experiment.training.steps} "
                "the learning rate stays where it ends"
            )
        start = Start(clock, bar, Profiler(traced, run.paths.profile, bar.say), stop)
        trainer = Trainer(experiment, dataset, mesh, run.paths, end.counted, start)
        # Only now that nothing was refused is it a run.
        with processes.first_process_first("run"):
            run.open(experiment, dataset)
        if processes.is_first():
            JsonLines(run.paths.attempts).append(environment(list(mesh.devices.flat)))
        try:
            result = trainer.train()
        except FileNotFoundError as error:
            if run.paths.config.exists():
                raise
            raise RunFailed(
                f"{run.paths} was moved or removed; put it back, and the run goes on from its newest checkpoint"
            ) from error

    with clock.phase("ending"):
        end.step = result.step
        if processes.is_first():
            end.plot()
        if result.reason:
            return end.early(result.reason)
        sample = _sample(experiment, dataset, result.parameters, mesh)
    return end.whole(sample)


class _End:
    """The last words of a run, whole or stopped early; in a job of several processes the first says them."""

    def __init__(self, paths: "RunPaths", as_json: bool):
        self._paths, self._json = paths, as_json
        self.step: int | None = None  # once it is saved
        self.counted: Counted | None = None  # once its devices are known

    def early(self, reason: int) -> int:
        """Say how to go on; the exit status."""
        from jaxlm.parallel import processes
        from jaxlm.training.interrupt import named

        if processes.is_first():
            why = (
                "stopped before the first step"
                if self.step is None
                else f"stopped at step {self.step}, checkpoint written"
            )
            again = shlex.join(["jaxlm", *sys.argv[1:]])
            print(f"{why}; to go on: {again}", file=sys.stderr)
            self._print_json(stopped=named(reason))
            sys.stdout.flush()
            sys.stderr.flush()
        return 130 if reason == signal.SIGINT else 0

    def plot(self) -> None:
        """The loss curve, where the time went, and the ladder."""
        from jaxlm.cli.ladder import show
        from jaxlm.training.ladder import ladder
        from jaxlm.training.records import JsonLines, plot_losses

        metrics = JsonLines(self._paths.metrics).rows()
        if metrics:
            plot_losses(metrics, JsonLines(self._paths.evaluations).rows(), self._paths.loss_curve)
        print(self._goodput(), file=sys.stderr)
        if metrics:
            rungs = ladder(self.counted, metrics)
            self._paths.ladder.write_text(json.dumps(rungs, indent=1) + "\n", encoding="utf-8")
            show(rungs)

    def whole(self, sample: str) -> int:
        """Show what a finished run has made; the exit status."""
        from jaxlm.parallel import processes
        from jaxlm.training.records import JsonLines

        paths = self._paths
        if not processes.is_first():
            return 0
        paths.sample.write_text(sample, encoding="utf-8")
        if self._json:
            self._print_json(stopped=None)
            return 0
        evaluations = JsonLines(paths.evaluations).rows()
        loss = evaluations[-1]["loss"] if evaluations else None
        held_out = "" if not evaluations else f", held-out loss {'not finite' if loss is None else f'{loss:.4f}'}"
        print(f"\n{sample}\n")
        print(f"{paths}: {self.step} steps{held_out}")
        print(f"loss curve {paths.loss_curve}, sample {paths.sample}, checkpoints {paths.checkpoints}")
        return 0

    def _goodput(self):
        from jaxlm.training.goodput import Attempts, summary

        return summary(Attempts.file(self._paths.goodput).rows())

    def _print_json(self, stopped: str | None) -> None:
        from jaxlm.training.records import JsonLines

        if not self._json:
            return
        last: dict[str, Any] = (JsonLines(self._paths.metrics).rows() or [{}])[-1]
        evaluations, goodput = JsonLines(self._paths.evaluations).rows(), self._goodput()
        print(
            json.dumps(
                {
                    "run": str(self._paths),
                    "step": self.step,
                    "stopped": stopped,
                    "loss": last.get("loss"),
                    "held_out_loss": evaluations[-1]["loss"] if evaluations else None,
                    "tokens_per_s": last.get("tokens_per_s"),
                    "goodput": goodput.share,
                    "seconds": goodput.seconds,
                }
            )
        )


def _sample(experiment, dataset, parameters, mesh) -> str:
    """How the model continues the beginning of a held-out document."""
    import jax.numpy as jnp

    from jaxlm.inference.generate import generate
    from jaxlm.inference.requests import Sampling, max_new_tokens
    from jaxlm.training.step import cast

    model, store = experiment.model, max(dataset.sources.values(), key=lambda source: source.weight).held_out
    longest = int(store.lengths.argmax())
    given = min(32, math.ceil(model.context_length / 2), int(store.lengths[longest]))
    prompt = store.read(longest, 0, given).tolist()
    tokens = generate(
        model,
        cast(parameters, jnp.dtype(experiment.training.dtype)),
        [prompt],
        min(200, max_new_tokens(model, given)),
        mesh,
        sampling=Sampling(temperature=0.8, top_p=0.95),
        seed=experiment.training.seed,
        vocab_size=dataset.tokenizer.vocab_size,
        kernels=experiment.training.kernels,
    )
    ids = [int(token[0]) for token in tokens]
    if dataset.tokenizer.separator in ids:
        ids = ids[: ids.index(dataset.tokenizer.separator)]
    return dataset.tokenizer.decode(prompt + ids)
