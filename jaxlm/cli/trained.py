"""A trained model out of a run folder, for the commands that use one."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, get_args

from jaxlm import api
from jaxlm.cli.paths import location
from jaxlm.core.errors import InputError
from jaxlm.models.quantize_config import QuantizeKind

if TYPE_CHECKING:
    from jaxlm.api import LoadedModel
    from jaxlm.parallel.rules import Kind


def add_arguments(parser: ArgumentParser) -> None:
    """The run, and which of its checkpoints."""
    parser.add_argument(
        "run",
        type=location,
        metavar="RUN",
        help="a run or a Hugging Face directory, here or in a bucket, or hf:ORG/NAME",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as mesh.tensor=1")
    add_checkpoint(parser)
    add_quantize(parser)


def add_checkpoint(parser: ArgumentParser) -> None:
    """Add the choice of a checkpoint, and of its weights or their average."""
    parser.add_argument(
        "--checkpoint",
        choices=("newest", "best"),
        default="newest",
        help="the newest checkpoint, or the one with the lowest held-out loss (newest)",
    )
    parser.add_argument("--ema", action="store_true", help="use the moving average of the weights (training.ema_decay)")


def add_quantize(parser: ArgumentParser, auto: str = "") -> None:
    """Add the width that matrices of layers are kept in; `auto` explains that value of the option, where it is one."""
    parser.add_argument(
        "--quantize",
        choices=("none", *get_args(QuantizeKind), *["auto"] * bool(auto)),
        help="keep the matrices of layers in this width (execution.quantize); routers and tables stay as they "
        f"are{auto and f'; auto: {auto}'}",
    )


def quantize_overrides(arguments: Namespace) -> list[str]:
    """Return the override that --quantize makes. Raises InputError where another sets the same key."""
    from jaxlm.config.overrides import overridden

    if arguments.quantize is None:
        return []
    if "execution.quantize" in overridden(arguments.overrides):
        raise InputError("--quantize and execution.quantize are one setting; give one of them")
    return [f"execution.quantize={arguments.quantize}"]


# Sections and keys that every command reads.
_READ = (
    *("model", "mesh", "execution.dtype", "execution.kernels"),
    *("execution.quantize", "execution.quantize_group", "execution.quantize_targets"),
)


def load(
    arguments: Namespace,
    reads: Collection[str] = (),
    dtype: str | None = None,
    workload: "Kind" = "decode",
    overrides: Iterable[str] = (),
) -> "LoadedModel":
    """Return the model of the run, with overrides of what the command reads, more than others in `reads`, and then
    `overrides` that its options make. Compiled programs are kept for the next start. Raises InputError as
    `jaxlm.api.load` does."""
    from jaxlm.core import compilation_cache

    def say(line: str) -> None:
        print(f"jaxlm: {line}", file=sys.stderr)

    model = api.load(
        arguments.run,
        [*arguments.overrides, *quantize_overrides(arguments), *overrides],
        reads=(*_READ, *reads),
        checkpoint=arguments.checkpoint,
        average=arguments.ema,
        dtype=dtype,
        workload=workload,
        chat_template=getattr(arguments, "chat_template", None),
        adapter=getattr(arguments, "adapter", None),
        adapters=dict(getattr(arguments, "adapters", ())),
        say=say,
    )
    compilation_cache.enable(say)
    return model
