"""Tasks of EleutherAI's lm-evaluation-harness, for `jaxlm eval --tasks`."""

import contextlib
import difflib
import importlib.util
import json
import math
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections import Counter
from numbers import Real
from pathlib import Path
from typing import Any

from jaxlm.cli.tables import TextTable, numbers, texts
from jaxlm.core.errors import InputError
from jaxlm.core.extras import install

_FEW_SHOT_SEED = 1234  # the harness's own
_REASON = 200  # characters of the harness's message about a bad task


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N documents of each task")
    parser.add_argument(
        "--num-fewshot", type=int, metavar="K", help="K solved examples before each question, in place of the task's"
    )


def check(arguments: Namespace) -> None:
    """Raise InputError for options that do not go together, or if the harness is not installed."""
    if arguments.tasks is None:
        given = [name for name in ("limit", "num_fewshot") if getattr(arguments, name) is not None]
        if given:
            raise InputError(f"--{given[0].replace('_', '-')} is of tasks; give --tasks, or leave it out")
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(f"--tasks needs the lm-evaluation-harness: {install('lm-eval')}")
    if arguments.limit is not None and arguments.limit < 1:
        raise InputError(f"--limit {arguments.limit} must be 1 or more")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        raise InputError(f"--num-fewshot {arguments.num_fewshot} must be 0 or more")


def load(names: list[str], few_shot: int | None, context: int) -> dict[str, Any]:
    """Return tasks as `lm_eval.evaluate` takes them, for a model with this `context`. Raises InputError for tasks that
    do not exist or cannot run with these options."""
    from lm_eval.tasks import TaskManager

    named = [name for name in names if not Path(name).is_file()]
    manager = TaskManager(include_defaults=bool(named))  # reading what the harness has takes seconds
    for name in named:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            near = f"; near it: {', '.join(near)}" if near else ""
            raise InputError(f"--tasks: {name!r} is no task of the harness and no file{near}")
    try:
        loaded = manager.load(names)
    except Exception as error:  # from YAML, the dataset or the network: the library raises all kinds
        why = textwrap.shorten(_reason(error), _REASON, placeholder=" …")
        raise InputError(f"--tasks: {', '.join(names)} cannot be loaded ({why})") from error
    for name, task in loaded["tasks"].items():
        _prepare(name, task, few_shot, context)
    return loaded


def _reason(error: Exception) -> str:
    """Return the harness's message, or what an accidental failure means."""
    if isinstance(error, StopIteration) or "out of bounds for size 0" in str(error):
        return "it has no documents"
    if isinstance(error, TypeError) and "NoneType" in str(error):
        return "a task in it has no dataset_path; of a group of files, name the files"
    return str(error) or type(error).__name__


def _prepare(name: str, task: Any, few_shot: int | None, context: int) -> None:
    """Set the number of examples as `lm_eval.simple_evaluate` does. Raises InputError where that ignores options
    silently."""
    from jaxlm.inference.harness import generation_options

    for what in ("UNSAFE_CODE", "MULTIMODAL"):
        if getattr(task, what, False):
            raise InputError(f"--tasks: {name} is marked {what} by the harness; jaxlm runs no such task")
    if task.OUTPUT_TYPE == "generate_until":
        try:
            generation_options(task.get_config("generation_kwargs"), context)
        except InputError as error:
            raise InputError(f"--tasks: {name}: {error}") from None
    own = task.get_config("num_fewshot")
    if few_shot is not None:
        if few_shot and (own == 0 or task.OUTPUT_TYPE == "loglikelihood_rolling"):
            raise InputError(f"--num-fewshot {few_shot}: {name} takes no examples; leave it out, or set 0")
        task.set_config("num_fewshot", few_shot)
    elif own is None:
        task.set_config("num_fewshot", 0)
    if wanted := task.get_config("num_fewshot"):
        # A question is no example of itself.
        there = len(list(task.fewshot_docs())) - (task.fewshot_cfg.split == task.config.test_split)
        if wanted > there:
            raise InputError(f"--num-fewshot {wanted}: {name} has {there} examples; give at most as many")
    task.set_fewshot_seed(_FEW_SHOT_SEED)


def run(model: Any, tasks: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Return the harness's results for a `HarnessModel`. The harness's own output goes to standard error."""
    from lm_eval import evaluate

    with contextlib.redirect_stdout(sys.stderr):
        return evaluate(model, tasks, limit=limit, log_samples=False)


def show(
    results: dict[str, Any], truncated: Counter[str], unanswered: Counter[str], step: int, dtype: str, as_json: bool
) -> None:
    """Print the metrics of each task and group, under the harness's own names, and how many requests of each task lost
    their beginning or have no answer."""
    for said, counts in (
        ("requests longer than model.context_length lost their beginning", truncated),
        ("requests that cannot be encoded, or begin with nothing, scored −∞ or gave no text", unanswered),
    ):
        if named := ", ".join(f"{count:,} of {name}" for name, count in counts.items() if count):
            print(f"jaxlm: {said}: {named}", file=sys.stderr)
    measured = results["results"] | results.get("groups", {})
    if as_json:
        tasks = {name: _numbers(values) for name, values in measured.items()}
        for name in results["configs"]:
            tasks[name] |= {"truncated": truncated[name], "unanswered": unanswered[name]}
        print(json.dumps({"tasks": tasks, "step": step, "dtype": dtype}))
        return
    columns = [*texts("task"), *numbers("examples"), *texts("metric"), *numbers("value", "± standard error")]
    table = TextTable(columns, f"step {step}")
    for name, values in measured.items():
        label, found = (name, str(results["n-shot"].get(name, ""))), _numbers(values)
        for key, value in found.items():
            metric, _, how = key.partition(",")
            if not how or metric.endswith("_stderr"):
                continue
            error = found.get(f"{metric}_stderr,{how}")
            table.add(*label, metric if how == "none" else f"{metric} ({how})", _shown(value), _shown(error))
            label = "", ""
    table.print()


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics for JSON: None for values that are not finite numbers."""
    return {key: _number(value) for key, value in values.items() if key not in ("name", "alias")}


def _number(value: Any) -> int | float | None:
    if isinstance(value, int):
        return value
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def _shown(number: int | float | None) -> str:
    return "" if number is None else f"{number:.4f}"
