"""Training at 8k context with kernels holds no array of queries × keys, on every chip that kernels are compiled for."""

import platform
import sys

import meshes
import model_fixtures
import pytest

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import hlo, targets
from jaxlm.lowering.kernel_matrix import CHIPS
from jaxlm.lowering.programs import step_programs

CONTEXT = 8192


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
@pytest.mark.exhaustive  # kernels alone hold none in `test_flash_attention_on_chips.py`
@pytest.mark.parametrize("chip", CHIPS)
def test_no_scores_are_held(chip):
    target = Target.parse(CHIPS[chip])
    devices = targets.devices(target)
    model = model_fixtures.model(
        model_fixtures.LLAMA,
        context_length=CONTEXT,
        num_layers=2,
        d_model=256,
        attention={"num_heads": 2, "head_dim": 128},
    )
    experiment = model_fixtures.experiment(model, batch=len(devices), sequence=CONTEXT, dtype="bfloat16")
    mesh = meshes.make(1, len(devices), 1, devices=devices)
    program = hlo.parse(step_programs(experiment, "train", mesh).step.trace().lower().compile().as_text())
    arrays = [a for c in program.computations.values() for i in c.instructions.values() for a in i.arrays]
    assert max(a.elements for a in arrays) < CONTEXT**2 / 4
