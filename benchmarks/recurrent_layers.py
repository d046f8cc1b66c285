"""Time the training of one recurrent layer on a CPU, beside its recurrence token by token and beside attention.

    python benchmarks/recurrent_layers.py [--rounds 5] [--tokens 1024]

A layer of 512 channels has 8 heads of 64 channels, and states of 64 × 64. What is timed is its output of 2 sequences in
float32, with the gradients of its input and its parameters from given ones of its output; the recurrence alone, without
products and convolutions; and the products of the recurrent layers alone, which are the same in all of them. They take
turns, each with a call before that is not timed: the memory that a recurrence frees slows down what follows it.
Medians are written to the results of this processor.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import results
from flax import nnx

import kernels_pallas
from jaxlm.models.attention import attention
from jaxlm.models.cache import OwnTokens
from jaxlm.models.config import ModelConfig
from jaxlm.models.doors import Dropout
from jaxlm.models.rows import RowContext
from jaxlm.parallel.mesh import make_mesh
from kernels_pallas.flash_attention import KeyRange

CHANNELS, HEADS, SIZE, SEQUENCES = 512, 8, 64, 2
LAYERS: dict[str, dict[str, Any]] = {
    "attention": {"kind": "gqa", "num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": SIZE},
    "gated_delta": {
        "kind": "gated_delta",
        "num_key_heads": HEADS,
        "num_value_heads": HEADS,
        "key_dim": SIZE,
        "value_dim": SIZE,
    },
    "mamba2": {"kind": "mamba2", "num_heads": HEADS, "head_dim": SIZE, "state_dim": SIZE, "num_groups": HEADS},
}
OPERATIONS = {"gated_delta": "gated_delta_rule", "mamba2": "state_space"}


def training(kind: str, tokens: int, by_recurrence: bool = False) -> Callable[[], Any]:
    """Return a compiled call that computes a layer forward and backward."""
    model = ModelConfig.model_validate(
        {
            "vocab_size": 256,
            "context_length": tokens,
            "d_model": CHANNELS,
            "num_layers": 1,
            "attention": LAYERS[kind],
            "position": {"kind": "none"},
            "feed_forward": {"d_ff": CHANNELS},
        }
    )
    graph, parameters = nnx.split(attention(model, nnx.Rngs(0)))
    positions = jnp.broadcast_to(jnp.arange(tokens), (SEQUENCES, tokens))
    rows = RowContext(positions, KeyRange(jnp.zeros_like(positions), positions + 1), None, Dropout(), None)

    def layer(parameters: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, parameters)(x, rows, OwnTokens())[0]

    x = jax.random.normal(jax.random.key(0), (SEQUENCES, tokens, CHANNELS))
    if not by_recurrence:
        return with_gradients(layer, parameters, x)
    operation = getattr(kernels_pallas, OPERATIONS[kind])

    def token_by_token(*arrays: jax.Array, **options: Any) -> Any:
        return operation(*arrays, implementation="reference")

    with patch.object(kernels_pallas, OPERATIONS[kind], token_by_token):
        return with_gradients(layer, parameters, x)


def with_gradients(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Return a compiled call that computes a function of arguments, and their gradients from given ones of it."""

    def results(given: Any, *arguments: Any) -> Any:
        outputs, pull_back = jax.vjp(function, *arguments)
        return outputs, pull_back(given)

    with jax.set_mesh(make_mesh()):
        outputs = jax.eval_shape(function, *arguments)
        given = jax.tree.map(lambda each: jax.random.normal(jax.random.key(9), each.shape), outputs)
        program = jax.jit(results).lower(given, *arguments).compile()
    return lambda: jax.block_until_ready(program(given, *arguments))


def alone(kind: str, tokens: int, implementation: str) -> Callable[[], Any]:
    """Return a compiled call that computes the recurrence of a layer forward and backward."""
    shapes = [(SEQUENCES, tokens, HEADS, SIZE)] * 3 + [(SEQUENCES, tokens, HEADS)] * 2
    arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    arrays[3], arrays[4] = -jax.nn.softplus(arrays[3]), jax.nn.sigmoid(arrays[4])
    arrays += [jnp.ones(HEADS)] * (kind == "mamba2")
    state = jnp.zeros((SEQUENCES, HEADS, SIZE, SIZE))
    operation = getattr(kernels_pallas, OPERATIONS[kind])

    return with_gradients(lambda *arrays: operation(*arrays, state, implementation=implementation)[0], *arrays)


def products(tokens: int) -> Callable[[], Any]:
    """Return a compiled call that computes the products of a recurrent layer forward and backward."""
    matrices = [jax.random.normal(jax.random.key(i), (CHANNELS, CHANNELS)) for i in range(5)]
    x, y = (jax.random.normal(jax.random.key(i), (SEQUENCES * tokens, CHANNELS)) for i in (5, 6))

    def layer(x: jax.Array, y: jax.Array, matrices: list[jax.Array]) -> list[jax.Array]:
        *inward, outward = matrices
        return [*(x @ matrix for matrix in inward), y @ outward]

    return with_gradients(layer, x, y, matrices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    runs = {kind: training(kind, arguments.tokens) for kind in LAYERS}
    runs |= {f"{kind}, token by token": training(kind, arguments.tokens, by_recurrence=True) for kind in OPERATIONS}
    for kind in OPERATIONS:
        runs[f"{kind} alone"] = alone(kind, arguments.tokens, "xla")
        runs[f"{kind} alone, token by token"] = alone(kind, arguments.tokens, "reference")
    runs["products alone"] = products(arguments.tokens)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            run()
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, each in medians.items():
        print(f"{name}: {1e3 * each:.1f} ms, {each / medians['attention']:.2f} of attention's time")
    for name in runs.keys() & {each.removesuffix(", token by token") for each in runs if "token" in each}:
        print(f"{name} takes {medians[name] / medians[f'{name}, token by token']:.3f} of its recurrence's")
    shape = {"channels": CHANNELS, "heads": HEADS, "head_dim": SIZE, "sequences": SEQUENCES, "tokens": arguments.tokens}
    print(results.write("recurrent_layers", results.cpu(), {**shape, "rounds": arguments.rounds, "median_s": medians}))


if __name__ == "__main__":
    main()
