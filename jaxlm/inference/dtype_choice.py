"""The dtype that a CPU computes a step of decoding in fastest, as measured there."""

import statistics
import time

import jax
import jax.numpy as jnp

from jaxlm.models.execution_config import Dtype

_INPUTS, _OUTPUTS = 2048, 8192  # of a matrix like those of a feed-forward layer of a 1B model: beyond any cache
_ROUNDS = 5


def seconds_of(dtype: str, rows: int = 2) -> float:
    """Return the median time of a product of so many rows and a matrix by its outputs, as the engine keeps it."""
    x, matrix = jax.random.normal(jax.random.key(0), (rows, _INPUTS)), jnp.ones((_OUTPUTS, _INPUTS))
    x, matrix = x.astype(dtype), matrix.astype(dtype)
    product = jax.jit(lambda x, matrix: x @ matrix.T)
    jax.block_until_ready(product(x, matrix))
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready(product(x, matrix))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def of_published(dtype: Dtype) -> tuple[Dtype, str]:
    """Return the dtype to compute in with weights for which `dtype` is fine enough, and why in words: the fastest dtype
    that is no coarser than `dtype`."""
    if dtype == "float32" or jax.default_backend() != "cpu" or jax.process_count() > 1:
        return dtype, "as the weights are stored"
    return fastest()


def fastest() -> tuple[Dtype, str]:
    """Return "float32" or "bfloat16", and why in words: what is measured on a CPU, float32 on the CPUs of several
    processes, and bfloat16 on other chips."""
    if jax.default_backend() != "cpu":
        return "bfloat16", "which this chip multiplies fastest"
    if jax.process_count() > 1:  # each would measure for itself, and all must run one program
        return "float32", "as several processes on CPUs do"
    measured: dict[Dtype, float] = {"float32": seconds_of("float32"), "bfloat16": seconds_of("bfloat16")}
    chosen = min(measured, key=measured.__getitem__)
    times = ", ".join(f"{1e3 * seconds:.1f} ms in {dtype}" for dtype, seconds in measured.items())
    return chosen, f"as measured: 2 rows by {_INPUTS} × {_OUTPUTS} take {times}"
