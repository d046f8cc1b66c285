"""Compare the training step on a CPU with PyTorch's. The target is the speed of eager PyTorch; see the results.

    pip install torch==2.13.0
    python benchmarks/train_cpu.py [CONFIG]

Times the training step of a GPT-2-shaped CONFIG (by default configs/shakespeare_char.toml; benchmarks/gpt2_25m.toml is
larger) on the mesh of `jaxlm train`, and the same model, loss, clipping and AdamW in plain PyTorch with its fused
attention, eager and compiled. Each runs in a separate process; blocks of steps alternate, so that all run under the
same conditions. Every step has new random tokens, and initial weights are small: vanishing gradients would be denormal
numbers, which PyTorch multiplies at a tenth of the speed. The first block of each is warm-up. Without PyTorch, only
jaxlm is timed.
"""

import argparse
import importlib.util
import sys
from functools import partial
from pathlib import Path

import interleave
import results
from training_steps import jaxlm_steps, pytorch_steps

from jaxlm import config as configuration

DEFAULT = Path(__file__).parents[1] / "configs" / "shakespeare_char.toml"


WORKERS = {
    "jaxlm": jaxlm_steps,
    "pytorch": pytorch_steps,
    "pytorch-compiled": partial(pytorch_steps, compiled=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="in each block")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return interleave.serve(lambda: WORKERS[arguments.worker](configuration.load(arguments.config)))

    names = list(WORKERS) if importlib.util.find_spec("torch") else ["jaxlm"]
    command = [sys.executable, __file__, str(arguments.config), "--worker"]
    worked = interleave.run_or_exit({name: [*command, name] for name in names}, arguments.steps, arguments.blocks)
    training = configuration.load(arguments.config).training
    tokens, jaxlm_s = training.batch * training.sequence, worked["jaxlm"].step_s
    rows = {name: interleave.row(done.step_s, tokens, jaxlm_s) for name, done in worked.items()}
    for name, row in rows.items():
        print(interleave.describe(name, row))
    described = {"config": arguments.config.name, "steps_per_block": arguments.steps, **rows}
    print(results.write(f"train_cpu-{arguments.config.stem}", results.cpu(), described))


if __name__ == "__main__":
    main()
