"""Options of XLA's compiler: defaults of a platform, those of a configuration, and those that XLA refuses."""

import jax
import meshes
import model_fixtures
import pytest

from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from jaxlm.lowering.programs import step_programs
from jaxlm.models.execution_config import ExecutionConfig
from jaxlm.parallel.compiler_options import NO_ZERO_FILL, check, on_mesh
from jaxlm.training.changes import is_free

UNFILLED = {NO_ZERO_FILL: True}
OVERLAPPED = {**UNFILLED, "xla_gpu_enable_latency_hiding_scheduler": True}


@pytest.mark.parametrize(("chips", "expected"), [("h100-sxm5:1", UNFILLED), ("h100-sxm5:8", OVERLAPPED), (None, {})])
def test_a_platform_has_defaults(chips, expected):
    devices = jax.devices() if chips is None else targets.devices(Target.parse(chips))
    mesh = meshes.make(1, len(devices), devices=devices) if chips else meshes.make()
    assert on_mesh(mesh, {}) == expected


def test_options_of_a_configuration_come_over_the_defaults():
    mesh = meshes.make(1, 8, devices=targets.devices(Target.parse("h100-sxm5:8")))
    chosen = {"xla_gpu_enable_latency_hiding_scheduler": False, "xla_gpu_dot_merger_threshold_mb": 512}
    assert on_mesh(mesh, chosen) == UNFILLED | chosen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xla_nonsense": 1}, "XLA for a CPU has no option 'xla_nonsense'"),
        ({"xla_gpu_autotune_level": "high"}, "refuses a value: .*'high' is not a valid int32 value"),
    ],
)
def test_an_option_that_xla_does_not_take_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        check(meshes.make(), options)


def test_options_reach_the_programs_of_training(monkeypatch):
    monkeypatch.setattr("jaxlm.parallel.compiler_options.on_mesh", lambda *_: {"xla_nonsense": 1})
    experiment = model_fixtures.experiment(model_fixtures.model(num_layers=1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_nonsense'"):
        step_programs(experiment, "train", meshes.make()).step.compile()


def test_options_are_of_training_and_change_no_run():
    options = {"xla_cpu_enable_fast_math": False}
    assert hash(ExecutionConfig(compiler_options=options)) == hash(ExecutionConfig(compiler_options=dict(options)))
    assert is_free("execution.compiler_options") and is_free("execution.compiler_options.xla_cpu_enable_fast_math")
    experiment = model_fixtures.experiment(model_fixtures.model(), compiler_options=options)
    with pytest.raises(InputError, match=r"are of training alone: give execution.compiler_options=\{\}"):
        step_programs(experiment, "decode", meshes.make())
