"""Check that 2,000 steps in nanoGPT's character setting for a CPU reach its held-out loss (its README: 1.88).

    python benchmarks/shakespeare_char.py --text PATH/TO/tinyshakespeare.txt

Runs `jaxlm train configs/shakespeare_char.toml` with several seeds, at its own and at nanoGPT's learning rate, and
records the loss over the entire held-out tenth of the text.
"""

import argparse
import tempfile
import tomllib
from pathlib import Path

import results
import training_runs

CONFIG = Path(__file__).parents[1] / "configs" / "shakespeare_char.toml"
LEARNING_RATES = (tomllib.loads(CONFIG.read_text())["optimizer"]["learning_rate"], 1e-3)  # the second is nanoGPT's


def train(text: Path, learning_rate: float, seed: int, folder: Path) -> dict:
    """Train once and return the last held-out loss."""
    keys = [f"data.text={text}", f"training.seed={seed}", f"optimizer.learning_rate={learning_rate}"]
    last = training_runs.train(CONFIG, folder / f"{learning_rate}-{seed}", keys).evaluations[-1]
    return {
        "learning_rate": learning_rate,
        "seed": seed,
        "steps": last["step"],
        "held_out_loss": last["loss"],
        "held_out_tokens": last["tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            train(arguments.text.resolve(), learning_rate, seed, Path(folder))
            for learning_rate in LEARNING_RATES
            for seed in range(arguments.seeds)
        ]
    for row in rows:
        print(row)
    print(results.write("shakespeare_char", results.cpu(), {"rows": rows}))


if __name__ == "__main__":
    main()
