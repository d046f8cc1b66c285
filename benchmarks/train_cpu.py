"""The question: how long a training step takes on a CPU beside PyTorch. The aim is level with eager; see the results.

    pip install torch==2.13.0
    python benchmarks/train_cpu.py [CONFIG]

Times the training step of a GPT-2-shaped CONFIG (by default configs/shakespeare_char.toml; benchmarks/gpt2_25m.toml is
the larger one) on the mesh that `jaxlm train` makes, and the same model, loss, clipping and AdamW in plain PyTorch
with its fused attention, eager and compiled. Each runs in a process of its own; blocks of steps alternate, so that all
see the same machine. Every step has new random tokens and all weights begin small, for gradients that vanish are
denormal numbers, which PyTorch multiplies at a tenth of the speed. The first block of each is warm-up. Without
PyTorch it times jaxlm alone.
"""

import argparse
import importlib.util
import sys
from functools import partial
from pathlib import Path

import results
import turns
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
        return turns.answer(lambda: WORKERS[arguments.worker](configuration.load(arguments.config)))

    names = list(WORKERS) if importlib.util.find_spec("torch") else ["jaxlm"]
    command = [sys.executable, __file__, str(arguments.config), "--worker"]
    worked = turns.take_turns({name: [*command, name] for name in names}, arguments.steps, arguments.blocks)
    if failed := [f"{name}: {done.failed}" for name, done in worked.items() if done.failed]:
        raise SystemExit("\n".join(failed))
    training = configuration.load(arguments.config).training
    tokens, beside = training.batch * training.sequence, worked["jaxlm"].step_s
    rows = {name: turns.row(done.step_s, tokens, beside) for name, done in worked.items()}
    for name, row in rows.items():
        print(turns.describe(name, row))
    described = {"config": arguments.config.name, "steps_per_block": arguments.steps, **rows}
    print(results.write(f"train_cpu-{arguments.config.stem}", results.cpu(), described))


if __name__ == "__main__":
    main()
