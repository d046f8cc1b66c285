"""Compare a mixture of experts on a CPU with transformers' `grouped_mm`, and its training step with a dense model's.

    pip install torch==2.13.0 transformers==5.24.0
    python benchmarks/mixture_speed.py [--blocks 12]

The model is Qwen3-MoE's with random weights: 8 layers, 512 channels, 16 experts of 512 of which each token chooses two
(111 million parameters, 23 million active), in float32. Cases are the decoding of one and of eight sequences after 256
tokens, the reading of a prompt of 1,024 tokens, and a training step of 2 × 256 tokens with AdamW. jaxlm decodes and
reads in its engine, exact, as it is served; transformers runs its forward pass. "dense" is the training step of jaxlm
on the model with dense layers of the active width. Each runs in a separate process; blocks of steps alternate, and the
first of each is warm-up.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import interleave
import numpy as np
import results
import tomli_w
from decode import engine_steps, transformers_steps
from training_steps import jaxlm_steps

EXPERTS, CHOSEN, WIDTH = 16, 2, 512
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
}
EXPERTS_OF_PEER = "grouped_mm"  # the fastest that transformers has
CONTEXT, PROMPT, ROWS, TOKENS = 256, 1024, 2, 256
TRAINING = f"""
[training]
batch = {ROWS}
sequence = {TOKENS}
steps = 1000
[optimizer]
kind = "adamw"
learning_rate = 1e-3
[execution]
dtype = "float32"
[data]
text = "-"
"""


def published(folder: Path) -> Path:
    """Write the model with random weights, and return its directory."""
    import torch
    from transformers import AutoConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(AutoConfig.for_model("qwen3_moe", **SIZES)).save_pretrained(folder / "model")
    return folder / "model"


def peer(model: Path):
    """Return transformers' model with its fastest experts."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation=EXPERTS_OF_PEER)


def prefill_engine(model: Path) -> interleave.Worker:
    """Return a worker in whose steps an engine reads a prompt that it has not seen, and draws a token."""
    from jaxlm import api
    from jaxlm.inference.requests import Request, Sampling
    from jaxlm.inference.settings import EngineSettings

    engine, draw = api.load(model, dtype="float32", engine=EngineSettings(slots=1)).engine(), np.random.default_rng(0)

    def run(n: int) -> None:
        for stream in range(n):
            prompt = draw.integers(0, SIZES["vocab_size"], PROMPT).tolist()
            engine.submit(Request(prompt, 1, Sampling(0.0), stream=stream, ignores_stop_tokens=True))
            while not any(event.token is not None for event in engine.step()):
                pass
            while engine.step():  # ends what the draw ended
                pass

    return interleave.Worker(run, dict)


def prefill_peer(model: Path) -> interleave.Worker:
    """Return a worker with transformers' pass over a prompt, with the logits of its last token."""
    import torch

    loaded = peer(model).eval()

    @torch.no_grad()
    def run(n: int) -> None:
        for _ in range(n):
            loaded(torch.randint(0, SIZES["vocab_size"], (1, PROMPT)), use_cache=True, logits_to_keep=1)

    return interleave.Worker(run, dict)


def train(model: Path, dense: bool = False) -> interleave.Worker:
    """Return a worker with jaxlm's training step, of the mixture or of a dense model of its active width."""
    from jaxlm import config
    from jaxlm.families.directory import PublishedModel

    described = PublishedModel(model).model
    if dense:
        layer = {"kind": "dense", "d_ff": CHOSEN * WIDTH, "activation": "silu", "gated": True}
        described = described.model_validate(described.model_dump(exclude_none=True) | {"feed_forward": layer})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "training.toml"
        file.write_text(TRAINING + tomli_w.dumps({"model": described.model_dump(exclude_none=True, mode="json")}))
        return jaxlm_steps(config.load(file))


def train_peer(model: Path) -> interleave.Worker:
    """Return a worker with the same step in PyTorch: transformers' model and loss, clipping, and AdamW."""
    import torch

    loaded = peer(model).train()
    adamw = torch.optim.AdamW(loaded.parameters(), lr=1e-3)

    def run(n: int) -> None:
        for _ in range(n):
            ids = torch.randint(0, SIZES["vocab_size"], (ROWS, TOKENS))
            adamw.zero_grad(set_to_none=True)
            loaded(ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(loaded.parameters(), 1.0)
            adamw.step()

    return interleave.Worker(run, dict)


Make = Callable[[Path], interleave.Worker]
CASES: dict[str, dict[str, Make]] = {
    f"decode, {rows} row{'s' * (rows > 1)}": {
        "jaxlm": partial(engine_steps, rows=rows, context=CONTEXT, width="float32", exact=True),
        "transformers": partial(
            transformers_steps, rows=rows, context=CONTEXT, width="float32", experts_implementation=EXPERTS_OF_PEER
        ),
    }
    for rows in (1, 8)
}
CASES[f"prompt of {PROMPT}"] = {"jaxlm": prefill_engine, "transformers": prefill_peer}
CASES[f"training step of {ROWS} × {TOKENS}"] = {
    "jaxlm": train,
    "transformers": train_peer,
    "dense": partial(train, dense=True),
}
STEPS = dict(zip(CASES, (20, 10, 2, 2), strict=True))  # in each block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the results")
    parser.add_argument("--worker", nargs=3, metavar=("CASE", "NAME", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        case, name, model = arguments.worker
        return interleave.serve(lambda: CASES[case][name](Path(model)))
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        model = published(Path(folder))
        for case, workers in CASES.items():
            commands = {name: [sys.executable, __file__, "--worker", case, name, str(model)] for name in workers}
            worked = interleave.run_or_exit(commands, STEPS[case], arguments.blocks)
            rows = {name: interleave.row(done.step_s, 1, worked["jaxlm"].step_s) for name, done in worked.items()}
            print(case)
            for name, row in rows.items():
                print(f"  {name}: {1e3 * row['median_step_s']:.1f} ms; jaxlm takes {row['jaxlm_over_this']:.2f} of it")
            cases[case] = rows
    described = {"sizes": SIZES, "context": CONTEXT, "steps_per_block": STEPS, "cases": cases}
    print(results.write("mixture_speed", results.cpu(), described, arguments.out))


if __name__ == "__main__":
    main()
