"""Measure the loss of a trained model on its held-out text, or on other text; or how well it does at tasks."""

import argparse
import json
import re

from jaxlm.cli import tasks, trained
from jaxlm.core.errors import InputError

_ROWS = ("training.batch", "training.sequence", "training.scan_layers")  # of [training] that a loss is measured with


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained.add_arguments(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--data", metavar="PATH", help="a file, directory or glob of text in place of the held-out text"
    )
    instead.add_argument(
        "--tasks",
        metavar="TASK[,…]",
        help="in place of a loss: tasks of the lm-evaluation-harness, by their names or YAML files",
    )
    tasks.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    from jaxlm.data.config import TOKENIZERS
    from jaxlm.run import SHAPING, Run

    tasks.check(arguments)
    if arguments.data == "":  # as of a shell variable that is not set
        raise InputError("--data names no text; give a file, directory or glob, or leave it out")
    run = Run(arguments.run)
    if arguments.tasks is not None:
        return _at_tasks(arguments, run)
    experiment = trained.experiment(arguments, run, (*_ROWS, *_read_of_data(arguments.data)))
    tokenizer = None if arguments.data is None else run.load_tokenizer()
    if arguments.data is None:
        kind = experiment.data.tokenizer in TOKENIZERS
        _check_shaping(run, experiment.data, (*SHAPING, "tokenizer") if kind else SHAPING)
    model = trained.restore(arguments, run, experiment)

    import jax

    from jaxlm.cli.progress import Bar
    from jaxlm.training.evaluation import evaluate_sources
    from jaxlm.training.step import jit_steps, make_steps

    steps = jit_steps(make_steps(experiment.model, experiment.training, experiment.optimizer), model.mesh)
    with Bar(steps=0) as bar:
        text = _text(arguments.data, tokenizer, run, experiment, bar)
    with jax.set_mesh(model.mesh):
        measured = evaluate_sources(steps.evaluate, model.parameters, text, experiment.training.batch, model.mesh)
    row = {**measured.row(), "step": model.step}
    if arguments.json:
        print(json.dumps(row))
    else:
        print(
            f"step {model.step}: loss {measured.loss:.4f} nats per token, perplexity {measured.perplexity:.3f}, "
            f"{measured.bits_per_byte:.4f} bits per byte, over {measured.tokens:,} tokens"
        )
        for name, source in (measured.sources or {}).items():
            print(f"{name}: loss {source.loss:.4f}, {source.bits_per_byte:.4f} bits per byte")
    return 0


def _at_tasks(arguments, run) -> int:
    """Evaluate at tasks, in batches of `training.batch`, computed in `training.dtype`."""
    experiment = trained.experiment(arguments, run, ("training.batch",))
    tokenizer = run.load_tokenizer()
    names = [name.strip() for name in arguments.tasks.split(",")]
    asked = tasks.load(names, arguments.num_fewshot, experiment.model.context_length)
    _, parameters, step, mesh = trained.restore(arguments, run, experiment, dtype=experiment.training.dtype)

    from jaxlm.inference.harness import HarnessModel

    model = HarnessModel(
        experiment.model, parameters, tokenizer, experiment.training.batch, mesh, experiment.training.kernels
    )
    results = tasks.run(model, asked, arguments.limit)
    tasks.show(results, model.truncated, step, arguments.json)
    return 0


def _text(data, tokenizer, run, experiment, bar) -> dict:
    """Rows of the text to measure on, by the name of its source; `bar` shows how far it is: other `data` in the tokens
    of `tokenizer`, or what was held out. Raises InputError where that is not the text of the run."""
    from jaxlm.data.dataset import prepare, tokenize_whole
    from jaxlm.data.packing import Rows
    from jaxlm.run import FILES

    sequence = experiment.training.sequence
    if data is not None:
        try:
            store = tokenize_whole(experiment.data, data, tokenizer, bar.say, bar.progress)
            return {"data": Rows(store, sequence)}
        except InputError as error:
            raise InputError(re.sub(r"^data\.text\b", "--data", str(error))) from None
    dataset = prepare(experiment.data, experiment.model.vocab_size, bar.say, bar.progress)
    if dataset.digest != run.digest():
        _check_shaping(run, experiment.data, FILES)
        raise InputError(f"the text of {run.paths} has changed since it was trained; give --data PATH")
    return {name: Rows(source.held_out, sequence) for name, source in dataset.sources.items()}


def _read_of_data(path: str | None) -> tuple[str, ...]:
    """What is read of [data] for the run's own text, or for other text at that path."""
    from jaxlm.data.config import HUGGING_FACE

    if path is None:
        return ("data",)
    return "data.field", "data.max_broken", "data.cache", *["data.documents"] * path.startswith(HUGGING_FACE)


def _check_shaping(run, data, keys) -> None:
    """Raises InputError where one of these keys of [data] is not as the run was trained with."""
    before = run.experiment().data
    for key in keys:
        if getattr(data, key) != getattr(before, key):
            raise InputError(
                f"data.{key} is not what {run.paths} was trained with, and gives other text; leave it out, or give "
                "--data PATH"
            )
