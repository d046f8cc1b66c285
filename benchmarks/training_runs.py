"""A run of `jaxlm train` in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple


class TrainedRun(NamedTuple):
    """Held-out losses and metrics of a run, the oldest first."""

    evaluations: list[dict[str, Any]]
    metrics: list[dict[str, Any]]

    @property
    def held_out(self) -> dict[str, Any]:
        """The last held-out loss, its step, and all of them by step."""
        last = self.evaluations[-1]
        curve = {each["step"]: each["loss"] for each in self.evaluations}
        return {"steps": last["step"], "held_out_loss": last["loss"], "curve": curve}


def train(config: Path, run: Path, overrides: list[str]) -> TrainedRun:
    """Train, from where a run in the folder left off."""
    code = "import sys; from jaxlm.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "train", str(config), *overrides, "--out", str(run), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = ((run / file).read_text().splitlines() for file in ("evaluations.jsonl", "metrics.jsonl"))
    return TrainedRun(*([json.loads(line) for line in each] for each in lines))
