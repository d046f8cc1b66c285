"""Attention on Hopper, as each assembler at hand makes it: the softmax overlaps the product of weights and values."""

import functools
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from markers import ELSEWHERE
from matrices import sampled

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import assembly, targets
from jaxlm.lowering.assemblers import assemblers, tool
from jaxlm.lowering.kernel_matrix import CHIPS
from kernels_pallas.flash_attention import causal, flash_attention

pytestmark = ELSEWHERE


@pytest.mark.parametrize(
    "width, keys", sampled([pytest.param(*each) for each in ((64, 128), (128, 128), (256, 64))], ["128-128"])
)
def test_exponentials_run_during_a_product(width, keys, tmp_path):
    """No product waits for another, nothing spills, and all exponentials of a step precede the wait for its second
    product, with a mask and without.
    """
    (device,) = targets.devices(Target.parse(CHIPS["H100"]))
    mesh = Mesh(np.array([device]), ("one",))
    x = jax.ShapeDtypeStruct((1, 1024, 1, width), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    attend = functools.partial(flash_attention, key_range=causal(1024), implementation="mosaic_gpu")
    with jax.set_mesh(mesh):
        texts = assembly.compile_to_ptx(jax.jit(attend).lower(x, x, x))
    (ptx,) = (text for text in texts if "wgmma" in text)
    for assembler in assemblers():
        binary, messages = assembler.run(ptx, "sm_90a")
        assert "C75" not in messages and re.search(r"\b0 bytes spill stores", messages), messages
        program = tmp_path / f"{assembler.release}.cubin"
        program.write_bytes(binary)
        listing = subprocess.run([tool("nvdisasm"), "-c", program], capture_output=True, text=True, check=True).stdout
        events = "".join(wait or "E" for wait, _ in re.findall(r"DEPBAR\.LE gsb0, 0x([01])|(MUFU\.EX2)", listing))
        # Each of 128 threads has keys / 2 scores of the 64 queries.
        assert [len(run) >= keys // 2 for run in re.findall("1(E*)0", events)] == [True, True], events
