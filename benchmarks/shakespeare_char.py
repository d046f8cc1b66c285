"""The claim: nanoGPT's character setting reaches nanoGPT's held-out loss (its README: 1.88) in 2,000 steps.

    python benchmarks/shakespeare_char.py --text PATH/TO/tinyshakespeare.txt

Runs `jaxlm train configs/shakespeare_char.toml` with several seeds, nothing changed, and records the loss over the
whole held-out tenth of the text.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import results

CONFIG = Path(__file__).parents[1] / "configs" / "shakespeare_char.toml"


def train(text: Path, seed: int, folder: Path) -> dict:
    began = time.perf_counter()
    code = "import sys; from jaxlm.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "train", str(CONFIG), f"data.text={text}", f"training.seed={seed}"]
    subprocess.run([*command, "--out", str(folder / str(seed)), "--json"], check=True, stdout=subprocess.DEVNULL)
    evaluations = [json.loads(line) for line in (folder / str(seed) / "evaluations.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / str(seed) / "metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "steps": evaluations[-1]["step"],
        "held_out_loss": evaluations[-1]["loss"],
        "held_out_tokens": evaluations[-1]["tokens"],
        "median_step_s": sorted(row["step_s"] for row in metrics)[len(metrics) // 2],
        "wall_s": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [train(arguments.text.resolve(), seed, Path(folder)) for seed in range(arguments.seeds)]
    for row in rows:
        print(row)
    print(results.write("shakespeare_char", results.cpu(), {"rows": rows}))


if __name__ == "__main__":
    main()
