"""Train the model that a TOML file describes. The same command resumes a run that was stopped."""

import argparse
from functools import partial

from jaxlm import api
from jaxlm.cli.paths import location
from jaxlm.core import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        type=location,
        metavar="CONFIG",
        help="a TOML file, or a RUN to resume; where there is no such path, the name of a configuration that comes "
        "with jaxlm, such as quickstart (jaxlm config --list)",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as training.steps=100")
    parser.add_argument(
        "--out",
        type=location,
        metavar="RUN",
        help="folder of the run, or gs://BUCKET/FOLDER (runs/<name of CONFIG and key=value>)",
    )
    parser.add_argument(
        "--continue-with-changes",
        action="store_true",
        help="resume RUN although settings changed that decide what is learned; its history.jsonl records from which "
        "step",
    )
    parser.add_argument(
        "--profile", metavar="START:STOP", help="profile the steps from START up to STOP - 1, for XProf"
    )
    parser.add_argument(
        "--max-hours", type=float, metavar="X", help="write a checkpoint and stop before X hours have passed"
    )
    parser.add_argument(
        "--from",
        dest="start_from",
        type=location,
        metavar="MODEL",
        help="start from the weights and tokenizer of a run, a Hugging Face directory or hf:ORG/NAME; CONFIG then "
        "needs no [model]",
    )
    parser.add_argument(
        "--process",
        metavar="INDEX/COUNT@HOST:PORT",
        help="this process's place in a job of several, and the address of process 0 (set by Slurm, Open MPI and Cloud "
        "TPU themselves)",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="with --process: if another process is lost, start again with those that are left, on fewer mesh.data",
    )


def main(arguments: argparse.Namespace) -> int:
    from jaxlm.cli.run_bar import RunBar, exit_status
    from jaxlm.config.overrides import effective
    from jaxlm.config.run_name import default_run
    from jaxlm.parallel.processes import ProcessSpec
    from jaxlm.runs import elastic
    from jaxlm.runs.job_folder import JobFolder
    from jaxlm.training.paths import RunPaths
    from jaxlm.training.profile import ProfiledSteps

    start_from = arguments.start_from
    configure = partial(api.configure, arguments.config, start_from=start_from)
    experiment = configure(arguments.overrides)
    profile = None if arguments.profile is None else ProfiledSteps.parse(arguments.profile)
    process = None if arguments.process is None else ProcessSpec.parse(arguments.process)
    overrides = arguments.overrides if start_from is None else effective(arguments.overrides, configure)
    out = arguments.out or default_run(arguments.config, overrides, experiment, start_from)
    if arguments.elastic:  # from here on in a child for each start of the job
        process, experiment = elastic.supervised(process, experiment, JobFolder(out))
    display = RunBar(experiment.training.steps or 0, RunPaths(out), arguments.json)
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
