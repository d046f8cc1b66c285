"""The bar that `jaxlm train` shows of a run, and its last words."""

import json
import shlex
import signal
import sys
from typing import Any

from jaxlm.cli.ladder import show
from jaxlm.cli.progress import Bar, preferences
from jaxlm.cli.tables import print_sentence
from jaxlm.core.addresses import with_addresses
from jaxlm.parallel.processes import is_first
from jaxlm.training.display import Ended
from jaxlm.training.goodput import Attempts, Goodput, summary
from jaxlm.training.interrupt import named
from jaxlm.training.paths import RunPaths
from jaxlm.training.records import JsonLines


class RunBar(Bar):
    """A bar of a run, whole or stopped early; in a job of several processes the first says the last words."""

    def __init__(self, steps: int, paths: RunPaths, as_json: bool):
        super().__init__(steps)
        self._paths, self._json = paths, as_json

    def summary(self, goodput: Goodput, rungs: dict[str, Any] | None) -> None:
        """Show where the time went, and the ladder."""
        print_sentence(str(goodput), sys.stderr)
        if rungs is not None:
            show(rungs)

    def ended(self, ended: Ended) -> int:
        """Say how to go on, or what a finished run has made; the exit status."""
        if is_first():
            if ended.reason:
                self._say_how_to_go_on(ended.step)
            if self._json:
                print(json.dumps(self._row(ended)))
            elif not ended.reason:
                self._show_what_is_made(ended)
            sys.stdout.flush()
            sys.stderr.flush()
        return exit_status(ended)

    def _say_how_to_go_on(self, step: int | None) -> None:
        why = "stopped before the first step" if step is None else f"stopped at step {step}, checkpoint written"
        again = shlex.join(["jaxlm", *sys.argv[1:]])
        print(f"{why}; to go on: {again}", file=sys.stderr)

    def _show_what_is_made(self, ended: Ended) -> None:
        paths, evaluations = self._paths, JsonLines(self._paths.evaluations).rows()
        loss = evaluations[-1]["loss"] if evaluations else None
        held_out = "" if not evaluations else f", held-out loss {'not finite' if loss is None else f'{loss:.4f}'}"
        if ended.sample is not None:
            print(f"\n{ended.sample}\n")
        learned = "".join(f", {words} of training" for words in preferences(_last_metrics(paths)))
        print(f"{paths}: {ended.step} steps{held_out}{learned}")
        sample = "" if ended.sample is None else f"sample {paths.sample}, "
        print_sentence(with_addresses(f"loss curve {paths.loss_curve}, {sample}checkpoints {paths.checkpoints}"))

    def _row(self, ended: Ended) -> dict[str, Any]:
        last = _last_metrics(self._paths)
        evaluations = JsonLines(self._paths.evaluations).rows()
        goodput = summary(Attempts.file(self._paths.goodput).rows())
        return {
            "run": str(self._paths),
            "step": ended.step,
            "stopped": named(ended.reason),
            "loss": last.get("loss"),
            "held_out_loss": evaluations[-1]["loss"] if evaluations else None,
            "tokens_per_s": last.get("tokens_per_s"),
            **{name: last[name] for name in ("accuracy", "margin") if name in last},
            "goodput": goodput.share,
            "seconds": goodput.seconds,
        }


def _last_metrics(paths: RunPaths) -> dict[str, Any]:
    """Return the last line of metrics; empty before the first."""
    return (JsonLines(paths.metrics).rows() or [{}])[-1]


def exit_status(ended: Ended) -> int:
    """130 after Ctrl-C; a run that was asked otherwise to stop has done so."""
    return 130 if ended.reason == signal.SIGINT else 0
