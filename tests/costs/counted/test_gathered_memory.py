"""The memory of parameters that are gathered, beside what XLA's programs have (docs/memory.md)."""

import meshes
import model_fixtures
from workload_fixtures import changed, workload

from jaxlm.costs.counted import gathered_memory
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.counted.layer_memory import backward


def mixture_step(platform: str = "gpu", devices: int = 4, **changes):
    model = model_fixtures.model(model_fixtures.MIXTURE)
    work = workload("train", model, 16, 32, remat="full", layout=meshes.layout(1, devices, 1), platform=platform)
    return device_step(changed(work, **{"scan_layers": True, **changes}))


def experts(step) -> list:
    return [use for use in step.recording.by_layer[len(step.recording.layers) - 1] if step.cost(use).gathers]


def places(step):
    last = len(step.recording.layers) - 1
    trained = {path for path in step.work.parameters if path not in step.work.base}
    return list(gathered_memory.in_backward(step, last, backward(step, last), trained))


def test_a_trip_of_a_gpus_loop_begins_with_the_experts_gradients_of_the_layer_before():
    step = mixture_step()
    uses = experts(step)
    whole = sum(map(step.weight_bytes, uses))
    first, second = places(step)
    assert len(uses) == 3 and first.waiting == second.waiting == whole
    # The matrices that run again and a copy of one in the array's order, beside all three gradients.
    assert first.gathered == sum(map(step.weight_bytes, uses[:2])) + step.weight_bytes(uses[0])
    for other in (mixture_step("tpu"), mixture_step(scan_layers=False), mixture_step(devices=1)):
        assert len(places(other)) == 1


def test_gathers_of_the_first_trip_begin_before_the_loss():
    step = mixture_step()
    table = gathered_memory.at_loss(mixture_step("tpu"))
    assert gathered_memory.at_loss(step) - table >= sum(map(step.weight_bytes, experts(step)[:2]))
    assert gathered_memory.at_loss(mixture_step(remat="none")) == table


def test_copied_parameters_leave_their_place_to_the_next_copy_and_to_gradients():
    step = mixture_step()
    copies, trained = gathered_memory.laid_out_again(step), set(step.work.parameters)
    whole, largest = sum(copies.values()), max(copies.values())
    assert gathered_memory.reused(step, copies, trained) == (whole - largest, whole)
    written_out, wide = mixture_step(scan_layers=False), mixture_step(dtype="float32")
    assert gathered_memory.reused(written_out, copies, trained) == (whole - largest, whole - largest)
    assert gathered_memory.reused(step, copies, ()) == gathered_memory.reused(wide, copies, trained) == (0, 0)
