"""List runs: state, step, losses and age, and the family of published weights.

"step" is the last recorded step and the planned number of steps; "checkpoint" is the step from which the run resumes.
"""

import argparse
import json
from pathlib import Path

from jaxlm import api
from jaxlm.cli.paths import location
from jaxlm.cli.tables import TextTable, names, numbers, texts
from jaxlm.core.addresses import with_addresses
from jaxlm.core.units import age, or_dash


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=location,
        default=Path("runs"),
        metavar="FOLDER",
        help="folder that holds runs, here or in a bucket (runs)",
    )


def main(arguments: argparse.Namespace) -> int:
    runs = api.runs(arguments.folder)
    if arguments.json:
        print(json.dumps({"runs": [run._asdict() for run in runs]}))
        return 0
    if not runs:
        print(f"{with_addresses(arguments.folder)} holds no run; jaxlm train or jaxlm import makes one")
        return 0

    families, begun = any(run.family for run in runs), any(run.begun_from for run in runs)
    named = names("state", "family") if families else names("state")
    columns = [*texts("run", least=20), *named, *numbers("step", "checkpoint", "loss", "held out", "age")]
    table = TextTable([*columns, *texts("from", under="run")] if begun else columns)
    for run in runs:
        table.add(
            run.run,
            run.state,
            *([or_dash(run.family, str)] if families else []),
            f"{run.step}/{or_dash(run.steps, str)}",
            or_dash(run.checkpoint, str),
            *(or_dash(loss, "{:.4f}".format) for loss in (run.loss, run.held_out_loss)),
            age(run.age_s),
            *([run.begun_from or ""] if begun else []),
        )
    table.print()
    return 0
