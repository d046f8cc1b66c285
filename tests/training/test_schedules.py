import numpy as np
import pytest

from jaxlm.training.config import (
    ConstantScheduleConfig,
    CosineScheduleConfig,
    LinearScheduleConfig,
    ScheduleConfig,
    WarmupStableDecayScheduleConfig,
)
from jaxlm.training.schedules import schedule


# Learning rates at the corners, where the peak is 2.
@pytest.mark.parametrize(
    ("settings", "corners"),
    [
        (
            CosineScheduleConfig(warmup_steps=10, decay_steps=110, final_fraction=0.1),
            {0: 0.0, 5: 1.0, 10: 2.0, 60: 1.1, 110: 0.2, 500: 0.2},
        ),
        (CosineScheduleConfig(decay_steps=10), {0: 2.0, 5: 1.1, 10: 0.2, 11: 0.2}),
        (
            LinearScheduleConfig(warmup_steps=10, decay_steps=110, final_fraction=0.5),
            {0: 0.0, 5: 1.0, 10: 2.0, 60: 1.5, 110: 1.0, 500: 1.0},
        ),
        (LinearScheduleConfig(decay_steps=10), {0: 2.0, 5: 1.0, 10: 0.0, 11: 0.0}),
        (
            WarmupStableDecayScheduleConfig(warmup_steps=10, decay_steps=100, decay_fraction=0.2, final_fraction=0.1),
            {0: 0.0, 5: 1.0, 10: 2.0, 11: 2.0, 79: 2.0, 80: 2.0, 81: 1.91, 90: 1.1, 100: 0.2, 500: 0.2},
        ),
        (WarmupStableDecayScheduleConfig(decay_steps=10), {0: 2.0, 8: 2.0, 9: 1.0, 10: 0.0, 99: 0.0}),
        # Nothing is left to be stable, or to warm up, or to decay.
        (WarmupStableDecayScheduleConfig(decay_steps=10, decay_fraction=1.0), {0: 2.0, 5: 1.0, 10: 0.0}),
        (
            WarmupStableDecayScheduleConfig(warmup_steps=8, decay_steps=10, decay_fraction=0.9),
            {0: 0.0, 4: 1.0, 8: 2.0, 9: 1.0, 10: 0.0},
        ),
        (WarmupStableDecayScheduleConfig(decay_steps=10, decay_fraction=1e-6), {9: 2.0, 10: 0.0}),
        (ConstantScheduleConfig(warmup_steps=4), {0: 0.0, 1: 0.5, 4: 2.0, 10_000: 2.0}),
        (ConstantScheduleConfig(), {0: 2.0, 10_000: 2.0}),
    ],
    ids=str,
)
def test_a_schedule_at_its_corners(settings, corners):
    rate = schedule(settings, peak=2.0)
    np.testing.assert_allclose([rate(s) for s in corners], list(corners.values()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [CosineScheduleConfig, LinearScheduleConfig, WarmupStableDecayScheduleConfig])
def test_a_run_that_ends_inside_its_warmup_rises_to_its_end(kind):
    rate = schedule(kind(warmup_steps=100, decay_steps=10), peak=1.0)
    np.testing.assert_allclose([rate(s) for s in (0, 5, 10, 100)], [0.0, 0.05, 0.1, 1.0], rtol=1e-6)


def test_a_kind_without_a_schedule_is_named():
    with pytest.raises(TypeError, match="no schedule ScheduleConfig"):
        schedule(ScheduleConfig(kind="other"), peak=1.0)
