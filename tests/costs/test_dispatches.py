"""The programs that the host starts for a step, as the engine starts them."""

from dataclasses import replace

import model_fixtures
import pytest

from jaxlm.costs.dispatches import dispatches, engine_turns, steps_together
from jaxlm.costs.hardware.catalog import find
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.timing.step_time import step_time
from jaxlm.costs.workload import Workload

SMALL = Workload("decode", model_fixtures.model(context_length=512), 8, 256).on(find("tpu-v6e"))


def test_steps_of_one_program_share_its_start():
    alone = replace(SMALL, steps_per_dispatch=1)
    assert (steps_together(SMALL), engine_turns(SMALL), dispatches(SMALL)) == (8, 1 / 8, 1 / 8)
    assert (steps_together(alone), engine_turns(alone), dispatches(alone)) == (1, 1, 2)
    together, single = (step_time(work, Target.parse("tpu-v6e:1x1")) for work in (SMALL, alone))
    assert together.expected < 0.5 * single.expected, "the host takes most of so small a step"


@pytest.mark.parametrize(
    "work",
    [
        replace(SMALL, drafts=2, acceptance=0.5),
        replace(SMALL, kind="prefill"),
        replace(SMALL, is_padded=False),
        replace(SMALL, batch=1 << 16),
    ],
    ids=["drafts", "prefill", "another engine", "many rows"],
)
def test_others_have_one_step(work):
    assert steps_together(work) == 1
