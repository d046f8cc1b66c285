"""Measure the loss of a trained model on its held-out text, or on other text."""

import argparse
import json
import tempfile
from pathlib import Path

from jaxlm.cli import trained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained.add_arguments(parser)
    parser.add_argument(
        "--data", metavar="PATH", help="a file, directory or glob of text in place of the held-out text"
    )


def main(arguments: argparse.Namespace) -> int:
    from jaxlm.run import Run

    run = Run(arguments.run)
    model = trained.load(arguments, run)

    import jax

    from jaxlm.data.packing import Rows
    from jaxlm.training.evaluation import evaluate
    from jaxlm.training.step import jit_steps, make_steps

    experiment = model.experiment
    steps = jit_steps(make_steps(experiment.model, experiment.training, experiment.optimizer), model.mesh)
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(model.mesh):
        store, size = _text(arguments, run, experiment, Path(folder))
        rows = Rows(store, experiment.training.sequence)
        measured = evaluate(steps.evaluate, model.parameters, rows, experiment.training.batch, model.mesh)
    row = {
        "loss": measured.loss,
        "perplexity": measured.perplexity,
        "bits_per_byte": measured.bits_per_byte(size),
        "tokens": measured.tokens,
        "step": model.step,
    }
    if arguments.json:
        print(json.dumps(row))
    else:
        print(
            f"step {model.step}: loss {measured.loss:.4f} nats per token, perplexity {measured.perplexity:.3f}, "
            f"{row['bits_per_byte']:.4f} bits per byte, over {measured.tokens:,} tokens"
        )
    return 0


def _text(arguments, run, experiment, folder: Path) -> tuple:
    """(tokens, bytes they predict) of the text to measure on."""
    from jaxlm.data.dataset import prepare
    from jaxlm.data.sources import find_files, read_documents
    from jaxlm.data.store import predicted_bytes, write_store
    from jaxlm.errors import InputError

    if arguments.data is None:
        dataset = prepare(experiment.data, experiment.model.vocabulary)
        if dataset.digest != run.digest():
            raise InputError(f"the text of {run.directory} has changed since it was trained; give --data PATH")
        return dataset.held_out, dataset.held_out_bytes
    tokenizer = run.load_tokenizer()
    documents = list(read_documents(find_files([arguments.data])))
    store = write_store(folder / "tokens", documents, tokenizer)
    return store, predicted_bytes(documents, tokenizer)
