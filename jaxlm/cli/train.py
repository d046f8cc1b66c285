"""Train a model as a TOML file says; started again, it resumes where it left off."""

import argparse
import json
import shlex
import signal
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file, such as configs/quickstart.toml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as training.steps=100")
    parser.add_argument("--out", type=Path, metavar="RUN", help="folder of the run (runs/<name of CONFIG>)")
    parser.add_argument(
        "--process",
        metavar="INDEX/COUNT@HOST:PORT",
        help="which process of a job this is, and where process 0 listens (Slurm, Open MPI and Cloud TPU say so)",
    )


def main(arguments: argparse.Namespace) -> int:
    from jaxlm import config, distributed
    from jaxlm.cli.progress import Bar
    from jaxlm.data.dataset import prepare
    from jaxlm.run import Run

    experiment = config.load(arguments.config, arguments.overrides)
    run = Run(arguments.out or Path("runs") / arguments.config.stem)
    run.check(experiment)
    distributed.join(arguments.process and distributed.Place.parse(arguments.process))
    with Bar(experiment.training.steps, quiet=not distributed.is_first()) as bar:
        with distributed.first_goes_first("data"):
            dataset = prepare(experiment.data, experiment.model.vocabulary, bar.say, bar.progress)

        from jaxlm.cli.devices import describe, make_mesh
        from jaxlm.models.tree import parameter_count
        from jaxlm.training.loop import Diverged, Trainer
        from jaxlm.training.records import JsonLines, environment, plot_losses

        mesh = make_mesh(experiment)
        bar.say(f"{parameter_count(experiment.model):,} parameters on {describe(mesh)}")
        if config.replicated_kv_heads(experiment, mesh.shape["tensor"]):
            bar.say(
                f"mesh.tensor = {mesh.shape['tensor']} does not divide {experiment.model.attention.kv_heads} "
                "key/value heads: every device of that axis holds all of them"
            )
        trainer = Trainer(
            experiment.model,
            experiment.training,
            experiment.optimizer,
            experiment.evaluation,
            experiment.checkpoint,
            dataset,
            mesh,
            run.directory,
            bar,
        )
        # Only now that nothing was refused is it a run.
        with distributed.first_goes_first("run"):
            run.open(experiment, dataset)
        JsonLines(run.starts).append(environment(list(mesh.devices.flat)))
        try:
            result = trainer.train()
        except Diverged as error:
            print(f"jaxlm: {error}", file=sys.stderr)
            return 1

    metrics, evaluations = JsonLines(run.metrics).rows(), JsonLines(run.evaluations).rows()
    if metrics and distributed.is_first():
        plot_losses(metrics, evaluations, run.loss_curve)
    if result.signal is not None:
        again = shlex.join(["jaxlm", *sys.argv[1:]])
        if distributed.is_first():
            print(f"stopped at step {result.step}, checkpoint written; to go on: {again}", file=sys.stderr)
        return 130 if result.signal == signal.SIGINT else 0

    sample = _sample(experiment, dataset, result.parameters, mesh)
    if not distributed.is_first():
        return 0
    run.sample.write_text(sample, encoding="utf-8")
    held_out = evaluations[-1]["loss"] if evaluations else None
    if arguments.json:
        last = metrics[-1] if metrics else {}
        print(
            json.dumps(
                {
                    "run": str(run.directory),
                    "step": result.step,
                    "loss": last.get("loss"),
                    "held_out_loss": held_out,
                    "tokens_per_s": last.get("tokens_per_s"),
                }
            )
        )
        return 0
    print(f"\n{sample}\n")
    print(f"{run.directory}: {result.step} steps, held-out loss {held_out:.4f}")
    print(f"loss curve {run.loss_curve}, sample {run.sample}, checkpoints {run.checkpoints}")
    return 0


def _sample(experiment, dataset, parameters, mesh, prompt_tokens: int = 32, max_tokens: int = 200) -> str:
    """How the model continues the beginning of a held-out document."""
    import jax.numpy as jnp

    from jaxlm.inference.config import Sampling
    from jaxlm.inference.generate import generate
    from jaxlm.models.tree import abstract
    from jaxlm.training.step import cast

    model, store = experiment.model, max(dataset.sources.values(), key=lambda source: source.weight).held_out
    longest = int(store.lengths.argmax())
    given = min(prompt_tokens, model.context // 2, int(store.lengths[longest]))
    prompt = store.read(longest, 0, given).tolist()
    graph, _ = abstract(model)
    tokens = generate(
        graph,
        model,
        cast(parameters, jnp.dtype(experiment.training.dtype)),
        [prompt],
        min(max_tokens, model.context - given),
        mesh,
        sampling=Sampling(temperature=0.8, top_p=0.95),
        seed=experiment.training.seed,
        valid=dataset.tokenizer.vocabulary,
    )
    ids = [int(token[0]) for token in tokens]
    if dataset.tokenizer.separator in ids:
        ids = ids[: ids.index(dataset.tokenizer.separator)]
    return dataset.tokenizer.decode(prompt + ids)
