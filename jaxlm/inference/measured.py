"""Decoding measured: steps of an engine in which so many sequences draw, and how fast memory can be read at all."""

import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.inference.engine import Engine
from jaxlm.inference.requests import Request, Sampling

_READ_NUMBERS = 1 << 26  # float32 numbers of the array whose sum is timed: far more than a cache holds
_READS = 9


def decode_steps(
    engine: Engine, rows: int, context: int, steps: int, seed: int = 0, text: Sequence[int] | None = None
) -> Callable[[int], int]:
    """Return a function that runs so many dispatches, in each of which `rows` sequences draw a token, or several where
    a dispatch has several steps (`Runner.steps_of`) or drafts, and that returns how many tokens were drawn.

    Each sequence begins with `context` tokens, random ones or a part of a text, which are read before this function
    returns, and draws the likeliest token; no token ends a sequence.

    Args:
      steps: the most steps that will be run.
      text: tokens, of which each sequence gets the next `context`; they begin again at the end.

    Raises InputError where the engine takes fewer sequences, or shorter ones.
    """
    if rows > engine.settings.slots or context + steps * (1 + engine.settings.drafts) + 1 > engine.longest:
        raise InputError(
            f"{rows} sequences of {context} tokens and {steps} steps exceed the engine's {engine.settings.slots} "
            f"sequences of {engine.longest} tokens"
        )
    draw, vocabulary = np.random.default_rng(seed), engine.model.vocab_size
    for stream in range(rows):
        prompt = draw.integers(0, vocabulary, context).tolist()
        if text is not None:
            prompt = np.resize(np.roll(text, -stream * context), context).tolist()
        engine.submit(Request(prompt, engine.longest - context, Sampling(0.0), stream=stream, ignores_stop_tokens=True))
    drawing: set[int] = set()
    while len(drawing) < rows:
        drawing |= {event.id for event in engine.step() if event.token is not None}

    def run(n: int) -> int:
        return sum(event.token is not None for _ in range(n) for event in engine.step())

    return run


def read_bytes_per_s() -> float:
    """Return the bandwidth at which a sum reads an array far larger than any cache, on one device."""
    x = jnp.ones(_READ_NUMBERS, jnp.float32)
    total = jax.jit(jnp.sum)
    jax.block_until_ready(total(x))
    times = []
    for _ in range(_READS):
        begun = time.perf_counter()
        jax.block_until_ready(total(x))
        times.append(time.perf_counter() - begun)
    return x.nbytes / statistics.median(times)
