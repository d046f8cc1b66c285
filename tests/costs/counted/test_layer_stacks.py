"""The copies of a loop over layers, as counted and as XLA compiles them for an H100."""

from collections import Counter

import markers
import pytest

from jaxlm import api, config
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.counted.layer_stacks import StackCopies, stack_copies
from jaxlm.lowering import hlo
from jaxlm.lowering.launched_kernels import kernels
from jaxlm.parallel.compiler_options import NO_ZERO_FILL

MODEL = """
[model]
vocab_size = 512
context_length = 512
num_layers = 2
d_model = 256
attention = {kind = "gqa", num_heads = 4, num_kv_heads = 2, head_dim = 64}
feed_forward = {kind = "dense", d_ff = 1024, activation = "silu", gated = true}
[training]
batch = 16
sequence = 512
"""
FILLED = f"execution.compiler_options.{NO_ZERO_FILL}=false"


@pytest.fixture
def load(tmp_path):
    (tmp_path / "two.toml").write_text(MODEL)
    return lambda *overrides: config.load(tmp_path / "two.toml", overrides)


def counted(experiment, on="h100") -> StackCopies:
    (plan,), _ = api.plan(experiment, on)
    return stack_copies(device_step(plan.work))


def test_only_a_loop_on_a_gpu_copies(load):
    in_a_loop = load("execution.scan_layers=true")
    filled, into, out_of = counted(in_a_loop)
    assert not filled and into >= out_of > into // 2
    assert counted(load("execution.scan_layers=true", FILLED)) == (into // 2, into, out_of)
    nothing = StackCopies(0, 0, 0)
    assert counted(load()) == counted(in_a_loop, "tpu-v5p") == counted(load("model.num_layers=1")) == nothing
    assert counted(load("execution.scan_layers=true", "execution.remat=full")).into < into / 4


@markers.ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [(), (FILLED,)], ids=["unfilled", "filled"])
def test_copies_are_those_of_the_compiled_program(load, options):
    """Kernels that slice or update the large arrays of a loop, which no parameter is, and those that fill them."""
    experiment = load("execution.scan_layers=true", *options)
    program = hlo.parse(api.compile(experiment, "h100").texts["optimised.hlo"])
    compiled: Counter[str] = Counter()
    for kernel in kernels(program):
        if kernel.bytes > 4_000_000:
            compiled[kernel.name.partition(".")[0]] += kernel.count * kernel.bytes
    filled, into, out_of = counted(experiment)
    assert compiled["loop_broadcast_fusion"] + compiled["broadcast_in_dim"] == pytest.approx(filled, rel=0.01)
    assert compiled["dynamic_update_slice"] == pytest.approx(into, rel=0.01)
    # One copy out of a stack also reads a gradient, which it sums.
    assert compiled["backward dynamic_slice"] == pytest.approx(out_of, rel=0.03)
