"""A trained model out of a run folder, for the commands that use one."""

from argparse import ArgumentParser, Namespace
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from jaxlm.cli.paths import path
from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxlm.config import Experiment
    from jaxlm.run import Run


class Trained(NamedTuple):
    """An experiment, its parameters (or their average) from one step, and the mesh they lie on."""

    experiment: "Experiment"
    parameters: dict
    step: int
    mesh: "Mesh"


def add_arguments(parser: ArgumentParser) -> None:
    """The run, and which of its checkpoints."""
    parser.add_argument("run", type=path, metavar="RUN", help="folder of a run")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as mesh.tensor=1")
    parser.add_argument(
        "--checkpoint", choices=("newest", "best"), default="newest", help="the newest, or lowest in held-out loss"
    )
    parser.add_argument(
        "--ema", action="store_true", help="the moving average of the weights (training.ema_decay) in their place"
    )


_ATTEMPTS = 5  # to read a checkpoint of a run that trains on, and removes older ones
_READ = ("model", "mesh", "training.dtype", "training.kernels")  # sections and keys that every command reads


def experiment(arguments: Namespace, run: "Run", reads: Collection[str] = ()) -> "Experiment":
    """That of the run, with overrides of what the command reads: more than others in `reads`. Raises InputError where
    there is no run, no such model in it, or where an override would change nothing."""
    from jaxlm import config

    if run.experiment().training.ema_decay is None and arguments.ema:
        raise InputError(f"{run.paths} keeps no average of its weights (training.ema_decay); leave out --ema")
    overridden = config.load(run.paths.config, arguments.overrides, "decode")
    run.check_model(overridden)
    known = *_READ, *reads
    for key in config.overridden(arguments.overrides):
        if not any(f"{key}.".startswith(f"{read}.") for read in known):
            raise InputError(f"{key} changes nothing here, where {', '.join(known)} are read of the run; leave it out")
    return overridden


def restore(arguments: Namespace, run: "Run", experiment: "Experiment", *, dtype: str = "float32") -> Trained:
    """Restore the parameters onto this machine's devices, rounded to `dtype` on their way: they never lie there in
    float32 too.

    Raises InputError where there is no whole checkpoint, or where the mesh does not divide the model.
    """
    import sys

    import jax.numpy as jnp

    from jaxlm.cli.devices import make_mesh
    from jaxlm.models import tree as model_tree
    from jaxlm.training import checkpoints, manifests

    choose = manifests.best_verified if arguments.checkpoint == "best" else manifests.newest_verified
    mesh = make_mesh(experiment, "decode")  # nothing is trained: any number of sequences will do
    _, tree = model_tree.abstract(experiment.model)
    like = model_tree.placed(model_tree.shapes(tree, jnp.dtype(dtype)), model_tree.shardings(tree, mesh))
    said: set[str] = set()

    def say(line: str) -> None:
        if line not in said:
            print(f"jaxlm: {line}", file=sys.stderr)
        said.add(line)

    for attempt in range(1, _ATTEMPTS + 1):
        step = choose(run.paths.checkpoints, say)
        if step is None:
            raise InputError(f"{run.paths} has no whole checkpoint yet; jaxlm train writes one")
        try:
            parameters = checkpoints.restore_parameters(run.paths.checkpoints, step, like, average=arguments.ema)
            break
        except checkpoints.Gone:
            if attempt == _ATTEMPTS:
                raise
    return Trained(experiment, parameters, step, mesh)
