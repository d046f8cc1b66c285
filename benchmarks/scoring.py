"""Compare the engine's scoring of short requests with batches of padded rows: continuations a second.

    python benchmarks/scoring.py MODEL [--requests 64] [--batch 16] [--dtype float32]

MODEL is a directory of published weights, or "gpt2-124m" or "llama-125m": such a model with random weights. Requests
are as tasks have them: contexts of 20 to 100 random tokens and continuations of 1 to 8, each context with one
continuation, or with four to choose from. The batches are forward passes without a cache over rows that begin with the
longest, padded to a power of two. Both score new requests in each step, in a separate process each; blocks of steps
alternate, and the first block of each is warm-up.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import decode
import interleave
import numpy as np
import results

from jaxlm.core import accelerators

Pairs = list[tuple[list[int], list[int]]]
Score = Callable[[Pairs], dict[int, float]]  # ln p of each continuation, by its index


def pairs(seed: int, requests: int, choices: int, vocabulary: int) -> Pairs:
    """Return so many (context, continuation) of random ids, of which `choices` after one another have one context."""
    draw, found = np.random.default_rng(seed), []
    for _ in range(requests // choices):
        context = draw.integers(0, vocabulary, draw.integers(20, 101)).tolist()
        found += [(context, draw.integers(0, vocabulary, draw.integers(1, 9)).tolist()) for _ in range(choices)]
    return found


def engine_scores(model: Path, batch: int, dtype: str) -> tuple[Score, int]:
    """Return a function that scores pairs by the engine, as `jaxlm eval --tasks` does, and the size of the vocabulary.
    The engine batches by itself."""
    from jaxlm import api
    from jaxlm.inference.scoring import Scorer

    engine = api.load(model, dtype=dtype).engine()
    engine.warm(scores=True)
    scorer = Scorer(engine)
    return lambda pairs: {at: score.logprob for at, score in scorer(pairs)}, engine.model.vocab_size


def batch_scores(model: Path, batch: int, dtype: str) -> tuple[Score, int]:
    """Return a function that scores pairs, `batch` rows at a time, the longest first, and the size of the
    vocabulary."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxlm import api
    from jaxlm.models import tree
    from jaxlm.models.positions import cache_causal_mask
    from kernels_pallas.linear_cross_entropy.xla import cross_entropy

    loaded = api.load(model, dtype=dtype)
    graph, longest = tree.abstract(loaded.config)[0], loaded.config.context_length

    @jax.jit
    def logprobs(parameters: Any, tokens_BT: jax.Array, length_B: jax.Array) -> jax.Array:
        module = nnx.merge(graph, parameters)
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
        hidden_BTD, _, _ = module.hidden(tokens_BT, positions_BT, cache_causal_mask(positions_BT, length_B))
        losses_BT, _ = cross_entropy(module.logits(hidden_BTD), jnp.roll(tokens_BT, -1, axis=1))
        return -losses_BT

    def scored(pairs: Pairs) -> dict[int, float]:
        rows, found = [[*context, *continuation] for context, continuation in pairs], {}
        order = sorted(range(len(rows)), key=lambda at: -len(rows[at]))
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            length = min(longest, 1 << (len(rows[chosen[0]]) - 1).bit_length())
            tokens, lengths = np.zeros((batch, length), np.int32), np.zeros(batch, np.int32)
            for place, at in enumerate(chosen):
                tokens[place, : len(rows[at])], lengths[place] = rows[at], len(rows[at])
            made = jax.device_get(logprobs(loaded.parameters, tokens, lengths))
            for place, at in enumerate(chosen):
                end = len(rows[at]) - 1
                found[at] = float(made[place, end - len(pairs[at][1]) : end].sum())
        return found

    return scored, loaded.config.vocab_size


WORKERS = {"engine": engine_scores, "batches": batch_scores}


def worker(name: str, model: Path, requests: int, choices: int, batch: int, dtype: str) -> interleave.Worker:
    """Return a worker whose steps score `requests` pairs, other ones in each."""
    score, vocabulary = WORKERS[name](model, batch, dtype)
    first = score(pairs(0, requests, choices, vocabulary))
    seed = 0

    def run(n: int) -> None:
        nonlocal seed
        for _ in range(n):
            seed += 1
            score(pairs(seed, requests, choices, vocabulary))

    return interleave.Worker(run, lambda: {"mean_logprob": float(np.mean([*first.values()]))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=64, help="continuations in a step (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="rows of a batch of padded rows (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--choices", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    accelerators.choose()
    sizes = {"requests": arguments.requests, "batch": arguments.batch, "dtype": arguments.dtype}
    if arguments.worker:
        made = partial(worker, arguments.worker, Path(arguments.model), choices=arguments.choices, **sizes)
        return interleave.serve(made)
    with tempfile.TemporaryDirectory() as folder:
        known = arguments.model in decode.MODELS
        model = decode.random_model(arguments.model, Path(folder)) if known else Path(arguments.model)
        cases = []
        for choices in (1, 4):
            options = [f"--{name}={value}" for name, value in (*sizes.items(), ("choices", choices))]
            commands = {name: [sys.executable, __file__, str(model), *options, f"--worker={name}"] for name in WORKERS}
            worked = interleave.run_or_exit(commands, 1, arguments.blocks)
            case = {"choices": choices}
            for name, done in worked.items():
                row = interleave.row(done.step_s, arguments.requests, worked["engine"].step_s)
                rate = row.pop("median_tokens_per_s")
                case[name] = row | {"median_requests_per_s": rate} | done.facts
                print(f"{choices} of a context, {name}: {rate:.1f} requests/s")
            print(f"  the engine takes {case['batches']['jaxlm_over_this']:.2f} of the time of batches")
            cases.append(case)
    name = f"scoring-{Path(arguments.model).name}-{arguments.dtype}"
    print(results.write(name, results.cpu(), {**sizes, "cases": cases}, arguments.out))


if __name__ == "__main__":
    main()
