"""Rows compiled for GPUs that are not here: how much of an SM they use."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from markers import ELSEWHERE
from matrices import sampled

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from jaxlm.lowering.assembly import assemble, compile_to_ptx
from kernels_pallas import layer_norm, rms_norm

REGISTERS, THREADS = 2**16, 2048  # of an SM (CUDA C++ Programming Guide, table of compute capabilities)
# Little's law: 3 TB/s over 132 SMs, for the 600 ns that a load takes.
IN_FLIGHT = 3e12 / 132 * 600e-9


def blocks_of_an_sm(kernel):
    """Return how many blocks run on an SM at once; registers are given out by eights."""
    return min(REGISTERS // (-(-kernel.registers // 8) * 8 * kernel.threads), THREADS // kernel.threads)


CALLS = [
    pytest.param(function, implementation, chip, id=f"{function.__name__}-{implementation}-{chip}")
    for function in (rms_norm, layer_norm)
    for implementation, chip in (
        ("triton", "h100-sxm5:1"),
        ("triton", "a100-sxm4-80g:1"),
        ("mosaic_gpu", "h100-sxm5:1"),
    )
]


@ELSEWHERE
@pytest.mark.parametrize(
    "function, implementation, chip",
    sampled(CALLS, ["layer_norm-triton-h100-sxm5:1", "rms_norm-mosaic_gpu-h100-sxm5:1"]),
)
def test_a_norms_gradient_keeps_memory_busy(function, implementation, chip):
    """Compile it for 4,096 columns in bfloat16: nothing spills, and enough rows are in flight."""
    width = 4096
    mesh = Mesh(np.array(targets.devices(Target.parse(chip))), ("one",))
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
        for shape in ((8192, width), *((width,),) * (1 + (function is layer_norm)))
    ]

    def gradients(x, *vectors):
        y, pull_back = jax.vjp(lambda x, *v: function(x, *v, implementation=implementation), x, *vectors)
        return pull_back(y)

    jax.clear_caches()  # Mosaic GPU compiles a kernel once
    with jax.set_mesh(mesh):
        texts = compile_to_ptx(jax.jit(gradients).lower(*structs))
    (text,) = (text for text in texts if re.search(r"\.entry \w*norm_backward", text))
    (kernel,) = assemble(text)
    assert kernel.spilled == 0 and kernel.reads == kernel.writes == 16
    rows = 2 * 2 * width  # bytes of a row of x and of one of its result's gradient
    assert blocks_of_an_sm(kernel) * rows > IN_FLIGHT
    if implementation == "triton":
        assert blocks_of_an_sm(kernel) * kernel.threads >= THREADS // 2
        before_the_loop, *_ = re.split(r"\$L__BB\w+:", text)
        assert before_the_loop.count("ld.global.v4") * 16 * kernel.threads == rows  # and each step loads the next ones
