"""Outside jit an operation is compiled once: other numbers compile nothing again, other options do."""

import contextlib
import copy
import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrices import sampled
from numerics import served

from kernels_pallas import rms_norm, softmax
from kernels_pallas.core import interpreted, target
from kernels_pallas.core.registry import OPERATIONS
from kernels_pallas.flash_attention import causal, flash_attention, packed, sliding_window

CALLS = [
    pytest.param(operation, name, id=f"{operation.name}-{name}", marks=[pytest.mark.slow] * (name == "mosaic_gpu"))
    for operation in OPERATIONS.values()
    for name in operation.implementations
]


@contextlib.contextmanager
def programs(caplog):
    """Yield a list that holds, after the block, the names of the programs compiled inside."""
    names = []
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        yield names
    names += [line for line in caplog.messages if line.startswith("Finished XLA compilation")]


SAMPLE = ("rms_norm-triton", "matmul-triton", "linear_cross_entropy-mosaic_tpu", "flash_attention-triton")


@pytest.mark.parametrize("operation, implementation", sampled(CALLS, SAMPLE))
@interpreted()
def test_results_and_gradients_are_compiled_once(caplog, operation, implementation):
    """No recompilation, even if options and masks are created anew each time."""
    case, dtype = served(operation, implementation)[0]

    def run(seed):
        arguments, options = case.draw(dtype, seed), copy.deepcopy(dict(case.options))
        inputs = {name: arguments.pop(name) for name in case.differentiable()}

        def results(inputs):
            how = dict(implementation=implementation)
            return operation.function(**inputs, **arguments, **options, **how)

        made, pull_back = jax.vjp(results, inputs)
        return jax.block_until_ready((made, pull_back(made)))

    jax.clear_caches()  # another test may have run the same
    with programs(caplog) as first:
        run(0)
    with programs(caplog):  # JAX 0.12 recompiles once if traced before all of Pallas was imported
        run(1)
    with programs(caplog) as third:
        run(2)
    assert first and third == []


@interpreted()
def test_mapped_it_is_compiled_once(caplog):
    def run(seed):
        x = jax.random.normal(jax.random.key(seed), (3, 8, 48))
        return jax.vmap(lambda x: softmax(x, implementation="triton"))(x)

    run(0)
    run(1)
    with programs(caplog) as more:
        run(2)
    assert more == []


@interpreted()
def test_other_options_and_other_masks_are_other_programs():
    x = jax.random.normal(jax.random.key(0), (2, 32, 2, 16))
    ids = jnp.arange(32)[None].repeat(2, 0) // 10
    masks = None, causal(32), sliding_window(32, 5), packed(ids), packed(ids // 2)
    for key_range, soft_cap in (*((mask, None) for mask in masks), (None, 2.0), (masks[-1], 2.0)):
        run = dict(key_range=key_range, soft_cap=soft_cap)
        got = flash_attention(x, x, x, **run, implementation="triton")
        wanted = flash_attention(x, x, x, **run, implementation="reference")
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@interpreted()
def test_another_chip_has_a_program_of_its_own(monkeypatch, caplog):
    """Blocks depend on the chip's properties."""

    def run():
        return jax.grad(lambda x: jnp.sum(rms_norm(x, implementation="triton")))(jnp.ones((8, 48)))

    run()
    chip = dataclasses.replace(target.current(), cores=7)
    monkeypatch.setattr(target, "current", lambda: chip)
    with programs(caplog) as more:
        run()
    assert more
