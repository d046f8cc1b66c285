"""Check that 2,000 steps in nanoGPT's character setting for a CPU reach its held-out loss (its README: 1.88).

    python benchmarks/shakespeare_char.py --text PATH/TO/tinyshakespeare.txt

Runs `jaxlm train configs/shakespeare_char.toml` with several seeds, at its own and at nanoGPT's learning rate, and
records the loss over the entire held-out tenth of the text.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import results

CONFIG = Path(__file__).parents[1] / "configs" / "shakespeare_char.toml"
LEARNING_RATES = (tomllib.loads(CONFIG.read_text())["optimizer"]["learning_rate"], 1e-3)  # the second is nanoGPT's


def train(text: Path, learning_rate: float, seed: int, folder: Path) -> dict:
    """Train once and return the last held-out loss."""
    run = folder / f"{learning_rate}-{seed}"
    code = "import sys; from jaxlm.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "train", str(CONFIG), f"data.text={text}", f"training.seed={seed}"]
    command += [f"optimizer.learning_rate={learning_rate}", "--out", str(run), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    return {
        "learning_rate": learning_rate,
        "seed": seed,
        "steps": evaluations[-1]["step"],
        "held_out_loss": evaluations[-1]["loss"],
        "held_out_tokens": evaluations[-1]["tokens"],
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
