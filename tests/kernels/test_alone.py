"""The package kernels_pallas needs only jax and numpy, and nothing else of this repository."""

import subprocess
import sys


def test_it_imports_jax_alone():
    code = """
import sys, jax, jax.numpy, jax.experimental.pallas.tpu, jax.experimental.pallas.triton
before = set(sys.modules)
import kernels_pallas, kernels_pallas.core.registry
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) <= {"kernels_pallas", "jax", "numpy"}
