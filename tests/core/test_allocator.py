"""Temporaries of XLA's CPU programs stay in memory that the process already has."""

import subprocess
import sys

import pytest

from jaxlm.core import allocator

# Prints the page faults of calls of a program with 64 MiB of temporaries, up to the first that has few. A thread of XLA
# frees them, on a busy machine after the next call has allocated its own; at most 32 calls are under way at once.
PROGRAM = """
import resource
from jaxlm.parallel.devices import start
start(1)
import jax
import jax.numpy as jnp

@jax.jit
def step(left, right):
    for _ in range(2):
        left = jnp.exp(left @ right) @ right.T
    return left

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jax.block_until_ready(step(left, right))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

left, right = jnp.zeros((4096, 8)), jnp.ones((8, 4096))
assert step.lower(left, right).compile().memory_analysis().temp_size_in_bytes >= 2**26
for _ in range(34):
    print(found := faults())
    if found < 2**26 // 4096 // 4:
        break
"""


@pytest.mark.skipif(allocator.platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is set")
def test_a_call_s_temporaries_are_not_cleared_again_page_by_page():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    faults = [*map(int, run.stdout.split())]
    assert faults[-1] < 2**26 // 4096 // 4, faults
