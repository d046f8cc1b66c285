"""Compare a mixture of experts with a dense model of its active size on the quickstart's text; balance a skewed router.

    python benchmarks/mixture.py [--steps 3000] [--seeds 3] [--runs RUNS] [--set model.feed_forward.router.scale=1 …]
    python benchmarks/mixture.py --seeds 0    # the router alone

Both models have six layers of 64 channels, see the same tokens, and differ in nothing else: eight experts of which each
token chooses two, or a dense layer as wide as two. The weights of the chosen two add up to 2, so that the mixture
begins as the dense layer does. The skewed router is the mixture's with a bias that sends every token to the first two
experts; its selection bias, and no loss, has to spread them.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import results
import training_runs
from flax import nnx

from jaxlm.models.config import ModelConfig
from jaxlm.models.doors import Dropout
from jaxlm.models.feed_forward.mixture import MixtureFeedForward
from jaxlm.models.masks import OneDocumentMask
from jaxlm.models.rows import RowContext

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.toml"
EXPERTS, CHOSEN, WIDTH = 8, 2, 64
MIXTURE = {"kind": "mixture", "num_experts": EXPERTS, "experts_per_token": CHOSEN, "d_ff": WIDTH}
BOTH = {
    "model.num_layers": 6,
    "model.d_model": WIDTH,
    "model.attention.num_heads": 4,
    "model.attention.num_kv_heads": 2,
    "training.batch": 8,
    "evaluation.every": 500,
    "evaluation.batches": 40,
    "checkpoint.every": 500,
}
SKEW, RATE, STEPS = 4.0, 0.001, 500  # the rate is the default


def train(name: str, overrides: list[str], seed: int, steps: int, folder: Path) -> dict:
    """Train, from where a run in the folder left off, and return the last held-out loss and metrics of the experts."""
    keys = [f"{key}={value}" for key, value in BOTH.items()]
    keys += [f"training.steps={steps}", f"training.seed={seed}", *overrides]
    ran = training_runs.train(CONFIG, folder / f"{name}-{seed}", keys)
    kept = {key: ran.metrics[-1].get(key) for key in ("expert_load", "router_entropy", "balance_loss")}
    return {"model": name, "seed": seed, **ran.held_out, **{key: x for key, x in kept.items() if x is not None}}


def balanced(steps: int = STEPS, tokens: int = 2048, width: int = 64) -> dict:
    """Return the load of the busiest expert over the mean of one layer, before and after so many moves of its bias."""
    settings = MIXTURE | {
        "router": {"scores": "sigmoid", "selection_bias": True},
        "balance": {"auxiliary_loss": 0.0, "bias_rate": RATE},
    }
    sizes = {"vocab_size": 8, "context_length": tokens, "num_layers": 1, "d_model": width}
    model = ModelConfig(**sizes, attention={"num_heads": 1}, feed_forward=settings)
    layer = MixtureFeedForward(model, nnx.Rngs(0))
    graph, state = nnx.split(layer)
    parameters = nnx.to_pure_dict(state)
    # Tokens have a common part, which the first two experts' columns of the router point at.
    common = jnp.ones((width,)) / width**0.5
    parameters["router"] = parameters["router"].at[:, :CHOSEN].add(SKEW * common[:, None])
    rows = RowContext(jnp.zeros((1, tokens), jnp.int32), OneDocumentMask(tokens), None, Dropout())

    @jax.jit
    def step(parameters: dict, key: jax.Array) -> tuple[dict, jax.Array]:
        x = jax.random.normal(key, (1, tokens, width)) + common[None, None]
        _, auxiliary = nnx.merge(graph, parameters)(x, rows)
        count = auxiliary.counts["selection_bias"]
        moved = parameters["selection_bias"] + RATE * jnp.sign(count.mean() - count)
        return parameters | {"selection_bias": moved}, count.max() / count.mean()

    loads = []
    for key in jax.random.split(jax.random.key(0), steps):
        parameters, load = step(parameters, key)
        loads.append(float(load))
    return {"steps": steps, "bias_rate": RATE, "first_load": loads[0], "last_load": statistics.median(loads[-20:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="folder of runs to go on with, which is kept")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the mixture's runs alone")
    arguments = parser.parse_args()
    skewed = balanced()
    print(skewed)
    print(results.write("selection_bias", results.cpu(), skewed))
    if not arguments.seeds:
        return
    models = {
        "dense": [f"model.feed_forward.d_ff={CHOSEN * WIDTH}"],
        "mixture": [
            *(f"model.feed_forward.{key}={value}" for key, value in MIXTURE.items()),
            f"model.feed_forward.router.scale={float(CHOSEN)}",
            *arguments.set,
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            train(name, overrides, seed, arguments.steps, arguments.runs or Path(folder))
            for seed in range(arguments.seeds)
            for name, overrides in models.items()
        ]
    losses = {name: [row["held_out_loss"] for row in rows if row["model"] == name] for name in models}
    found = {
        "sizes": BOTH | MIXTURE,
        "set": arguments.set,
        "rows": rows,
        "gap": statistics.mean(losses["dense"]) - statistics.mean(losses["mixture"]),
        "spread": max(max(each) - min(each) for each in losses.values()),
    }
    for row in rows:
        print(row)
    print(results.write("mixture", results.cpu(), found))


if __name__ == "__main__":
    main()
