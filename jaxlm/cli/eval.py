"""Measure a model: its loss on held-out text, other text or answers, or its results on tasks."""

import argparse
import json

from jaxlm.cli import chat, engine, tasks, trained
from jaxlm.cli.tables import print_sentence
from jaxlm.core.errors import InputError

_ROWS = ("training.batch", "training.sequence", "execution.scan_layers")  # that a loss is measured with


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained.add_arguments(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--data", metavar="PATH", help="a file, directory or glob of text in place of the held-out text"
    )
    instead.add_argument(
        "--chat",
        metavar="PATH",
        help="conversations in place of text, in the format of data.chat; the loss is measured on the answers",
    )
    chat.add_template(parser)
    instead.add_argument(
        "--tasks",
        metavar="TASK[,…]",
        help="run tasks of the lm-evaluation-harness instead, by name or YAML file",
    )
    tasks.add_arguments(parser)
    engine.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    tasks.check(arguments)
    for option in ("data", "chat"):
        if getattr(arguments, option) == "":  # as of a shell variable that is not set
            raise InputError(f"--{option} names no text; give a file, directory or glob, or leave it out")
    if arguments.chat is None and arguments.chat_template is not None:
        raise InputError("--chat-template is of conversations: add --chat PATH")
    if arguments.tasks is None and (given := engine.option(arguments)):
        raise InputError(f"{given} is of the engine that answers tasks: add --tasks, or leave it out")
    return _at_a_loss(arguments) if arguments.tasks is None else _at_tasks(arguments)


def _at_a_loss(arguments: argparse.Namespace) -> int:
    """Measure the loss, of parameters that are kept in float32."""
    data = arguments.chat if arguments.data is None else arguments.data
    model = trained.load(arguments, (*_ROWS, *_read_of_data(data)), workload="train")

    from jaxlm.cli.progress import Bar

    measured = model.evaluate(data, Bar(steps=0), is_chat=arguments.chat is not None)
    if arguments.json:
        print(json.dumps({**measured.row(), "step": model.step, "dtype": model.dtype}))
        return 0
    print_sentence(
        f"step {model.step}: loss {measured.loss:.4f} nats per token, perplexity {measured.perplexity:.3f}, "
        f"{measured.bits_per_byte:.4f} bits per byte, over {measured.tokens:,} tokens"
    )
    for name, source in (measured.sources or {}).items():
        print(f"{name}: loss {source.loss:.4f}, {source.bits_per_byte:.4f} bits per byte")
    return 0


def _at_tasks(arguments: argparse.Namespace) -> int:
    """Evaluate at tasks, by the engine."""
    model = engine.load(arguments)
    tokenizer = model.source.text.load_tokenizer()
    names = [name.strip() for name in arguments.tasks.split(",")]
    asked = tasks.load(names, arguments.num_fewshot, model.config.context_length)
    from jaxlm.inference.harness import HarnessModel

    adapter = HarnessModel(model.engine(), tokenizer)
    results = tasks.run(adapter, asked, arguments.limit)
    tasks.show(results, adapter.truncated, adapter.unanswered, model.step, model.dtype, arguments.json)
    return 0


def _read_of_data(path: str | None) -> tuple[str, ...]:
    """Return the keys that are read of [data] for the run's own text, or for other text at that path."""
    from jaxlm.data.config import HUGGING_FACE

    if path is None:
        return ("data",)
    return "data.field", "data.max_broken", "data.cache", *["data.documents"] * path.startswith(HUGGING_FACE)
