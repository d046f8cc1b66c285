"""What launch.py knows of JAX still holds."""

import sys
import warnings

import jax
import jax.numpy as jnp
from elsewhere import ELSEWHERE

from jaxlm.costs.hardware import Target
from jaxlm.lowering import targets
from kernels_pallas import launch, rms_norm


@ELSEWHERE
def test_triton_lowers_without_a_word(recwarn):
    """The deprecation is silenced in launch.py alone; any other warning, or the end of the lowering, shows here."""
    warnings.filterwarnings("ignore", launch.DEPRECATED, DeprecationWarning)  # pytest resets filters
    device = targets.devices(Target.parse("h200-sxm:1"))[0]
    with jax.set_mesh(jax.sharding.Mesh([device], ("one",))):
        jax.jit(rms_norm).lower(jax.ShapeDtypeStruct((4, 64), jnp.bfloat16)).compile()
    assert not [str(w.message) for w in recwarn.list]
    assert any(f[0] == "ignore" and f[1] and f[1].pattern == launch.DEPRECATED for f in _fresh_filters())


def _fresh_filters():
    """The filters of a process that imported launch.py."""
    import re
    import subprocess

    code = "import warnings, kernels_pallas; [print(f[0], f[1].pattern if f[1] else '') for f in warnings.filters]"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for line in ran.stdout.splitlines():
        action, _, pattern = line.partition(" ")
        yield action, re.compile(pattern) if pattern else None
