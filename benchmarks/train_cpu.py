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
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import results

from jaxlm import config as configuration

DEFAULT = Path(__file__).parents[1] / "configs" / "shakespeare_char.toml"


def jaxlm_steps(experiment):
    """A function that runs n steps and waits for the last."""
    import jax
    import numpy as np

    from jaxlm import sharding
    from jaxlm.cli.devices import make_mesh
    from jaxlm.training.step import jit_steps, make_steps

    training, draw = experiment.training, np.random.default_rng(0)
    shape = training.batch, training.sequence
    mesh = make_mesh(experiment)
    with jax.set_mesh(mesh):
        compiled = jit_steps(make_steps(experiment.model, training, experiment.optimizer), mesh)
        state = compiled.init()
    positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))

    def batch():
        tokens, targets = draw.integers(0, experiment.model.vocabulary, (2, *shape), dtype=np.int32)
        host = {"tokens": tokens, "targets": targets, "segments": np.ones(shape, np.int32), "positions": positions}
        return sharding.put_batch(host, mesh)

    def run(n: int) -> None:
        nonlocal state
        with jax.set_mesh(mesh):
            for _ in range(n):
                state, metrics = compiled.train(state, batch())
            jax.block_until_ready(metrics)

    return run


def pytorch_steps(experiment, compiled=False):
    """The same in PyTorch."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    model, training, optimizer = experiment.model, experiment.training, experiment.optimizer
    attention, hidden = model.attention, model.feed_forward.hidden
    if model.position.kind != "learned" or model.norm.kind != "layer" or model.feed_forward.gated:
        raise SystemExit("the PyTorch model has GPT-2's shape only: learned positions, layer norm, no gate")
    biased = model.norm.bias
    heads, width, head_width = attention.heads, model.width, attention.head_width

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width, bias=biased) for _ in range(2))
            self.qkv = nn.Linear(width, 3 * heads * head_width, bias=attention.qkv_bias)
            self.out = nn.Linear(heads * head_width, width, bias=attention.output_bias)
            self.up = nn.Linear(width, hidden, bias=model.feed_forward.bias)
            self.down = nn.Linear(hidden, width, bias=model.feed_forward.bias)

        def forward(self, x):
            batch, length, _ = x.shape
            split = self.qkv(self.norms[0](x)).view(batch, length, 3, heads, head_width).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*split, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
            activate = F.gelu if model.feed_forward.activation == "gelu" else lambda h: F.gelu(h, approximate="tanh")
            return x + self.down(activate(self.up(self.norms[1](x))))

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(model.vocabulary, width)
            self.positions = nn.Embedding(model.context, width)
            self.blocks = nn.ModuleList(Block() for _ in range(model.layers))
            self.norm = nn.LayerNorm(width, bias=biased)

        def forward(self, tokens, targets):
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            logits = self.norm(x) @ self.tokens.weight.T
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    net = Transformer()
    for parameter in net.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=model.initializer_std)
    forward = torch.compile(net) if compiled else net
    betas = optimizer.beta1, optimizer.beta2
    decay = optimizer.weight_decay
    adamw = torch.optim.AdamW(net.parameters(), lr=optimizer.learning_rate, betas=betas, weight_decay=decay)

    def run(n: int) -> None:
        for _ in range(n):
            tokens, targets = torch.randint(0, model.vocabulary, (2, training.batch, training.sequence))
            loss = forward(tokens, targets)
            adamw.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), optimizer.clip_norm)
            adamw.step()

    return run


WORKERS = {
    "jaxlm": jaxlm_steps,
    "pytorch": pytorch_steps,
    "pytorch-compiled": partial(pytorch_steps, compiled=True),
}


def work(name: str, config: Path) -> None:
    """Answer each number of steps on standard input with the seconds that a step took."""
    run = WORKERS[name](configuration.load(config))
    for line in sys.stdin:
        steps = int(line)
        began = time.perf_counter()
        run(steps)
        print(json.dumps((time.perf_counter() - began) / steps), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="in each block")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker, arguments.config)

    def start(name: str) -> subprocess.Popen:
        command = [sys.executable, __file__, str(arguments.config), "--worker", name]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def block(process: subprocess.Popen) -> float:
        process.stdin.write(f"{arguments.steps}\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    names = list(WORKERS) if importlib.util.find_spec("torch") else ["jaxlm"]
    processes = {name: start(name) for name in names}
    for process in processes.values():
        block(process)
    times = {name: [] for name in processes}
    for _ in range(arguments.blocks):
        for name, process in processes.items():
            times[name].append(block(process))
    for process in processes.values():
        process.stdin.close()
        process.wait()
    training = configuration.load(arguments.config).training
    rows = {
        name: {
            "median_step_s": statistics.median(seconds),
            "min_step_s": min(seconds),
            "median_tokens_per_s": training.batch * training.sequence / statistics.median(seconds),
            "jaxlm_over_this": statistics.median(j / s for j, s in zip(times["jaxlm"], seconds, strict=True)),
            "blocks_step_s": seconds,
        }
        for name, seconds in times.items()
    }
    for name, row in rows.items():
        print(
            f"{name}: {1e3 * row['median_step_s']:.1f} ms per step, {row['median_tokens_per_s']:,.0f} tokens/s; "
            f"jaxlm takes {row['jaxlm_over_this']:.2f} of its time (median of the paired ratios)"
        )
    described = {"config": arguments.config.name, "steps_per_block": arguments.steps, **rows}
    print(results.write(f"train_cpu-{arguments.config.stem}", results.cpu(), described))


if __name__ == "__main__":
    main()
