"""The step that `jaxlm plan` and `jaxlm compile` examine: an experiment, and its mesh on chips that may be absent."""

import argparse
from typing import TYPE_CHECKING, Any

from jaxlm.cli import engine, trained
from jaxlm.cli.paths import location
from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    from jaxlm.config.experiment import Experiment

AUTO = "auto"  # the value that asks for a search
_MOST_DRAFTS = 8  # that a search tries


def add_arguments(parser: argparse.ArgumentParser, more_workloads: dict[str, str] | None = None) -> None:
    """Add the experiment and the kind of step; `more_workloads` are those that are no step, with their explanation."""
    more = more_workloads or {}
    parser.add_argument(
        "config",
        nargs="?",
        type=location,
        metavar="CONFIG",
        help="a TOML file ([model] alone is enough), a RUN, or the name of a configuration that comes with jaxlm, such "
        "as llama3.1-8b (jaxlm config --list)",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as training.batch=512")
    parser.add_argument(
        "--workload",
        choices=("train", "prefill", "decode", *more),
        default="train",
        help="; ".join(["the kind of step (train)", *(f"{name}: {text}" for name, text in more.items())]),
    )
    of_serve = "the best of none, int8, w8a8 and int4 for --workload serve" if "serve" in more else ""
    trained.add_quantize(parser, of_serve)
    auto = "; N is auto: the best of 0, 2, 4 and 8 for --workload serve" if "serve" in more else ""
    parser.add_argument(
        "--speculate",
        metavar="SOURCE[:N]",
        help="read N (4) guessed tokens of each sequence in a step of decoding, each right with probability "
        "inference.acceptance; SOURCE is ngram, or the CONFIG of a smaller model that draws them "
        f"(inference.speculate){auto}",
    )
    engine.add_cache_dtype(parser)
    add_chip(parser)


def add_chip(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chip",
        action="append",
        metavar="KEY=VALUE",
        help="a figure of the chip in place of the catalog's, such as memory_bytes_per_s=2.4e12, "
        "scale_out_bytes_per_s=25e9, watts=500 or usd_per_hour=2.5 (jaxlm hardware ID names them); several times",
    )


def chip(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures that --chip gives, nested. Raises InputError for what is no KEY=VALUE."""
    from jaxlm.config.overrides import assigned

    return assigned(arguments.chip or (), "memory_bytes_per_s=2.4e12")


def require(command: str, arguments: argparse.Namespace) -> None:
    """Raise InputError if the config or the chips are missing."""
    missing = [name for name, value in (("CONFIG", arguments.config), ("--on", arguments.on)) if value is None]
    if missing:
        raise InputError(f"the following arguments are required: {', '.join(missing)} (see jaxlm {command} --help)")


def load(arguments: argparse.Namespace) -> "Experiment":
    """Return the experiment with its overrides. Raises InputError, also if an override sets a mesh that
    --mesh sets, or what the search for deployments chooses or takes from other options."""
    from jaxlm import config
    from jaxlm.config.overrides import overridden
    from jaxlm.config.step_sizes import SIZE_KEYS

    is_serve = arguments.workload == "serve"
    kind = "decode" if is_serve else arguments.workload
    of_request = {SIZE_KEYS[each][1] for each in ("prefill", "decode")}
    if is_serve and (wrong := of_request.intersection(overridden(arguments.overrides))):
        raise InputError(
            f"--workload serve takes the tokens of a request from --prompt and --output: leave out {min(wrong)}"
        )
    overrides = [*arguments.overrides, *_widths(arguments), *_of_engine(arguments)]
    experiment = config.load(arguments.config, overrides, kind)
    of_mesh = [key for key in overridden(arguments.overrides) if key.startswith("mesh.")]
    if of_mesh and is_serve:
        raise InputError(f"--workload serve chooses tensor and replicas itself: leave out {of_mesh[0]}")
    if of_mesh and arguments.mesh is not None:
        raise InputError(f"--mesh {arguments.mesh} sets the whole mesh; leave out {of_mesh[0]}, or --mesh")
    return experiment


def searched(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return what of an engine is to be chosen (`jaxlm.costs.deployment.SEARCHED`). Raises InputError where nothing is
    searched."""
    requested = {
        "quantize": ("--quantize auto", arguments.quantize == AUTO),
        "drafts": (f"--speculate {arguments.speculate}", _draft_source(arguments) is not None),
    }
    names = tuple(name for name, (_, is_asked) in requested.items() if is_asked)
    if names and arguments.workload != "serve":
        raise InputError(f"{requested[names[0]][0]} is a search, of --workload serve alone: give a value")
    return names


def _widths(arguments: argparse.Namespace) -> list[str]:
    """Return the override that --quantize makes. Raises InputError where another sets the same key."""
    made = trained.quantize_overrides(arguments)
    return [] if arguments.quantize == AUTO else made


def _of_engine(arguments: argparse.Namespace) -> list[str]:
    """Return the overrides that --speculate and --cache-dtype make. Raises InputError for a workload that has no such
    setting, and where another override sets the same key."""
    from jaxlm.config.overrides import overridden

    source, overrides = _draft_source(arguments), []
    drafts = arguments.speculate if source is None else f"{source}:{_MOST_DRAFTS}"
    for option, key, value, steps, without in (
        ("--speculate", "inference.speculate", drafts, "steps that decode", ("train", "prefill")),
        ("--cache-dtype", "inference.cache_dtype", arguments.cache_dtype, "inference", ("train",)),
    ):
        if value is None:
            continue
        if arguments.workload in without:
            raise InputError(f"{option} is of {steps}; leave it out for --workload {arguments.workload}")
        if key in overridden(arguments.overrides):
            raise InputError(f"{option} and {key} are one setting; give one of them")
        overrides.append(f"{key}={value}")
    return overrides


def _draft_source(arguments: argparse.Namespace) -> str | None:
    """Return the source of drafts whose number is to be chosen; None where it is given."""
    source, _, number = (arguments.speculate or "").rpartition(":")
    return source if source and number == AUTO else None


def fixed(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the settings of a search that the command line gives, and which it therefore leaves as they are."""
    from jaxlm.config.overrides import overridden
    from jaxlm.costs.search import VARIED

    keys = overridden(arguments.overrides) if arguments.workload == "train" else ()
    return tuple(name for name, key in VARIED.items() if key in keys)
