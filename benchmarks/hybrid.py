"""Compare three layers of Gated DeltaNet to one of attention with attention alone: held-out losses, times of a step.

    python benchmarks/hybrid.py [--seeds 3] [--runs RUNS] [--blocks 5]
    python benchmarks/hybrid.py --seeds 0     # the times alone
    python benchmarks/hybrid.py --blocks 0    # the losses alone

"hybrid" is configs/hybrid.toml, and "attention" the same with its layer of attention in every layer, whose matrices
have as many weights. Both see the same tokens of the quickstart's text. Times are those of training steps of 2,048
random tokens, in rows of three lengths. Each model runs in a process of its own; blocks of steps alternate, and the
first of each is warm-up.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import interleave
import results
from training_runs import train
from training_steps import jaxlm_steps

from jaxlm import config as configuration
from jaxlm.config.experiment import Experiment
from jaxlm.models import tree

CONFIG = Path(__file__).parents[1] / "configs" / "hybrid.toml"
MODELS = {"attention": ["model.pattern=[]"], "hybrid": []}
TOKENS, LENGTHS, STEPS = 2048, (128, 512, 2048), 3  # of a step; of a row; in each block


def experiment(name: str, length: int | None = None) -> Experiment:
    """Return a model's experiment, with rows of some length where one is given."""
    overrides = [*MODELS[name]]
    if length:
        overrides += [f"model.context_length={length}", f"training.batch={TOKENS // length}"]
    return configuration.load(CONFIG, overrides)


def losses(seeds: int, folder: Path) -> dict[str, Any]:
    """Train both models with so many seeds, and return their held-out losses."""
    rows = []
    for seed in range(seeds):
        for name, overrides in MODELS.items():
            ran = train(CONFIG, folder / f"{name}-{seed}", [f"training.seed={seed}", *overrides])
            rows.append({"model": name, "seed": seed, **ran.held_out})
            print(rows[-1], flush=True)
    of = {name: [row["held_out_loss"] for row in rows if row["model"] == name] for name in MODELS}
    return {
        "parameters": {name: tree.parameter_count(experiment(name).model) for name in MODELS},
        "rows": rows,
        "gap": statistics.mean(of["attention"]) - statistics.mean(of["hybrid"]),
        "spread": max(max(each) - min(each) for each in of.values()),
    }


def times(blocks: int) -> dict[str, Any]:
    """Return the times of a training step of both models with rows of each length."""
    cases = {}
    for length in LENGTHS:
        commands = {name: [sys.executable, __file__, "--worker", name, str(length)] for name in MODELS}
        worked = interleave.run_or_exit(commands, STEPS, blocks)
        medians = {name: statistics.median(done.step_s) for name, done in worked.items()}
        pairs = zip(worked["hybrid"].step_s, worked["attention"].step_s, strict=True)
        cases[str(length)] = {
            "median_step_s": medians,
            "hybrid_over_attention": statistics.median(ours / theirs for ours, theirs in pairs),
            "blocks_step_s": {name: done.step_s for name, done in worked.items()},
        }
        print(f"rows of {length}: {cases[str(length)]['median_step_s']}", flush=True)
    return {"tokens": TOKENS, "steps_per_block": STEPS, "blocks": blocks, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="folder of runs to go on with, which is kept")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the results")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, length = arguments.worker
        return interleave.serve(lambda: jaxlm_steps(experiment(name, int(length))))
    if arguments.blocks:
        print(results.write("hybrid_times", results.cpu(), times(arguments.blocks), arguments.out))
    if arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found = losses(arguments.seeds, arguments.runs or Path(folder))
        print(results.write("hybrid", results.cpu(), found, arguments.out))


if __name__ == "__main__":
    main()
