"""Train a model as a TOML file says; started again, it resumes where it left off."""

import argparse
from functools import partial

from jaxlm import api
from jaxlm.cli.paths import path
from jaxlm.core import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        type=path,
        metavar="CONFIG",
        help="a TOML file, or a RUN to resume; where there is no such path, the name of a configuration that comes "
        "with jaxlm, such as quickstart (jaxlm config --list)",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as training.steps=100")
    parser.add_argument(
        "--out", type=path, metavar="RUN", help="folder of the run (runs/<name of CONFIG and key=value>)"
    )
    parser.add_argument(
        "--continue-with-changes",
        action="store_true",
        help="resume RUN also with keys that make another run; its history.jsonl says from which step",
    )
    parser.add_argument("--profile", metavar="START:STOP", help="trace the steps from START to before STOP, for XProf")
    parser.add_argument(
        "--max-hours", type=float, metavar="X", help="stop with a checkpoint before this start has lasted X hours"
    )
    parser.add_argument(
        "--from",
        dest="start_from",
        type=path,
        metavar="MODEL",
        help="begin with the weights and tokenizer of a run, a Hugging Face directory or hf:ORG/NAME; CONFIG needs no "
        "[model]",
    )
    parser.add_argument(
        "--process",
        metavar="INDEX/COUNT@HOST:PORT",
        help="which process of a job this is, and where process 0 listens (Slurm, Open MPI and Cloud TPU say so)",
    )


def main(arguments: argparse.Namespace) -> int:
    from jaxlm import config
    from jaxlm.cli.run_bar import RunBar, exit_status
    from jaxlm.parallel.processes import ProcessSpec
    from jaxlm.training.paths import RunPaths
    from jaxlm.training.profile import ProfiledSteps

    start_from = arguments.start_from
    configure = partial(api.configure, arguments.config, start_from=start_from)
    experiment = configure(arguments.overrides)
    profile = None if arguments.profile is None else ProfiledSteps.parse(arguments.profile)
    process = None if arguments.process is None else ProcessSpec.parse(arguments.process)
    overrides = arguments.overrides if start_from is None else config.effective(arguments.overrides, configure)
    out = arguments.out or config.default_run(arguments.config, overrides, experiment, start_from)
    display = RunBar(experiment.training.steps, RunPaths(out), arguments.json)
    with output.ignoring_closed_output():
        ended = api.train(
            experiment,
            out,
            display=display,
            profile=profile,
            max_hours=arguments.max_hours,
            process=process,
            continue_with_changes=arguments.continue_with_changes,
            start_from=start_from,
        )
    return exit_status(ended)
